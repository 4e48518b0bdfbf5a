"""How many drafts of each row one step tries: as many as pay, by what more tokens cost here and how often drafts have come true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from rayneuron.engine.speculation.costs import DraftCosts
from rayneuron.engine.speculation.lookup import LONGEST
from rayneuron.policies.step_times import between
from rayneuron.types import Profile

# The kinds of what a constraint leaves no choice of, of what a draft model makes, and of that where it makes none behind one it is not sure
# of, which counts as if the next had not come true.
FORCED, CHAINED, SURE = -1, -2, -3
# By kind, before there is experience: how often the first draft comes true; of longer matches LIKELY.
GUESSED = {CHAINED: 0.8, SURE: 0.8, FORCED: 0.95, 0: 0.7, 1: 0.1, 2: 0.2, 3: 0.4, 4: 0.6, 5: 0.7}
LIKELY = 0.8
CLASS_RATE, OWN_RATE = 0.05, 0.2  # of the moving averages of a kind, and of a sequence
UNSEEN = 0.5  # of what a text would tell of itself, before it has; counts as one id
MOST_OWN = 0.92  # the most that counts of what a text tells of itself: quotes end at some time, of which its last ids say nothing
LOOK_MS, LOOK_SHARE = 0.01, 0.003  # of the host, to look for drafts of a row; and the most of all time, where none are found that pay
PATIENCE = 8  # steps, the most after which rows that have none that pay are looked at again
MARGIN = 0.03  # a step with drafts has to promise so much more
READ_MS = 0.15  # of the host, for a token it samples or describes itself
PROBE = 32  # steps without any draft, after which some are tried to see what becomes of them; twice as many after each time
LATEST = 256  # the most of those
PROBE_CHAINED = 1024  # the same where a draft model would have to read those steps' tokens first
SPREAD = 64  # tokens of an output over which what a draft model has to read first is spread
# What a draft model gives and takes is seen by trying alone, and whoever named one wants it tried: as often as this it counts as cheaper.
TRIALS, HOPED = 32, 0.7


@dataclass(slots=True)
class Record:
    """How the drafts of one sequence have fared. `kind`: of those under way; of a match its length, which grows with each that comes.
    `heard`: ids that matches told of."""

    kind: int = 0
    own: float | None = None
    heard: int = 0


@dataclass(slots=True)
class Candidate:
    """What a row could try: so many drafts of its record's kind. `read`: the host reads the logits of each. `behind`: what a draft model
    has to read first, None where none makes them."""

    record: Record
    drafts: int
    read: bool = False
    behind: int | None = None


@dataclass(slots=True)
class _Step:
    """A step as it would be: tokens that it is expected to give, those it computes, and its time."""

    tokens: float
    size: int
    ms: float


@dataclass(slots=True)
class _Rates:
    """How often the first draft of a kind comes true, and one behind a draft that has."""

    first: float
    later: float = field(default=0.7)


class Pace:
    """Chooses by `profile`, and by what it is told of drafts and of the times of steps. No clock of its own: the same steps make the same
    choices.

    A draft is worth its survival, the probability that it and all before it come true. In the order of worth they are added to the step,
    and as many are taken as give the most tokens a millisecond: the first may cost what all the next do not. What a text would have told of
    itself is heard whether or not it was tried (`heard`); what a step takes, and what else drafts, is seen by trying.
    """

    def __init__(self, profile: Profile, tokens: int, whole: bool = False) -> None:
        """tokens: the most of a step. whole: one with drafts takes as long however few they are, as a compiled graph does."""
        self.costs = DraftCosts(profile, tokens, whole)
        self._whole = bool(self.costs.more_ms)
        short = tuple((rows, ms) for rows, length, ms in profile.decode if length == profile.lengths[0])
        self._passes = ((1, 0.0),) if whole else profile.passes or short  # part of the one graph, however many of them are wanted
        self._read_ms = min((ms / (rows * n) for rows, n, _, ms in profile.prefill), default=0.0)  # a token; the model itself takes no less
        self._rates: dict[int, _Rates] = {}
        self._without, self._patience = 0, PROBE  # steps since the last draft; of those, before some are tried
        self._cheaper = 1  # times that drafts may be than is known
        self._passed_ms: list[float] = []  # that so many passes of the step chosen last should take
        self._trials = 0 if whole else TRIALS
        self.bar = 0.0  # what a row's first draft has to be worth in this step
        self.patience = 1  # steps, the most after which rows that have none that pay are looked at again
        self.looks, self._rests = True, 0  # whether they are in this step; steps in which they are not
        self._vain = 0  # steps in which they were and nobody had any that pay, since somebody had

    def begins(self, rows: int, length: int) -> bool:
        """A step is planned: whether drafts are thought of at all, which they are not before it is known what one takes without."""
        if not self.costs.knows(rows):
            return False
        self._without += 1
        self._cheaper = 1 if self._without % self._patience else 1 + self._without // PROBE
        self.looks, self._rests = self._rests <= 0 or self._cheaper > 1, self._rests - 1
        self.bar = 0.0  # in a graph that others' drafts pay for one more costs nothing
        plain_ms = self.costs.plain(rows, length)
        if not self._whole:
            self.bar = self.costs.least(rows) * rows / plain_ms / self._cheaper
        self.patience = min(max(1, round(rows * LOOK_MS / (LOOK_SHARE * plain_ms))), PATIENCE)
        return True

    def rest(self) -> None:
        """Nobody has drafts that pay in this step: for some steps nobody is looked at, the more the longer that lasts. All rows are in the
        same ones, since the first draft of a step costs most, and what one row has may pay only beside what the others have."""
        if self.looks:
            self._vain += 1
            self._rests = min(self._vain, self.patience) - 1

    def hope(self, record: Record) -> float:
        """What the first draft of a row is worth."""
        return self._survival(record, 1.0, 0)

    def choose(self, candidates: Sequence[Candidate], length: int) -> list[int]:
        """Drafts of each row of a decode step, the longest of which attends `length` positions."""
        rows, plain_ms = len(candidates), self.costs.plain(len(candidates), length)
        chained = [i for i, c in enumerate(candidates) if c.drafts and c.behind is not None]
        self._passed_ms = []
        chosen, made = self._one_by_one(candidates, _Step(float(rows), rows, plain_ms))
        if chained:
            made = self._chained(candidates, chained, made, chosen)
        if made.size > rows:
            self._without, self._patience, self._vain = 0, PROBE, 0
            return chosen
        return chosen if self._cheaper == 1 else self._tried(candidates, plain_ms, set(chained))

    def _tried(self, candidates: Sequence[Candidate], plain_ms: float, chained: set[int]) -> list[int]:
        """Drafts of which only trying tells what becomes of them; else those that would pay were they cheaper than is known, the longer ago
        any were tried the more so, and few of those."""
        rows, deep = len(candidates), len(self.costs.ms) if self._whole else 1
        ready = {i for i, c in enumerate(candidates) if c.drafts and c.record.kind <= 0 and not c.behind}
        if not ready and chained and self._without >= PROBE_CHAINED:
            ready = {min(chained)}
        if ready:
            self._without = 0
            self._passed_ms = [between(self._passes, len(ready & chained))] if ready & chained else []
            return [min(deep, c.drafts) if i in ready else 0 for i, c in enumerate(candidates)]
        chosen, made = self._one_by_one(candidates, _Step(float(rows), rows, plain_ms), self._cheaper)
        if made.size > rows:
            self._without, self._patience = 0, min(2 * self._patience, LATEST)
        left = len(self.costs.ms) if self._whole else max(1, rows // 2)
        for i, n in enumerate(chosen):
            chosen[i] = min(n, left)
            left -= chosen[i]
        return chosen

    def _one_by_one(self, candidates: Sequence[Candidate], plain: _Step, cheaper: int = 1) -> tuple[list[int], _Step]:
        """Of drafts that are there already those that pay, by row, and the step with them. `cheaper`: so many times than is known."""
        taken, order, read_ms = 0, list[int](), 0.0
        best = _Step(plain.tokens * (1 + MARGIN), plain.size, plain.ms)
        tokens, ms = plain.tokens, plain.ms
        queue = [(-self._survival(c.record, 1.0, 0), i, 0) for i, c in enumerate(candidates) if c.drafts and c.behind is None]
        left = sum(candidates[i].drafts for _, i, _ in queue)
        heapify(queue)
        while queue:
            worth, i, place = -queue[0][0], queue[0][1], queue[0][2]
            if (tokens + worth * left) * best.ms <= best.tokens * ms:
                break  # not even if all the others were for nothing
            if worth < self.bar and tokens - plain.tokens < self.bar * len(order):
                break  # nor if all were as cheap as any may be
            order.append(i)
            read_ms += READ_MS * candidates[i].read
            ms = plain.ms + self.costs.added(plain.size, len(order), read_ms) / cheaper
            tokens, left = tokens + worth, left - 1
            if tokens * best.ms > best.tokens * ms:
                best, taken = _Step(tokens, plain.size + len(order), ms), len(order)
            if place + 1 < candidates[i].drafts:
                heapreplace(queue, (-self._survival(candidates[i].record, worth, place + 1), i, place + 1))
            else:
                heappop(queue)
        chosen = [0] * len(candidates)
        for i in order[:taken]:
            chosen[i] += 1
        return chosen, best if taken else plain

    def _chained(self, candidates: Sequence[Candidate], which: list[int], made: _Step, chosen: list[int]) -> _Step:
        """Drafts that a draft model makes, a pass for all rows at a time: as deep as pays, which is not seen before all depths are.
        Where it stops when it is not sure, a pass is made as often as the drafts up to it, but the first, come true."""
        best, worth, rows = made, dict.fromkeys(which, 1.0), len(candidates)
        tokens, size, all_ms, more_ms, drafts = made.tokens, made.size, 0.0, 0.0, float(made.size - rows)
        before = made.ms - self.costs.added(rows, size - rows) + self._read_ms * sum(candidates[i].behind or 0 for i in which) / SPREAD
        hoped, first = HOPED if self._trials > 0 else 1.0, worth
        for depth in range(max(candidates[i].drafts for i in which)):
            going = [i for i in which if candidates[i].drafts > depth]
            for i in going:
                worth[i] = self._survival(candidates[i].record, worth[i], depth)
                tokens += worth[i]
            first = first if depth else dict(worth)
            reached = max(worth[i] / first[i] if candidates[i].record.kind == SURE else 1.0 for i in going)
            size, drafts = size + len(going), drafts + reached * len(going)
            here_ms = between(self._passes, len(going)) + READ_MS * sum(candidates[i].read for i in going)
            all_ms, more_ms = all_ms + here_ms, more_ms + reached * here_ms
            self._passed_ms.append(all_ms)
            ms = before + hoped * self.costs.added(rows, round(drafts), more_ms)
            if tokens * best.ms > best.tokens * ms:
                best = _Step(tokens, size, ms)
                for i in which:
                    chosen[i] = min(depth + 1, candidates[i].drafts)
        return best

    def learn(self, record: Record, drafts: int, accepted: int) -> None:
        """So many drafts of a row were tried, of which the first `accepted` came true."""
        rates, self._trials = self._kind(record.kind), self._trials - (record.kind <= CHAINED)
        for place in range(min(accepted + 1, drafts)):
            came = float(place < accepted)
            if place:
                rates.later += CLASS_RATE * (came - rates.later)
            else:
                rates.first += CLASS_RATE * (came - rates.first)
            if record.kind != SURE:  # where a draft model is sure swings too much within a text
                own = rates.first if record.own is None else record.own
                record.own = own + OWN_RATE * (came - own)

    def heard(self, record: Record, kind: int, came: bool) -> None:
        """An id that would have been drafted by a match has come, or another one."""
        rates = self._kind(kind)
        rates.first += CLASS_RATE * (came - rates.first)
        own = UNSEEN if record.own is None else record.own
        record.heard += 1
        record.own = own + max(OWN_RATE, 1 / (1 + record.heard)) * (came - own)

    def took(self, rows: int, length: int, drafts: int, ms: float, passes: int = 0) -> None:
        """The step chosen last has taken so long, the host's part with it. `passes`: of a draft model, maybe fewer than chosen."""
        more_ms = self._passed_ms[min(passes, len(self._passed_ms)) - 1] if passes and self._passed_ms else 0.0
        self.costs.took(rows, length, drafts, ms, more_ms, self._cheaper > 1)

    def _kind(self, kind: int) -> _Rates:
        rates = self._rates.get(kind)
        if rates is None:
            rates = self._rates[kind] = _Rates(GUESSED.get(kind, LIKELY))
        return rates

    def _survival(self, record: Record, before: float, place: int) -> float:
        if record.kind > 0:
            kind = record.kind + place
            rate = self._kind(kind if kind < LONGEST else LONGEST).first
            own = 1 - (1 - (UNSEEN if record.own is None else record.own)) * (1 - OWN_RATE) ** place  # as it will be if those before come
            return before * (rate + (own if own < MOST_OWN else MOST_OWN)) / 2
        rate = self._kind(record.kind).later if place else self._kind(record.kind).first
        return before * (rate if record.own is None else (rate + record.own) / 2)
