"""The replica's side of gateways: a connection to each, over which its orders come and their tokens go."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any, Protocol

import msgspec

from rayneuron import wire
from rayneuron.config import Deployment
from rayneuron.errors import NotReady, RayNeuronError
from rayneuron.frames import (
    Cancel,
    Card,
    Leaving,
    Order,
    OrderEnded,
    Refusal,
)
from rayneuron.loading import Opened
from rayneuron.news import KvNews, Pressure
from rayneuron.serve.flight import Flights
from rayneuron.serve.peer import TICK_S, Caller, Forward
from rayneuron.serve.verbs import Verbs
from rayneuron.types import FinishReason, TokenDelta

log = logging.getLogger(__name__)

STIR_S = 0.01  # between an order that comes or ends and the word of it to every gateway


class Owner(Protocol):
    """The replica a hub belongs to, as far as it is concerned."""

    @property
    def now(self) -> Verbs: ...

    @property
    def flights(self) -> Flights: ...

    @property
    def failed(self) -> bool:
        """Whether a step has failed, so that nothing it was asked for goes on."""

    def pressure(self, seen: int) -> Pressure:
        """How busy it is, with the orders up to `seen`."""

    def taken(self, request_id: str) -> bool:
        """Whether its pressure counts a request in."""

    def news(self, epoch: int, number: int) -> asyncio.Future[KvNews | None] | None:
        """What who knows its prefixes up to `number` of `epoch` lacks; None where nothing is kept."""


class Hub:
    """Takes orders and sends their tokens, one frame a step to each gateway. Belongs to the event loop.

    A gateway that has gone takes its orders with it: plain Serve lets a call run on whose caller is dead.
    """

    def __init__(self, owner: Owner, replica: str) -> None:
        self.replica = replica
        self.epoch = secrets.token_bytes(8)
        self.token = secrets.token_bytes(16)
        self.address = ""
        self.left = False  # it takes no more orders
        self.refused = 0  # connections that showed no token, or spoke another language
        self.callers: dict[bytes, Caller] = {}
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._tick: asyncio.Task[None] | None = None
        self._stirred: asyncio.TimerHandle | None = None
        self._orders: set[asyncio.Task[None]] = set()

    async def listen(self, ip: str) -> None:
        """Wait for gateways at an address of this node."""
        loop = asyncio.get_running_loop()
        listener = wire.listen(ip)
        self.address = wire.address(listener)
        self._server = await loop.create_server(lambda: Caller(self), sock=listener)
        self._tick = loop.create_task(self._run())

    async def attend(self, gateway: bytes, replica: str) -> bool:
        """Wait for as long as there are orders of a gateway for this call to stand for: what Serve counts, and lets end before a replica
        does, are calls. False: it came to another replica, or from nobody who is connected."""
        caller = self.callers.get(gateway)
        if replica != self.replica or caller is None:
            return False
        await caller.attended()
        return True

    def order(self, caller: Caller, order: Order) -> None:
        """Serve an order to its end; its tokens go over its gateway's connection, and how it ended where they do not say so."""
        if self.left:
            return caller.send(OrderEnded(order.number))
        task = asyncio.get_running_loop().create_task(self._settle(caller, order))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _settle(self, caller: Caller, order: Order) -> None:
        try:
            ended = await self._answer(caller, order)
        except Exception:
            log.exception("order %s failed, and all of its gateway with it", order.request.id)
            return caller.hang_up()
        if ended is not None:
            caller.send(ended)

    async def _answer(self, caller: Caller, order: Order) -> OrderEnded | None:
        reader = Forward(caller, order.number, len(order.request.output_ids))
        headers = {b"traceparent": order.request.trace.encode("latin-1")} if order.request.trace else {}
        arrival_s = time.monotonic() - order.waited_s
        limit_s = None if order.left_s is None else order.left_s + order.waited_s
        begun = False
        caller.take(order.number, order.request.id)
        self._stir()
        try:
            with self._owner.now.carry([order.request], lambda request: reader, arrival_s, limit_s, headers) as flight:
                begun = True
                await flight.finish()
                return None
        except RayNeuronError as wrong:
            if not begun and isinstance(wrong, NotReady):
                return OrderEnded(order.number)
            if self._owner.failed:
                self.leave(0.0, failed=True)  # ahead of the connection's end
            return OrderEnded(order.number, Refusal.of(wrong), self._owner.failed)
        finally:
            caller.orders.pop(order.number, None)
            self._stir()

    def card(self, config: Deployment, opened: Opened, user_config: dict[str, Any] | None) -> bytes:
        """What a gateway has to know of this replica."""
        engine = opened.engine
        card = Card(
            replica=self.replica,
            epoch=self.epoch,
            address=self.address,
            token=self.token,
            args=config.model_dump(exclude_unset=True, mode="json", exclude={"serving": {"seat"}}),
            user_config=user_config,
            rows=engine.capacity.rows,
            length=engine.capacity.length,
            kv_tokens=engine.scheduler.blocks.total_tokens,
            block=engine.capacity.block,
            vocab=engine.vocab,
            model=engine.scheduler.model,
            profile=engine.timing.profile() if engine.timing is not None else None,
            generation=opened.generation,
            chosen=opened.chosen,
            adapters=dict(engine.adapters.names),
        )
        return msgspec.msgpack.encode(card)

    def cancel(self, caller: Caller, what: Cancel) -> None:
        """A gateway wants no more of an order."""
        if what.order in caller.orders:
            _end(self._owner.flights, caller.orders[what.order], what.index, what.reason)

    def gone(self, caller: Caller) -> None:
        """A connection has ended."""
        if self.callers.get(caller.gateway) is caller:
            del self.callers[caller.gateway]
            caller.dismiss(0)
            for request in list(caller.orders.values()):
                _end(self._owner.flights, request, None, "abort")

    def leave(self, within_s: float, failed: bool = False) -> None:
        """Tell everybody that this replica takes no more, and ends what it has within so long; where it has `failed`, not at all."""
        self.left = True
        for caller in self.callers.values():
            caller.send(Leaving(within_s, failed))

    async def ended(self, within_s: float) -> None:
        """Return when no order is under way, or after so long."""
        if self._orders:
            await asyncio.wait(self._orders, timeout=max(0.0, within_s))

    async def close(self) -> None:
        """Hang up."""
        if self._tick is not None:
            self._tick.cancel()
        if self._stirred is not None:
            self._stirred.cancel()
        if self._server is not None:
            self._server.close()
        for caller in list(self.callers.values()):
            caller.hang_up()

    def news(self, caller: Caller) -> asyncio.Future[KvNews | None] | None:
        """What that gateway has not heard of the prefixes here."""
        return self._owner.news(*caller.known)

    def pressure(self, caller: Caller) -> Pressure:
        """How busy the replica is, as that gateway hears it."""
        coming = [number for number, request in caller.orders.items() if not self._owner.taken(request)]
        return self._owner.pressure(min(coming) - 1 if coming else caller.seen)

    @property
    def waiting_ms(self) -> float:
        """This replica's part of the work that waits at gateways."""
        return sum(caller.waiting_ms for caller in self.callers.values())

    def _stir(self) -> None:
        """The load has changed: all gateways hear of it soon, those most of all who do not know of the order."""
        if self._stirred is None and len(self.callers) > 1:
            self._stirred = asyncio.get_running_loop().call_later(STIR_S, self._tell_all)

    def _tell_all(self) -> None:
        self._stirred = None
        if any(not self._owner.taken(request) for caller in self.callers.values() for request in caller.orders.values()):
            return self._stir()  # in the middle of a step: behind it they count
        for caller in list(self.callers.values()):
            caller.tell()

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


def _end(flights: Flights, request_id: str, index: int | None, reason: FinishReason) -> None:
    """Whoever reads a request's tokens wants no more of it, or of one choice of it. Harmless where there is none."""
    flight = flights.by_request.get(request_id)
    active = None if flight is None else flight.actives[request_id]
    if flight is None or active is None or flight.ended:
        return
    for choice in range(active.request.params.n) if index is None else (index,):
        if choice not in active.done:
            active.tokens.setdefault(choice, 0)
            active.finish(TokenDelta(request_id, choice, []), reason, time.monotonic(), flights.telemetry)
            flights.sequences -= 1
            flights.engine.abort(request_id, choice)
            flight.settle()
