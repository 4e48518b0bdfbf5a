"""The connection of one gateway to this replica: what it may say, and what it is told, one frame a step."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Protocol, cast

import msgspec

from rayneuron import frames, wire
from rayneuron.frames import Alive, Cancel, FromGateway, Gain, Greeting, KvEvents, Order, Reception, Tokens
from rayneuron.news import KvNews, Pressure
from rayneuron.types import TokenDelta

log = logging.getLogger(__name__)

TICK_S = 0.05  # how often a busy replica says how busy it is
IDLE_S = 0.5  # and one with nothing to do
SILENT_S = 5.0  # a gateway that says nothing for so long is gone, and its orders with it
AWAY_S = 1.5  # between two ticks: this process has not run, or hardly
ATTENDED_S = 0.25  # for how long a call of Serve stands for an order that has ended: the next one takes it over
MOST_UNREAD = 64 * 2**20  # bytes that wait for a gateway which does not read


class Switch(Protocol):
    """Whom connections belong to: `serve.hub.Hub`."""

    token: bytes
    epoch: bytes
    refused: int
    callers: dict[bytes, Caller]

    def cancel(self, caller: Caller, what: Cancel) -> None: ...

    def order(self, caller: Caller, order: Order) -> None: ...

    def gone(self, caller: Caller) -> None: ...

    def pressure(self, caller: Caller) -> Pressure: ...

    def news(self, caller: Caller) -> asyncio.Future[KvNews | None] | None: ...


class Forward:
    """Stands where a call's text stands: what a step gave goes on to the gateway as it is."""

    def __init__(self, caller: Caller, order: int, before: int) -> None:
        self.counts: dict[int, int] = {}
        self._caller, self._order, self._before = caller, order, before

    def push(self, delta: TokenDelta) -> None:
        """Into this step's frame."""
        had = self.counts.get(delta.index, 0)
        self.counts[delta.index] = had + len(delta.token_ids)
        self._caller.add(Gain(self._order, self._before + had, delta))


class Caller(asyncio.Protocol):
    """The connection of one gateway. `orders`: those under way, with their request's id; `seen`: the last of them; `known`: up to where it
    has heard of prefixes; `waiting_ms`: this replica's part of the work that waits there; `attending`: its calls that stand for orders."""

    def __init__(self, hub: Switch) -> None:
        self.gateway = b""
        self.orders: dict[int, str] = {}
        self.seen = 0
        self.known = (0, 0)
        self.waiting_ms = 0.0
        self.attending: list[asyncio.Future[None]] = []
        self._most = 0  # orders at once since _reviewed_s
        self._hub = hub
        self._news: asyncio.Future[KvNews | None] | None = None
        self._frames: wire.Frames[FromGateway] = wire.Frames(FromGateway, wire.FIRST_BYTES)
        self._pieces: list[Gain] = []
        self._number = 0
        self._heard_s = self._told_s = self._ticked_s = self._reviewed_s = time.monotonic()
        self._told_seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody has connected, who has to say who it is."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        found = transport.get_extra_info("socket")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.keep_alive(found, SILENT_S)
        asyncio.get_running_loop().call_later(SILENT_S, self._nobody)

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        self._heard_s = time.monotonic()
        self._frames.add(data)
        try:
            while not self._transport.is_closing() and (message := self._frames.take()) is not None:
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
        elif isinstance(message, Order):
            self._hub.order(self, message)
        elif isinstance(message, Alive):
            self.waiting_ms = message.waiting_ms

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
            self.send(Reception(self._hub.epoch, self._hub.pressure(self)))

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

    def take(self, order: int, request_id: str) -> None:
        """An order has come."""
        self.seen = max(self.seen, order)
        self.orders[order] = request_id
        self._most = max(self._most, len(self.orders))

    async def attended(self) -> None:
        """Until there are fewer orders than calls that stand for them."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.attending.append(over)
        try:
            await over
        finally:
            if over in self.attending:
                self.attending.remove(over)

    def dismiss(self, left: int) -> None:
        """Let all but so many of those calls end."""
        while len(self.attending) > left:
            over = self.attending.pop()
            if not over.done():
                over.set_result(None)

    def add(self, piece: Gain) -> None:
        """What a step gave; all of a step goes in one frame."""
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pieces.append(piece)

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        due = self.seen > self._told_seen or time.monotonic() - self._told_s > TICK_S / 2  # it rides along, so that no frame is its own
        due = due or any([piece.delta.finish_reason for piece in pieces])  # whose row is free: idle, it would be thought busy until later
        self._tell(pieces, self._hub.pressure(self) if due else None)

    def tick(self, now_s: float) -> None:
        """Say how busy the replica is, where it is time to; hang up where nothing has been heard for long while this process ran."""
        if now_s - self._ticked_s > AWAY_S:
            self._heard_s = now_s
        self._ticked_s = now_s
        if now_s - self._heard_s > SILENT_S:
            log.warning("a gateway has said nothing for %g s: its %d orders end", SILENT_S, len(self.orders))
            return self.hang_up()
        if now_s - self._reviewed_s > ATTENDED_S:
            self.dismiss(self._most)
            self._reviewed_s, self._most = now_s, len(self.orders)
        if now_s - self._told_s >= TICK_S:
            pressure = self._hub.pressure(self)
            if pressure.rows or pressure.waiting or now_s - self._told_s >= IDLE_S:
                self._tell([], pressure)
        if self._news is None and (news := self._hub.news(self)) is not None:
            self._news = news
            news.add_done_callback(self._heard_news)

    def _heard_news(self, told: asyncio.Future[KvNews | None]) -> None:
        self._news = None
        news = None if told.cancelled() or told.exception() is not None else told.result()
        if news is not None and (news.batches or (news.epoch, news.number) != self.known):
            self.known = (news.epoch, news.number)
            self.send(KvEvents(news))

    def tell(self) -> None:
        """Say how busy the replica is."""
        self._tell([], self._hub.pressure(self))

    def _tell(self, pieces: list[Gain], pressure: Pressure | None) -> None:
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

