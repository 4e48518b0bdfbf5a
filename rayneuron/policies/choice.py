"""Which replica a request goes to: the one where all requests together lose the fewest predicted milliseconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import log
from operator import itemgetter
from random import Random

from msgspec import Struct

from rayneuron.news import KvNews
from rayneuron.policies.cost import LATER, Costs, added_ms
from rayneuron.policies.known_worker import KnownWorker
from rayneuron.policies.prefix_index import GROUPS, Coming, PrefixIndex
from rayneuron.policies.workers import Workers

_NEAR, _HOLDERS, _EACH = 4, 6, 2  # replicas that are looked at: with least to do, and so many of each set of those that have a prefix
_SOON = 1.2  # where nothing is shared, a first token may come so much later than anywhere else, for the sake of those after it
_TIE = 0.01  # costs so close are the same, and chance decides
_SPARE, _CROWDED_COSTS = 0.1, 1.5  # of the KV; where less is free sequences may soon be preempted, and what that makes of a cost
RING_BLOCKS, _RING_LOAD = 4, 1.25  # where nobody says what has been kept: prompts alike to one replica, unless it has more to do than most
_SESSIONS = 100_000

_COST = itemgetter(0)
_Price = tuple[float, KnownWorker, float, float, float, int, float]  # cost, worker, queue, prefill, added, overlap, `waits_ms`


class GatewayAsk(Struct, frozen=True):
    """A request that wants a replica: its `prompt` tokens, what was generated before included, and at `most` so many output tokens.

    `hashes`: of the prompt's full blocks, each of `block` tokens. `rows`: choices. `left_s`: until its deadline. `ttft_ms`, `tpot_ms`:
    goals for the first token and for those after it. `again`: it was begun before, and is not charged; `avoid`: where it was lost.
    """

    key: int
    account: str
    prompt: int
    most: int | None = None
    rows: int = 1
    hashes: tuple[bytes, ...] = ()
    block: int = 0
    session: str = ""
    left_s: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    again: bool = False
    avoid: frozenset[int] = frozenset()


class Terms(Struct, frozen=True):
    """Why a replica was chosen: milliseconds it queues, computes the prompt, and all together lose; `overlap`: tokens it need not compute.

    `own`: the prompt as its steps take now; `late`: how much later its first tokens come than that, as has been learned; `of`: replicas
    with room that were looked at; `second`: the next best and how much worse, less than 0 where its first token would come too late;
    `least_ms`: the least that any of those that may take another has to do before it.
    """

    worker: int
    name: str
    queue: float
    prefill: float
    added: float
    cost: float
    overlap: int
    prompt: int
    of: int
    second: tuple[str, float] | None
    least_ms: float
    own: float
    late: float
    why: str

    @property
    def ttft_ms(self) -> float:
        """Predicted, from when it is sent."""
        return self.queue + self.own + self.late

    def line(self, waited_s: float) -> str:
        """As the header says it."""
        second = "" if self.second is None else f"second={self.second[0]}{self.second[1]:+.1f}; "
        return (
            f"replica={self.name}; cost={self.cost:.1f}; queue={self.queue:.1f}; prefill={self.prefill:.1f}; added={self.added:.1f}; "
            f"overlap={self.overlap}/{self.prompt}; of={self.of}; {second}waited={1e3 * waited_s:.1f}; why={self.why}"
        )


class Chooser:
    """Chooses among `workers` by what `index` says of their prefixes. Sessions only raise what is expected, and force nothing."""

    def __init__(self, random: Random, session_ttl_s: float = 600.0) -> None:
        self.workers = Workers()
        self.index = PrefixIndex()
        self.coming = Coming()
        self.in_hand = 1  # sequences a replica should have for when a row comes free; the others wait where they can still go elsewhere
        self._random = random
        self._ttl_s = session_ttl_s
        self._sessions: OrderedDict[str, tuple[int, int, float]] = OrderedDict()  # worker, tokens, when

    def hear(self, worker: int, news: KvNews) -> bool:
        """What prefixes a replica has had or lost; False: it must say everything."""
        found = self.workers.all.get(worker)
        if found is None:
            return True
        heard = self.index.hear(worker, news)
        if (bit := self.index.bit(worker)) != found.bit:
            self.workers.mark(found, bit)
        return heard

    def remember(self, session: str, worker: int, tokens: int, now_s: float) -> None:
        """A session's last prompt, with its answer, is at a worker."""
        if session:
            self._sessions[session] = (worker, tokens, now_s)
            self._sessions.move_to_end(session)
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)

    def uncached(self, ask: GatewayAsk) -> tuple[int, int]:
        """Tokens to compute, and tokens that somebody has computed or will have."""
        if not ask.hashes:
            return ask.prompt, 0
        groups = self.index.depths(ask.hashes)
        cached = min(max(groups[0][0] if groups else 0, self.coming.depth(ask.hashes)) * ask.block, ask.prompt - 1)
        return ask.prompt - cached, cached

    def choose(self, ask: GatewayAsk, output: float, now_s: float) -> Terms | None:
        """The best of the replicas that come into question; None where none may take it now. `output`: tokens it will give."""
        start = self._random.getrandbits(16)
        groups = self.index.depths(ask.hashes) if ask.hashes else []
        candidates = self._near(start)
        if ask.ttft_ms is not None or ask.tpot_ms is not None:
            candidates = list(dict.fromkeys([*candidates, *self.workers.fullest(_NEAR, start, ask.ttft_ms or 1e9)]))
        for worker in self.workers.holders(groups, _HOLDERS, _EACH, start) if groups else ():
            if worker not in candidates:
                candidates.append(worker)
        session = self._session(ask, now_s) if ask.session else None
        if session is not None and (known := self.workers.all.get(session[0])) is not None and known.level >= 0 and known not in candidates:
            candidates.append(known)
        if ask.avoid and (others := [worker for worker in candidates if worker.number not in ask.avoid]):
            candidates = others
        return self._best(ask, output, now_s, self._price(ask, output, now_s, candidates, groups, session), groups)

    def _near(self, start: int) -> list[KnownWorker]:
        """Those with least to do; where others choose too and this view is old, not the very same that they choose: as the least of
        a random part of all, which is the smaller the more orders nobody has heard of."""
        unseen = self.workers.unseen
        if unseen < 0.25:
            return self.workers.least(_NEAR, start)
        skipped = min(int(log(1 - self._random.random()) / log(unseen / (1 + unseen))), max(0, self.workers.placed - _NEAR))
        return self.workers.least(_NEAR + skipped, start)[skipped:]

    def _price(
        self,
        ask: GatewayAsk,
        output: float,
        now_s: float,
        candidates: Iterable[KnownWorker],
        groups: list[tuple[int, int]],
        session: tuple[int, int] | None,
    ) -> list[_Price]:
        """Of those that have room. First those where nobody waits for a row; the others would better wait here, and come in where they are
        all there is."""
        rows_asked, prompt, block, hashes, in_hand = ask.rows, ask.prompt, ask.block, ask.hashes, self.in_hand
        some = (groups[-1][1] if len(groups) < GROUPS else -1) if groups else 0  # who else has nothing
        stretches: list[tuple[int, float]] = []
        one, there, steps_there = False, 0, 0.0
        costs: Costs | None = None
        known: dict[int, tuple[float, int]] = {}
        free: list[_Price] = []
        full: list[_Price] = []
        for worker in candidates:
            overlap = 0
            if (bit := worker.bit) & some:
                for depth, held in groups:
                    if held & bit:
                        overlap = depth * block
                        break
                else:
                    overlap = self.index.depth(hashes, groups, worker.number) * block
            if session is not None and worker.number == session[0] and session[1] > overlap:
                overlap = session[1]
            new = prompt - overlap if prompt > overlap else 1
            room = worker.free - new
            if room < rows_asked:
                continue
            if worker.costs is not costs:
                costs, known = worker.costs, {}
                stretches = costs.stretches(prompt, output)
                one, there, steps_there = len(stretches) == 1, *stretches[0]
            rows = worker.rows
            took = known.get(new if rows > 0 else -new)
            if took is None:
                took = known[new if rows > 0 else -new] = costs.prefill(new, prompt - new, rows > 0)
            prefill, steps = took
            if rows and steps > 1:
                prefill += (steps - 1) * worker.step_ms
            after, at, before = worker.beside
            if one:  # `added_ms`, without a call: this is done for each that comes into question
                added = LATER * steps_there * (after[there if there > at else at] - before)
            else:
                added = LATER * added_ms(worker.beside, stretches)
            added *= rows_asked
            done = worker.until_s <= now_s  # all that it told of
            waits_ms = worker.behind_ms if done else worker.behind_ms + 1e3 * (worker.until_s - now_s)
            queue = waits_ms + worker.turn_ms if done else waits_ms
            # No price is put on what another replica has: with one, sessions wait longer for theirs than computing it takes (tests/sim)
            cost = queue + prefill + added
            if room < _SPARE * worker.kv_tokens:
                cost *= _CROWDED_COSTS
            (free if worker.extra < in_hand else full).append((cost, worker, queue, prefill, added, prompt - new, waits_ms))
        return free or full

    def _best(
        self,
        ask: GatewayAsk,
        output: float,
        now_s: float,
        priced: list[_Price],
        groups: list[tuple[int, int]],
    ) -> Terms | None:
        if not priced:
            return None
        why, of = "again" if ask.again else "", len(priced)
        late: list[_Price] = []
        free = priced[0][1].extra < self.in_hand
        if ask.ttft_ms is not None or ask.tpot_ms is not None:
            priced = _by_goals(ask, priced)
            best, why = priced[0], why or "slo"
        else:
            if not groups:
                soon_ms = _SOON * min([p[2] + p[3] for p in priced])
                if late := [p for p in priced if p[2] + p[3] > soon_ms]:
                    priced = [p for p in priced if p[2] + p[3] <= soon_ms]
            priced.sort(key=_COST)
            same, ties = (1 + _TIE) * priced[0][0], 1
            while ties < len(priced) and priced[ties][0] <= same:
                ties += 1
            best = priced[int(self._random.random() * ties)] if ties > 1 else priced[0]
            if ask.hashes and not groups and (alike := self._alike(ask, priced, output, now_s)) is not None:
                best, why = alike, why or "ring"
        cost, worker, queue, prefill, added, overlap, _ = best
        least_ms = min([p[6] for p in priced]) if free else 1e9
        others = priced if len(priced) > 1 else [*priced, *sorted(late, key=_COST)]
        other = others[others[0][1] is worker] if len(others) > 1 else None
        second = None if other is None else (other[1].name, other[0] - cost)
        why = why or ("prefix" if overlap and groups else "session" if overlap else "load")
        own_ms = worker.own_ms(ask.prompt - overlap, overlap, prefill)
        late_ms, name = worker.pace.later_ms(own_ms), worker.name
        return Terms(worker.number, name, queue, prefill, added, cost, overlap, ask.prompt, of, second, least_ms, own_ms, late_ms, why)

    def _alike(self, ask: GatewayAsk, priced: list[_Price], output: float, now_s: float) -> _Price | None:
        """Where prompts that begin like this one go, while no replica has said what it keeps."""
        if self.index.followed == len(self.workers.all):
            return None
        most = _RING_LOAD * self.workers.mean_ms
        for worker in self.workers.on_ring(ask.hashes[:RING_BLOCKS]):
            if self.index.knows(worker.number):
                return None
            if worker.level >= 0 and worker.ms <= most and worker.number not in ask.avoid:
                found = next((p for p in priced if p[1] is worker), None)
                return found or next(iter(self._price(ask, output, now_s, [worker], [], None)), None)
        return None

    def _session(self, ask: GatewayAsk, now_s: float) -> tuple[int, int] | None:
        found = self._sessions.get(ask.session)
        return None if found is None or now_s - found[2] > self._ttl_s else (found[0], min(found[1], ask.prompt - 1))


def _by_goals(ask: GatewayAsk, priced: list[_Price]) -> list[_Price]:
    """Those that meet both goals first, with the least to spare, so that others stay free; then those that miss them by least."""

    def order(p: _Price) -> tuple[bool, float]:
        _, worker, queue, prefill, _, _, _ = p
        step_ms = worker.costs.decode_ms(worker.rows + ask.rows, max(worker.load.longest, ask.prompt + 1))
        first_ms = queue + worker.pace.later_ms(prefill) + prefill
        used = (first_ms / ask.ttft_ms if ask.ttft_ms else 0.0, step_ms / ask.tpot_ms if ask.tpot_ms else 0.0)
        over = sum(max(0.0, u - 1) for u in used)
        return over > 0, over or -max(used)

    return sorted(priced, key=order)
