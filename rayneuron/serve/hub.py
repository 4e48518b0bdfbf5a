"""The replica's side of gateways: their orders, which come by Serve, and a connection to each, over which the tokens go."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from typing import Any, Protocol

import msgspec

from rayneuron import frames, wire
from rayneuron.config import Deployment
from rayneuron.errors import RayNeuronError
from rayneuron.frames import Alive, Cancel, Card, FromGateway, Greeting, Leaving, Order, Piece, Reception, Refusal, Settled, Tokens
from rayneuron.news import Pressure
from rayneuron.serve.flight import Flights
from rayneuron.serve.hot import Known
from rayneuron.serve.verbs import Verbs
from rayneuron.types import TokenDelta

log = logging.getLogger(__name__)

TICK_S = 0.05  # how often a busy replica says how busy it is
IDLE_S = 0.5  # and one with nothing to do
SILENT_S = 5.0  # a gateway that says nothing for so long is gone, and its orders with it
MOST_UNREAD = 64 * 2**20  # bytes that wait for a gateway which does not read


class Owner(Protocol):
    """The replica a hub belongs to, as far as it is concerned."""

    @property
    def now(self) -> Verbs: ...

    @property
    def flights(self) -> Flights: ...

    def pressure(self, seen: int) -> Pressure:
        """How busy it is, with the orders up to `seen`."""


class Hub:
    """Takes orders and sends their tokens, one frame a step to each gateway. Belongs to the event loop.

    A gateway that has gone takes its orders with it: plain Serve lets a call run on whose caller is dead.
    """

    def __init__(self, owner: Owner, replica: str) -> None:
        self.replica = replica
        self.epoch = secrets.token_bytes(8)
        self.token = secrets.token_bytes(16)
        self.address = ""
        self.refused = 0  # connections that showed no token, or spoke another language
        self.callers: dict[bytes, Caller] = {}
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._tick: asyncio.Task[None] | None = None

    async def listen(self, ip: str) -> None:
        """Wait for gateways at an address of this node."""
        loop = asyncio.get_running_loop()
        listener = wire.listen(ip)
        self.address = wire.address(listener)
        self._server = await loop.create_server(lambda: Caller(self), sock=listener)
        self._tick = loop.create_task(self._run())

    async def answer(self, blob: bytes) -> bytes:
        """Serve an order to its end; its tokens go over the gateway's connection."""
        return msgspec.msgpack.encode(await self._answer(msgspec.msgpack.decode(blob, type=Order)))

    async def _answer(self, order: Order) -> Settled:
        caller = self.callers.get(order.gateway)
        if order.replica != self.replica or caller is None:
            return Settled(misdirected=True)
        reader = Forward(caller, order.number, len(order.request.output_ids))
        caller.seen = max(caller.seen, order.number)
        headers = {b"traceparent": order.trace.encode()} if order.trace else {}
        arrival_s = time.monotonic() - order.waited_s
        limit_s = None if order.left_s is None else order.left_s + order.waited_s
        refused = None
        caller.orders[order.number] = order.request.id
        try:
            with self._owner.now.carry([order.request], lambda request: reader, arrival_s, limit_s, headers) as flight:
                await flight.finish()
        except RayNeuronError as wrong:
            refused = Refusal.of(wrong)
        finally:
            caller.orders.pop(order.number, None)
        return Settled(refused=refused, tokens=reader.counts)

    def card(self, config: Deployment, opened: Known, kv_tokens: int, user_config: dict[str, Any] | None) -> bytes:
        """What a gateway has to know of this replica."""
        card = Card(
            replica=self.replica,
            epoch=self.epoch,
            address=self.address,
            token=self.token,
            args=config.model_dump(exclude_unset=True, mode="json"),
            user_config=user_config,
            rows=opened.engine.capacity.rows,
            length=opened.engine.capacity.length,
            kv_tokens=kv_tokens,
            vocab=opened.engine.vocab,
            generation=opened.generation,
            chosen=opened.chosen,
        )
        return msgspec.msgpack.encode(card)

    def cancel(self, caller: Caller, what: Cancel) -> None:
        """A gateway wants no more of an order."""
        if what.order in caller.orders:
            self._owner.flights.end(caller.orders[what.order], what.index, what.reason)

    def gone(self, caller: Caller) -> None:
        """A connection has ended."""
        if self.callers.get(caller.gateway) is caller:
            del self.callers[caller.gateway]
            for request in list(caller.orders.values()):
                self._owner.flights.end(request, None, "abort")

    def leave(self, within_s: float) -> None:
        """Tell everybody that this replica takes no more, and ends what it has within so long."""
        for caller in self.callers.values():
            caller.send(Leaving(within_s))

    async def close(self) -> None:
        """Hang up."""
        if self._tick is not None:
            self._tick.cancel()
        if self._server is not None:
            self._server.close()
        for caller in list(self.callers.values()):
            caller.hang_up()

    def pressure(self, caller: Caller) -> Pressure:
        """How busy the replica is, as that gateway hears it."""
        return self._owner.pressure(caller.seen)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            for caller in list(self.callers.values()):
                try:
                    caller.tick(now_s)
                except Exception:  # one gateway's trouble is not the others'
                    log.exception("a gateway could not be told how busy this replica is")
                    caller.hang_up()


class Forward:
    """Stands where a call's text stands: what a step gave goes on to the gateway as it is."""

    def __init__(self, caller: Caller, order: int, before: int) -> None:
        self.counts: dict[int, int] = {}
        self._caller, self._order, self._before = caller, order, before

    def push(self, delta: TokenDelta) -> None:
        """Into this step's frame."""
        had = self.counts.get(delta.index, 0)
        self.counts[delta.index] = had + len(delta.token_ids)
        self._caller.add(Piece(self._order, self._before + had, delta))


class Caller(asyncio.Protocol):
    """The connection of one gateway. `orders`: those under way, with their request's id; `seen`: the last of them."""

    def __init__(self, hub: Hub) -> None:
        self.gateway = b""
        self.orders: dict[int, str] = {}
        self.seen = 0
        self._hub = hub
        self._frames: wire.Frames[FromGateway] = wire.Frames(FromGateway, wire.FIRST_BYTES)
        self._pieces: list[Piece] = []
        self._number = 0
        self._heard_s = self._told_s = time.monotonic()
        self._told_seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody has connected, who has to say who it is."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        found = transport.get_extra_info("socket")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.keep_alive(found, SILENT_S)
        asyncio.get_running_loop().call_later(SILENT_S, self._nobody)

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        self._heard_s = time.monotonic()
        self._frames.add(data)
        try:
            while (message := self._frames.take()) is not None:
                self._hear(message)
        except wire.WireError as wrong:
            self._refuse(str(wrong))

    def _hear(self, message: FromGateway) -> None:
        if isinstance(message, Greeting) and not self.gateway:
            self._greeted(message)
        elif not self.gateway:
            self._refuse("its first word was no greeting")
        elif isinstance(message, Cancel):
            self._hub.cancel(self, message)
        else:
            assert isinstance(message, Alive | Greeting)

    def _greeted(self, greeting: Greeting) -> None:
        if greeting.version != frames.VERSION:
            self._refuse(f"it speaks version {greeting.version} of what gateways say, this replica {frames.VERSION}")
        elif not wire.same_token(greeting.token, self._hub.token) or greeting.epoch != self._hub.epoch or not greeting.gateway:
            self._refuse("it does not know this replica's token")
        else:
            self.gateway = greeting.gateway
            self._frames.limit_bytes = frames.MOST_BYTES
            before = self._hub.callers.get(self.gateway)
            if before is not None:
                before.hang_up()
                self._hub.gone(before)
            self._hub.callers[self.gateway] = self
            self.send(Reception(self._hub.epoch))

    def _refuse(self, why: str) -> None:
        self._hub.refused += 1
        log.warning("a connection is refused: %s", why)
        self.send(Reception(b""))
        self._transport.close()

    def _nobody(self) -> None:
        if not self.gateway:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, whoever ended it."""
        self._hub.gone(self)

    def add(self, piece: Piece) -> None:
        """What a step gave; all of a step goes in one frame."""
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pieces.append(piece)

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        self._tell(pieces, self._hub.pressure(self) if self.seen > self._told_seen else None)

    def tick(self, now_s: float) -> None:
        """Say how busy the replica is, where it is time to; hang up where nothing has been heard for long."""
        if now_s - self._heard_s > SILENT_S:
            log.warning("a gateway has said nothing for %g s: its %d orders end", SILENT_S, len(self.orders))
            return self.hang_up()
        pressure = self._hub.pressure(self)
        if now_s - self._told_s >= (TICK_S if pressure.rows or pressure.waiting else IDLE_S):
            self._tell([], pressure)

    def _tell(self, pieces: list[Piece], pressure: Pressure | None) -> None:
        if pressure is not None:
            self._told_s, self._told_seen = time.monotonic(), pressure.seen
        self._number += 1
        self.send(Tokens(self._number, pieces, pressure))

    def send(self, message: msgspec.Struct) -> None:
        """Write a message; whoever does not read what it is told is hung up on."""
        if self._transport.get_write_buffer_size() > MOST_UNREAD:
            return self.hang_up()
        self._transport.write(wire.frame(message))

    def hang_up(self) -> None:
        """End the connection at once."""
        self._transport.abort()

