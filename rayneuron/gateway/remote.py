"""RemoteEngine: an engine that is elsewhere, in as many replicas as there are; what `engine.loop.EngineLoop` is where it is here."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from rayneuron import metrics
from rayneuron.errors import Busy, NotReady, RequestError, RequestTimeout, WorkerLost
from rayneuron.frames import Card, Order, OrderEnded, Tokens
from rayneuron.gateway.asking import ask_of, equal, profile_of
from rayneuron.gateway.attendance import Attendance, Attends
from rayneuron.gateway.books import Books
from rayneuron.gateway.fleet import Fleet, Linked
from rayneuron.gateway.repair import Repair
from rayneuron.gateway.ways import Way, Wishes
from rayneuron.gateway_config import Replays
from rayneuron.news import KvNews
from rayneuron.policies.admission import validate
from rayneuron.policies.desk import GatewayDesk, TurnedAway
from rayneuron.policies.replay import Replay
from rayneuron.serve.telemetry import Histogram
from rayneuron.types import Fault, FinishReason, Request, Snapshot, TokenDelta

TICK_S = 0.25
LEAST_S = 0.002  # between two questions to the desk while somebody waits there and nothing is heard
NOTHING = Wishes()
GATEWAY = metrics.Gateway()


@dataclass(frozen=True, slots=True)
class Together:
    """How much all replicas hold: `serve.hot.Sizes`."""

    rows: int
    length: int


class RemoteEngine:
    """The engine of one model in a gateway: requests wait at the desk, go to a replica, and go on at another where that one is lost.

    Belongs to the event loop. `deliver` takes the deltas of a step, as `serve.flight.Flights.dispatch` does. `wishes`: of requests that are
    about to be submitted, by id.
    """

    error: str | None = None
    alive = True
    timing = None
    prefills = None

    def __init__(
        self, calls: Attends, deliver: Callable[[list[TokenDelta]], None], eos_ids: frozenset[int], rules: Replays, desk: GatewayDesk
    ) -> None:  # fmt: skip
        self.gateway = secrets.token_bytes(8)
        self.fleet = Fleet(self.gateway, self)
        self.attendance = Attendance(calls, self.gateway, lambda: self.doubt())
        self.desk = desk
        self.books = Books()
        self.repair = Repair(self.books, desk, deliver, lambda: self.known, rules)
        self.wishes: dict[str, Wishes] = {}
        self.undone = 0  # orders that came back
        self.expecting = True  # where no replica is there: one comes, as far as is known, and calls wait for it
        self.welcome: Callable[[], None] = lambda: None  # called when a replica is connected
        self.doubt: Callable[[], None] = lambda: None  # and when one leaves, or has left
        self.errors = Histogram(GATEWAY.prediction_error)  # of what is predicted
        self._deliver, self._eos_ids, self._rules = deliver, eos_ids, rules
        self._soon: asyncio.TimerHandle | None = None
        self._due_s = inf  # when that asks the desk
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.create_task(self._tick())

    @property
    def known(self) -> Card:
        """What all replicas of this model are like. Raises NotReady before one has shown its card."""
        if self.fleet.card is None:
            raise NotReady("no replica of this model has been seen yet")
        return self.fleet.card

    @property
    def adapters(self) -> Fleet:
        """Those that every replica has."""
        return self.fleet

    @property
    def vocab(self) -> int:
        """Ids there are."""
        return self.known.vocab

    @property
    def capacity(self) -> Together:
        """Rows of all replicas that are there."""
        return Together(sum(linked.link.card.rows for linked in self.fleet.able), self.known.length)

    def submit(self, request: Request) -> None:
        """Hand over a request. Raises RequestError, Busy, NotReady."""
        card, wishes, now_s = self.known, self.wishes.pop(request.id, NOTHING), time.monotonic()
        validate(request, card.length, card.kv_tokens, card.vocab, self._eos_ids)
        if request.id in self.books.asked:
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        replays = {i: Replay(self._rules.limit, self._rules.strikes) for i in range(request.params.n)}
        way = Way(next(self.repair.keys), request, wishes, replays)
        said = self.desk.offer(ask_of(way, card, now_s), now_s)
        hold = isinstance(said, TurnedAway) and said.reason == "none" and self.expecting
        if isinstance(said, TurnedAway) and not hold:
            raise (NotReady if said.status == 503 else Busy)(said.why, retry_after_s=said.retry_s)
        self.books.take_in(way, now_s)
        if hold:
            return self.repair.hold(way)
        self._pump()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Nobody wants the request, or one of its choices, any more."""
        reason: FinishReason = "abort" if index is None else "stop"
        for way in self.books.of(request_id):
            unwanted = [i for i in way.open if index is None or i == index]
            if way.worker is not None and unwanted:
                whole = len(unwanted) == len(way.open)
                self.fleet.workers[way.worker].link.cancel(way.number, None if whole else way.local(unwanted[0]), reason)
            for i in unwanted:
                way.replays[i].finish()
            self.repair.settle(way)
        self._pump()

    def snapshot(self) -> Snapshot:
        """The load of all replicas together; what waits here waits too."""
        able = self.fleet.able
        total = sum(linked.link.card.kv_tokens for linked in able)
        return Snapshot(
            running=sum(linked.pressure.rows for linked in able),
            waiting=self.under_way()[0] + sum(linked.pressure.waiting for linked in able),
            slots_free=sum(linked.pressure.slots_free for linked in able),
            slots_total=sum(linked.link.card.rows for linked in able),
            kv_tokens_used=total - sum(linked.pressure.kv_free for linked in able),
            kv_tokens_total=total,
        )

    def pending(self) -> bool:
        """Whether somebody waits for anything."""
        return bool(self.books.ways)

    def under_way(self) -> tuple[int, int]:
        """Requests that wait here, and at replicas."""
        return len(self.books.ways) - len(self.books.placed), len(self.books.placed)

    def close(self) -> None:
        """Hang up everywhere."""
        self._ticker.cancel()
        self.doubt = lambda: None
        self.fleet.close()
        self.attendance.close()

    def joined(self, linked: Linked) -> None:
        """A replica is connected."""
        card, pooled = linked.link.card, linked.link.card.args.get("pools") is not None
        known = (one.profile for one in self.fleet.workers.values() if one.profile is not None and equal(one.link.card, card))
        linked.profile = next(known, profile_of(card))
        self.desk.join(linked.number, card.replica, linked.profile, card.kv_tokens, linked.pressure, time.monotonic(), pooled)
        if linked.profile is not card.profile:
            self.timed(linked)  # predictions are made by its own
        self.repair.joined()
        self.welcome()
        self._pump()

    def timed(self, linked: Linked) -> None:
        """What the steps of a replica take has changed."""
        self.desk.timed(linked.number, profile_of(linked.link.card))

    def heard(self, linked: Linked, tokens: Tokens) -> None:
        """What a step of a replica gave."""
        deltas, now_s = [], time.monotonic()
        if tokens.pressure is not None:
            self.desk.heard(linked.number, linked.pressure, now_s)
        for piece in tokens.pieces:
            way = self.books.placed.get((linked.number, piece.order))
            if way is None:
                continue  # its order ended here a moment ago
            begins = not way.heard
            index, delta, effect = way.hear(piece, now_s)
            if delta is not None:
                deltas.append(delta)
                if begins and way.heard and (error := self.desk.began(way.key, delta.cached_tokens, now_s)) is not None:
                    self.errors.observe(error)
            if effect is not None:
                linked.link.cancel(way.number, way.local(index), "abort")
                self.repair.act(way, index, effect, "gap")
            if begins or effect is not None or piece.delta.finish_reason is not None:  # else there is nothing to settle
                self.repair.settle(way)
        if deltas:
            self._deliver(deltas)
        self._pump()

    def events(self, linked: Linked, news: KvNews) -> None:
        """What prefixes a replica has KV of."""
        if not self.desk.events(linked.number, news):
            linked.link.end("what it said of its prefixes has a gap")

    def draining(self, linked: Linked, within_s: float | None) -> None:
        """A replica takes no more orders. What it cannot end in time goes on elsewhere."""
        self.desk.leaving(linked.number, time.monotonic())
        self.doubt()
        if within_s is not None:
            self._loop.call_later(max(0.0, within_s), self._move, linked)

    def _move(self, linked: Linked) -> None:
        if any(other.accepting for other in self.fleet.able):
            for way in self.books.on(linked.number):
                linked.link.cancel(way.number, None, "abort")
                self.repair.again(way, "leave")
            self._pump()

    def failed(self, linked: Linked) -> None:
        """A step of a replica has failed, or does not end."""
        self.desk.leaving(linked.number, time.monotonic())
        for way in self.books.on(linked.number):
            self.repair.again(way, self.repair.cause(way, "step"))
        self._pump()

    def lost(self, linked: Linked, died: bool) -> None:
        """A connection has ended, and with it what was on its way over it. Who was there when a process died may have killed it, begun or
        not as far as is known here: the step that kills is the one nothing comes back of."""
        self.desk.lost(linked.number, time.monotonic())
        self.attendance.forget(linked.number)
        self.expecting = True
        self.doubt()
        for way in self.books.on(linked.number):
            self.repair.again(way, self.repair.cause(way, "leave" if not linked.accepting else "crash" if died else "silence"))
        self._pump()

    def _pump(self) -> None:
        """Send what may go now; look again soon while somebody waits."""
        for send in self.desk.next(time.monotonic()):
            way = self.books.ways[send.key]
            self.books.place(way, send.worker, send.number)
            if way.wishes.say is not None:
                way.wishes.say(send.terms.line(send.waited_s))
            self._order(way, self.fleet.workers[send.worker])
        if (due_s := self.desk.due_s) < self._due_s:
            if self._soon is not None:
                self._soon.cancel()
            self._soon, self._due_s = self._loop.call_later(max(LEAST_S, due_s - time.monotonic()), self._look_again), due_s

    def _look_again(self) -> None:
        self._soon, self._due_s = None, inf
        self._pump()

    def _order(self, way: Way, linked: Linked) -> None:
        now_s, request = time.monotonic(), way.request
        left_s = None if request.deadline_s is None else request.deadline_s - now_s
        linked.link.order(Order(way.number, way.asked(), now_s - request.arrival_s, left_s))

    def ended(self, linked: Linked, how: OrderEnded) -> None:
        """A replica has ended an order otherwise than by its tokens."""
        way = self.books.placed.get((linked.number, how.order))
        if way is None:
            return  # it has ended here, or gone on elsewhere
        error = None if how.refused is None else how.refused.error()
        if linked.accepting and (error is None or isinstance(error, NotReady | WorkerLost)):  # who takes none takes the next one neither
            self.fleet.close_to(linked)
        if error is None or isinstance(error, Busy):
            self.undone += 1
            self.books.unplace(way)
            for index in way.open:
                way.replays[index].back(way.attempts[index])
            self.desk.back(way.key, time.monotonic())
        elif isinstance(error, NotReady | WorkerLost):
            self.repair.again(way, self.repair.cause(way, "step" if how.failed else "leave"))
        else:
            fault: Fault = "call" if isinstance(error, RequestError) else "choice"
            self.repair.fail(way, way.open, error.message, fault, "abort" if isinstance(error, RequestTimeout) else "error", error.param)
        self._pump()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self.fleet.tick(now_s, self.desk.queue.waiting_ms)
            for number in self.desk.overdue(now_s):
                self.fleet.workers[number].link.end("it does not acknowledge its orders")
            self.repair.tick(now_s, any(linked.accepting for linked in self.fleet.able))
            for linked in self.fleet.able:  # by now and then: a call of Serve beside a prompt would cost it milliseconds
                self.attendance.stand_for(linked.number, linked.link.card.replica, self.books.orders[linked.number])
            self._pump()
