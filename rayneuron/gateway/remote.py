"""RemoteEngine: an engine that is elsewhere, in as many replicas as there are; what `engine.loop.EngineLoop` is where it is here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rayneuron.errors import Busy, NotReady, RayNeuronError, RequestError, RequestTimeout, WorkerLost
from rayneuron.frames import Card, Order, Settled, Tokens
from rayneuron.gateway.fleet import Fleet, Linked
from rayneuron.gateway.least import Ask, Desk
from rayneuron.gateway.ways import Way, shifted
from rayneuron.policies.admission import validate
from rayneuron.types import Fault, FinishReason, Request, Snapshot, TokenDelta

log = logging.getLogger(__name__)

TICK_S = 0.25
AGAIN_S = 0.05  # before an order that came to the wrong replica, or was too many, is sent anew
REST_S = 1.0  # for tokens of which the replica says that it has sent them


class Orders(Protocol):
    """How orders reach replicas: `gateway.dispatch`, by Serve."""

    async def send(self, order: Order) -> Settled:
        """Until every choice of it has ended. Raises whatever Serve says of a replica that has died."""


@dataclass(frozen=True, slots=True)
class Together:
    """How much all replicas together hold: `serve.hot.Sizes`."""

    rows: int
    length: int


class RemoteEngine:
    """The engine of one model in a gateway: requests wait at the desk, go to a replica, and go on at another where that one is lost.

    Belongs to the event loop. `deliver` takes the deltas of a step, as `serve.flight.Flights.dispatch` does.
    """

    error: str | None = None
    alive = True
    timing = None

    def __init__(
        self, orders: Orders, deliver: Callable[[list[TokenDelta]], None], eos_ids: frozenset[int] = frozenset(), *,
        hold_s: float = 30.0, limit: int = 3, strikes: int = 2,
    ) -> None:  # fmt: skip
        self.gateway = secrets.token_bytes(8)
        self.fleet = Fleet(self.gateway, self)
        self.replays: Counter[tuple[str, str]] = Counter()  # by cause and outcome
        self.replayed = self.misdirected = 0
        self.desk = Desk()
        self._orders, self._deliver, self._eos_ids = orders, deliver, eos_ids
        self._hold_s, self._limit, self._strikes = hold_s, limit, strikes
        self._keys = itertools.count(1)
        self._ways: dict[int, Way] = {}  # by key
        self._placed: dict[tuple[int, int], Way] = {}  # by worker and number of the order
        self._asked: dict[str, dict[int, Way]] = {}  # by request, then key
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.create_task(self._tick())

    @property
    def known(self) -> Card:
        """What all replicas of this model are like. Raises NotReady before one has shown its card."""
        if self.fleet.card is None:
            raise NotReady("no replica of this model has been seen yet")
        return self.fleet.card

    @property
    def vocab(self) -> int:
        """Ids there are."""
        return self.known.vocab

    @property
    def capacity(self) -> Together:
        """Rows of all replicas that are there."""
        return Together(sum(worker.link.card.rows for worker in self.fleet.able), self.known.length)

    def submit(self, request: Request) -> None:
        """Hand over a request. Raises RequestError, Busy, NotReady."""
        card = self.known
        validate(request, card.length, card.kv_tokens, card.vocab, self._eos_ids)
        if request.id in self._asked:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        if not self.fleet.able:
            raise NotReady("no replica of this model is ready")
        choices = range(request.params.n)
        self._begin(Way(next(self._keys), request, {i: i for i in choices}, set(choices), {i: [] for i in choices}))
        self._pump()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Nobody wants the request, or one of its choices, any more."""
        for way in list(self._asked.get(request_id, {}).values()):
            if index is not None and index not in way.choices.values():
                continue
            unwanted = way.open if index is None else way.open & {index}
            reason: FinishReason = "abort" if index is None else "stop"
            if way.worker is not None and unwanted:
                here = next(local for local, client in way.choices.items() if client in unwanted)
                whole = unwanted == way.open
                self.fleet.workers[way.worker].link.cancel(way.number, None if whole else here, reason)
            way.open -= unwanted
            self._end_if_done(way)
        self._pump()

    def snapshot(self) -> Snapshot:
        """The load of all replicas together; what waits here waits too."""
        able = self.fleet.able
        rows, total = sum(w.link.card.rows for w in able), sum(w.link.card.kv_tokens for w in able)
        return Snapshot(
            running=sum(w.pressure.rows for w in able),
            waiting=self.desk.waiting + sum(w.pressure.waiting for w in able),
            slots_free=sum(w.pressure.slots_free for w in able),
            slots_total=rows,
            kv_tokens_used=total - sum(w.pressure.kv_free for w in able),
            kv_tokens_total=total,
        )

    def pending(self) -> bool:
        """Whether somebody waits for anything."""
        return bool(self._ways)

    def under_way(self) -> tuple[int, int]:
        """Requests at the desk, and at replicas."""
        return len(self._ways) - len(self._placed), len(self._placed)

    def close(self) -> None:
        """Hang up everywhere."""
        self._ticker.cancel()
        self.fleet.close()

    def joined(self, worker: Linked) -> None:
        """A replica is connected."""
        self.desk.join(worker.number, worker.link.card.rows)
        self._pump()

    def heard(self, worker: Linked, tokens: Tokens) -> None:
        """What a step of a replica gave."""
        deltas, now_s = [], time.monotonic()
        if tokens.pressure is not None:
            self.desk.heard(worker.number, tokens.pressure, now_s)
        for piece in tokens.pieces:
            way = self._placed.get((worker.number, piece.order))
            if way is None:
                continue  # its order ended here a moment ago
            way.begun_s = way.begun_s or now_s
            try:
                delta = way.take(piece)
            except ValueError as gap:
                return worker.link.end(str(gap))
            if delta is not None:
                if delta.stamps is not None:
                    delta.stamps = shifted(delta.stamps, now_s)
                deltas.append(delta)
                self._end_if_done(way)
        if deltas:
            self._deliver(deltas)
        self._pump()

    def draining(self, worker: Linked, within_s: float | None) -> None:
        """A replica takes no more orders. What it cannot end in time goes on elsewhere."""
        self.desk.drain(worker.number)
        if within_s is not None:
            self._loop.call_later(max(0.0, within_s), self._move, worker)

    def _move(self, worker: Linked) -> None:
        if any(other.accepting for other in self.fleet.able):
            for way in self._on(worker):
                worker.link.cancel(way.number, None, "abort")
                self._again(way, "leave")
            self._pump()

    def lost(self, worker: Linked) -> None:
        """A connection has ended, and with it what was on its way over it."""
        self.desk.lost(worker.number, time.monotonic())
        for way in self._on(worker):
            self._again(way, "lost", worker)
        self._pump()

    def _on(self, worker: Linked) -> list[Way]:
        return [way for (number, _), way in self._placed.items() if number == worker.number]

    def _begin(self, way: Way, front: bool = False) -> None:
        self._ways[way.key] = way
        self._asked.setdefault(way.request.id, {})[way.key] = way
        way.since_s = time.monotonic()
        self.desk.offer(Ask(way.key, len(way.open), front, way.tried), way.since_s)

    def _pump(self) -> None:
        """Send what may go now."""
        for send in self.desk.next(time.monotonic()):
            way = self._ways[send.key]
            way.worker, way.number, way.begun_s, way.heard = send.worker, send.number, 0.0, 0
            self._placed[send.worker, send.number] = way
            task = self._loop.create_task(self._order(way, self.fleet.workers[send.worker]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _order(self, way: Way, worker: Linked) -> None:
        """One order, to its end."""
        number, now_s, request = way.number, time.monotonic(), way.request
        left_s = None if request.deadline_s is None else request.deadline_s - now_s
        asked, replica = way.asked(), worker.link.card.replica
        outcome: Settled | None = None
        try:
            outcome = await self._orders.send(Order(self.gateway, number, replica, asked, now_s - request.arrival_s, left_s))
        except Exception as wrong:  # Serve's word for a replica that has died, or is no longer there
            log.info("order %s ended with %r", asked.id, wrong)
        if self._placed.get((worker.number, number)) is not way:
            return  # it has ended, or gone on elsewhere
        if outcome is None:
            self._again(way, "lost", worker)
        elif outcome.misdirected or (outcome.refused is not None and outcome.refused.kind == Busy.__name__):
            self.misdirected += outcome.misdirected
            self._unplace(way)
            self.desk.offer(Ask(way.key, len(way.open), True, way.tried, now_s + AGAIN_S), now_s)
            self._loop.call_later(AGAIN_S, self._pump)
        elif outcome.refused is not None:
            self._refused(way, outcome.refused.error(), worker)
        else:  # its tokens may still be on their way
            self._loop.call_later(REST_S, self._missing, way, worker, number)
        self._pump()

    def _missing(self, way: Way, worker: Linked, number: int) -> None:
        if self._placed.get((worker.number, number)) is way:
            self._again(way, "silent", worker)
            self._pump()

    def _refused(self, way: Way, error: RayNeuronError, worker: Linked) -> None:
        """What the replica says of an order that could not be, or not to its end."""
        if isinstance(error, NotReady | WorkerLost):
            return self._again(way, "step", worker)
        fault: Fault = "request" if isinstance(error, RequestError) else "choice"
        self._fail(way, error.message, fault, "abort" if isinstance(error, RequestTimeout) else "error")

    def _again(self, way: Way, cause: str, worker: Linked | None = None) -> None:
        """An attempt is lost: each choice that has not ended goes on elsewhere, by itself, behind what it has got."""
        tried = way.tried | ({way.worker} if way.worker is not None else set())
        running = worker is not None and (way.begun_s > 0 or worker.pressure.waiting == 0)
        self._forget(way)
        for index, output in way.split():
            strikes = [*way.strikes, len(output)] if running and cause in ("lost", "step") else way.strikes
            mine = Way(next(self._keys), way.request, {0: index}, {index}, {index: output}, way.attempt + 1, tried=tried, strikes=strikes)
            poison = strikes.count(len(output)) >= self._strikes
            if poison or mine.attempt > self._limit + 1:
                self.replays[cause, "poison" if poison else "limit"] += 1
                said = "every replica that worked on this request has failed" if poison else "this request was lost too often"
                self._fail(mine, said, "choice" if poison else "engine")
            else:
                self.replays[cause, "again"] += 1
                self.replayed += len(output)
                self._begin(mine, front=True)

    def _fail(self, way: Way, error: str, fault: Fault, reason: FinishReason = "error") -> None:
        """End what is open of a request with an error."""
        ends = [TokenDelta(way.request.id, i, [], finish_reason=reason, error=error, fault=fault) for i in sorted(way.open)]
        way.open.clear()
        self._end_if_done(way)
        self._deliver(ends)

    def _unplace(self, way: Way) -> None:
        if way.worker is not None:
            self._placed.pop((way.worker, way.number), None)
            way.worker = None

    def _forget(self, way: Way) -> None:
        self._unplace(way)
        self._ways.pop(way.key, None)
        self.desk.ended(way.key, way.heard, time.monotonic())
        asked = self._asked.get(way.request.id, {})
        asked.pop(way.key, None)
        if not asked:
            self._asked.pop(way.request.id, None)

    def _end_if_done(self, way: Way) -> None:
        if not way.open:
            self._forget(way)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self.fleet.tick(now_s)
            if not self.fleet.able:
                for way in [way for way in self._ways.values() if way.worker is None and now_s - way.since_s > self._hold_s]:
                    self._fail(way, "no replica of this model is ready", "engine")
            self._pump()
