"""The desk of one gateway for one model: who may wait, whose turn it is, where it goes, and what is known to be there.

A request is bound to a replica as late as can be: it waits here until some replica has little to do, so that choices are made on fresh
loads and accounts have an order. Bookings are dropped when the replica has acknowledged their number, never after a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from random import Random
from weakref import WeakValueDictionary

from msgspec import Struct

from rayneuron.news import KvNews, Pressure
from rayneuron.policies.choice import Chooser, GatewayAsk, Terms
from rayneuron.policies.cost import Costs, TimesNow, expected
from rayneuron.policies.desk_limits import DeskLimits
from rayneuron.policies.fairness import AccountShare, Fairness, Waiter
from rayneuron.policies.known_worker import KnownWorker
from rayneuron.policies.queue_speed import QueueSpeed
from rayneuron.types import Profile

REMEMBERED = 1024  # decisions
_ADMIT_MS = 200.0
_BACK_S = 0.05  # until a request that came back undone may be sent again
_AGAIN_S, _LATER_S = 0.005, 0.05  # within which who found no replica looks again, where none has changed: when one will take it


class Admitted(Struct, frozen=True):
    """It waits, and will begin in about so long."""

    start_s: float


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """It does not wait: `reason` capacity, deadline, account or none (no replica); `retry_s`: when it would be otherwise."""

    status: int
    retry_s: float
    reason: str
    why: str


class Send(Struct, frozen=True):
    """A request goes to a replica as its `number`-th order of this gateway."""

    key: int
    worker: int
    number: int
    waited_s: float
    terms: Terms


class _Open(Struct):
    ask: GatewayAsk
    since_s: float
    output: float
    ms: float = 0.0  # charged
    worker: int | None = None
    overlap: int = 0  # prompt tokens that were there
    sent_s: float = 0.0
    ttft_ms: float = 0.0  # predicted, from then on; 0: nobody asks any more
    queue_ms: float = 0.0  # of it, behind others
    own_ms: float = 0.0  # and its prompt, as steps took then


class GatewayDesk:
    """Pure: time and randomness are arguments. Every key that was `Admitted` is `ended` once, whatever became of it."""

    def __init__(
        self, limits: DeskLimits, random: Random, shares: Mapping[str, AccountShare] | None = None, other: AccountShare | None = None
    ) -> None:
        self.limits = limits
        self.chooser = Chooser(random, limits.session_ttl_s)
        self.queue = Fairness(shares or {}, other or AccountShare())
        self.recent: deque[Send] = deque(maxlen=REMEMBERED)
        self._open: dict[int, _Open] = {}
        self.costs: WeakValueDictionary[Profile, Costs] = WeakValueDictionary()  # replicas that are alike share what was worked out
        self._back: list[tuple[float, int]] = []  # when, whose turn it is again
        self._admit_ms = _ADMIT_MS
        self._refused: int | None = None  # whom nobody would take, until some time, or something changes
        self._again_s = 0.0
        self._tokens = 0  # of prompts that wait
        self._speed = QueueSpeed()
        self.due_s = inf  # when `next` may have something to send though nothing was heard meanwhile

    def join(
        self, worker: int, name: str, profile: Profile, kv_tokens: int, load: Pressure, now_s: float, pooled: bool = False
    ) -> None:  # fmt: skip
        """A replica is there. `worker`: never used before; `name`: what other gateways call it too; `pooled`: others compute its prompts,
        so that its first tokens say nothing of its own pace."""
        costs = self.costs.get(profile)
        if costs is None:
            costs = self.costs[profile] = Costs(profile)
        made = KnownWorker(worker, name, costs, kv_tokens, load, now_s, pooled)
        chunk_ms = min(_ADMIT_MS, made.costs.prefill(profile.chunk, 0)[0])
        self._admit_ms = chunk_ms if self.limits.admit_ms is None else self.limits.admit_ms
        self.chooser.workers.join(made)
        self._changed(made, now_s)

    def offer(self, ask: GatewayAsk, now_s: float) -> Admitted | TurnedAway:
        """A request has come."""
        workers = self.chooser.workers
        known = next(iter(workers.all.values()), None)
        if known is None:
            return TurnedAway(503, 1.0, "none", "no replica of this model is ready")
        output = expected(self.queue.output(ask.account) or known.costs.profile.output_tokens, ask.most)
        ms = known.costs.work_ms(*self.chooser.uncached(ask), output, ask.rows)
        start_s = self._start_s(ask, ms, now_s)
        if not ask.again:
            left, most = self.limits.max_queue_tokens, self.limits.max_wait_s
            if said := self.queue.full(ask.account, ask.prompt):
                return TurnedAway(429, max(1.0, start_s), "account", said)
            if start_s > most or (left is not None and self._tokens and self._tokens + ask.prompt > left):
                return TurnedAway(429, max(1.0, start_s), "capacity", f"it would wait {start_s:.1f} s; the limit is {most:g} s")
            if ask.left_s is not None and start_s > ask.left_s:
                return TurnedAway(429, max(1.0, start_s), "deadline", f"it would wait {start_s:.1f} s of {ask.left_s:.1f} s it has")
        self._open[ask.key] = _Open(ask, now_s, output, ms)
        self.chooser.coming.add(ask.hashes)
        self._wait(ask, ms)
        return Admitted(start_s)

    def heard(self, worker: int, load: Pressure, now_s: float) -> None:
        """A replica has said how busy it is."""
        found = self.chooser.workers.all.get(worker)
        if found is not None:
            self.chooser.workers.heard(found, load, now_s)
            since = found.waits_since
            found.accepting = since is None or now_s - since <= self.limits.suspect_s
            self._changed(found, now_s)

    def timed(self, worker: int, profile: Profile) -> None:
        """A replica has said what its steps take now: predictions are made by that, choices by what it said when it came."""
        found = self.chooser.workers.all.get(worker)
        if found is not None:
            found.now = TimesNow(profile)

    def events(self, worker: int, news: KvNews) -> bool:
        """A replica has said what prefixes it has; False: it must say everything."""
        return self.chooser.hear(worker, news)

    def began(self, key: int, cached: int | None, now_s: float) -> float | None:
        """A request's first token has come, behind so many prompt tokens that were there (None: as was thought), and what is learned of it:
        how wrong the prediction was, as a share of the time it took; None where there was none, or it has been asked before."""
        found = self._open.get(key)
        if found is None or found.worker is None or not found.ttft_ms:
            return None
        worker, ask, predicted_ms = self.chooser.workers.all[found.worker], found.ask, found.ttft_ms
        actual_ms, found.ttft_ms = max(1e-3, 1e3 * (now_s - found.sent_s)), 0.0
        if cached is not None and cached != found.overlap and 0 <= cached < ask.prompt:
            cost = worker.costs.prefill
            found.own_ms *= cost(ask.prompt - cached, cached)[0] / cost(ask.prompt - found.overlap, found.overlap)[0]
        if not worker.pooled:
            self.chooser.workers.began(worker, found.queue_ms, found.own_ms, actual_ms, now_s)
        return abs(predicted_ms - actual_ms) / actual_ms

    def ended(self, key: int, tokens: int, now_s: float) -> None:
        """A request has ended, or nobody wants it any more, after so many output tokens; harmless where there is none."""
        found = self._open.pop(key, None)
        if found is None:
            return
        ask = found.ask
        self.chooser.coming.drop(ask.hashes)
        if found.worker is None:
            self._unwait(key, ask)
            return
        worker = self.chooser.workers.all[found.worker]
        if worker.unbook(key):
            self._changed(worker, now_s)
        self.chooser.remember(ask.session, worker.number, ask.prompt + tokens, now_s)
        real_ms = worker.costs.work_ms(ask.prompt - found.overlap, found.overlap, tokens / ask.rows, ask.rows)
        self.queue.ended(ask.account, 0.0 if ask.again else real_ms - found.ms, tokens // ask.rows)

    def back(self, key: int, now_s: float) -> None:
        """An order came back undone: the replica was another one, or had no room. It goes first of its account, in a moment."""
        found = self._open.get(key)
        if found is None or found.worker is None:
            return
        worker = self.chooser.workers.all.get(found.worker)
        if worker is not None:
            worker.unbook(key)
            self._changed(worker, now_s)
        found.worker = None
        self.queue.ended(found.ask.account, 0.0 if found.ask.again else -found.ms)
        heappush(self._back, (now_s + _BACK_S, key))

    def lost(self, worker: int, now_s: float) -> list[int]:
        """A replica is gone; the keys that were there, which are forgotten: what is left of them is to be offered `again`."""
        if worker not in self.chooser.workers.all:
            return []
        keys = sorted(self.chooser.workers.leave(worker).keys)
        self.chooser.index.forget(worker)
        for key in keys:
            ask = self._open.pop(key).ask
            self.chooser.coming.drop(ask.hashes)
            self.queue.ended(ask.account)
        return keys

    def leaving(self, worker: int, now_s: float) -> None:
        """A replica takes no more orders; those it has go on."""
        found = self.chooser.workers.all.get(worker)
        if found is not None:
            found.heard(Pressure(seen=found.load.seen, accepting=False), now_s)
            self.chooser.workers.weigh(found, now_s)

    def next(self, now_s: float) -> list[Send]:
        """Those that go now."""
        while self._back and self._back[0][0] <= now_s:
            found = self._open.get(key := heappop(self._back)[1])
            if found is not None and found.worker is None and key not in self.queue:
                self._wait(found.ask, found.ms, first=True)
        sends: list[Send] = []
        self.chooser.in_hand = int(self.queue.alone)  # who waits for a row there would be before others whose turn it is then
        while (head := self.queue.head()) is not None and not (head == self._refused and now_s < self._again_s):
            found = self._open[head]
            left_ms = self.chooser.workers.busy_ms(now_s) - self._admit_ms  # who knows that without a choice makes none
            terms = None if left_ms > 0.0 else self.chooser.choose(found.ask, found.output, now_s)
            if terms is None or terms.least_ms > self._admit_ms:
                if terms is not None and terms.of >= self.chooser.workers.placed:  # else another look may find one
                    left_ms = terms.least_ms - self._admit_ms
                self._refused, self._again_s = head, now_s + min(max(left_ms / 1e3, _AGAIN_S), _LATER_S)
                break
            sends.append(self._send(head, found, terms, now_s))
        self.due_s = inf if head is None else self._again_s
        if self._back:
            self.due_s = min(self.due_s, self._back[0][0])
        self._speed.measure(bool(self.queue.waiting), self.chooser.workers.placed, now_s)
        self.chooser.index.sweep()
        return sends

    def overdue(self, now_s: float) -> list[int]:
        """Replicas to give up, since they acknowledge nothing; those that are only late get no more orders until they do."""
        given_up = []
        for worker in self.chooser.workers.all.values():
            since = worker.waits_since
            if since is not None and now_s - since > self.limits.silent_s:
                given_up.append(worker.number)
            elif since is not None and now_s - since > self.limits.suspect_s and worker.accepting:
                worker.accepting = False
                self.chooser.workers.weigh(worker, now_s)
        return given_up

    @property
    def open(self) -> dict[str, int]:
        """What is not over yet: all 0 when nothing is to do."""
        workers = self.chooser.workers.all.values()
        return {"calls": len(self._open), "waiting": len(self.queue), "bookings": sum(len(w.bookings) for w in workers)}

    def _changed(self, worker: KnownWorker, now_s: float) -> None:
        """Something about a replica has: look for its place, and whether it takes what nobody took."""
        self.chooser.workers.weigh(worker, now_s)
        if self._refused is not None and worker.extra < self.chooser.in_hand and worker.waits_ms(now_s) <= self._admit_ms:
            self._refused = None

    def _send(self, key: int, found: _Open, terms: Terms, now_s: float) -> Send:
        ask, worker = found.ask, self.chooser.workers.all[terms.worker]
        self._unwait(key, ask, taken=True)
        found.worker, found.overlap, found.sent_s = terms.worker, terms.overlap, now_s
        found.queue_ms, found.own_ms = terms.queue, terms.own
        found.ttft_ms = 0.0 if ask.again or ask.avoid else terms.ttft_ms
        number = worker.book(key, terms.prefill, ask.rows, ask.prompt - terms.overlap, now_s)
        self.chooser.workers.weigh(worker, now_s)
        self.chooser.workers.booked(now_s)
        self._speed.sent_ms += found.ms
        send = Send(key, terms.worker, number, now_s - found.since_s, terms)
        self.recent.append(send)
        return send

    def _wait(self, ask: GatewayAsk, ms: float, first: bool = False) -> None:
        self._tokens += ask.prompt
        self.queue.add(Waiter(ask.key, ask.account, ask.prompt, ms, ask.again), first)

    def _unwait(self, key: int, ask: GatewayAsk, taken: bool = False) -> None:
        if (self.queue.take if taken else self.queue.drop)(key):
            self._tokens -= ask.prompt

    def _start_s(self, ask: GatewayAsk, ms: float, now_s: float) -> float:
        """When a request that comes now will begin: after the shortest queue there is, and what will have gone before it."""
        workers = self.chooser.workers
        near = workers.least(8, 0)
        if not near:
            return 0.0 if ask.again else self.limits.silent_s
        queue = inf
        for worker in near:
            if not (queue := min(queue, worker.waits_ms(now_s))):
                break
        ahead = self.queue.ahead_ms(ask.account, ms) if self.queue.waiting else 0.0
        return (queue + ahead / (workers.placed * (self._speed.ms or 1.0))) / 1e3
