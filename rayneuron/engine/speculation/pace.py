"""How many drafts of each row one step tries: as many as pay, by what more tokens cost here and how often drafts have come true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from math import inf

from rayneuron.policies.step_times import between, decode_grid
from rayneuron.types import Profile

FORCED, CHAINED = -1, -2  # the kinds of what a constraint leaves no choice of, and of what a draft model makes
# By kind, before there is experience: how often the first draft comes true; others LIKELY.
GUESSED = {CHAINED: 0.8, FORCED: 0.95, 0: 0.7, 1: 0.1, 2: 0.2, 3: 0.4}
LIKELY = 0.6
CLASS_RATE, OWN_RATE = 0.05, 0.2  # of the moving averages of a kind, and of a sequence
VERIFY_MS = 0.15  # of the host, that a step takes longer with drafts than without
MARGIN = 0.03  # a step with drafts has to promise so much more
LEAST = 0.01  # of a step of one row, that a token more takes at least; a profile taken beside others may say that it takes nothing
READ_MS = 0.15  # of the host, for a token it samples or describes itself
PROBE = 32  # steps without any draft, after which each row tries one; the first times sooner
FIRST = 4
LOOK_MS, LOOK_SHARE = 0.01, 0.005  # of the host, to look for drafts of a row; and the most of all time, where none are found that pay
RATE, FORGET = 1 / 16, 1 / 256  # of what is known of times, by a step with drafts; of that, by one without
MOST_OFF = 4.0  # no step counts as having taken more than so many times what was expected, or less than that part of it
PROBE_CHAINED = 1024  # the same where a draft model would have to read those steps' tokens first
SPREAD = 64  # tokens of an output over which what a draft model has to read first is spread


@dataclass(slots=True)
class Record:
    """How the drafts of one sequence have fared. `kind`: of those under way; longer matches are another kind than shorter ones."""

    kind: int = 0
    own: float | None = None


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
    and as many are taken as give the most tokens a millisecond: the first may cost what all the next do not. The profile says what they
    cost on an idle machine, and nothing of the host; what steps with drafts have taken beyond it is `_dear`, as against those without.
    """

    def __init__(self, profile: Profile, tokens: int, whole: bool = False) -> None:
        """tokens: the most of a step. whole: one with drafts takes as long however few they are, as a compiled graph does."""
        self._decode, self._batch = decode_grid(profile), profile.batch
        short = {rows: ms for rows, length, ms in profile.decode if length == profile.lengths[0]}
        self._more_ms = {rows: max(0.0, ms - short[rows]) for rows, ms in profile.verify} if whole else {}
        passes = profile.passes or tuple((rows, ms) for rows, length, ms in profile.decode if length == profile.lengths[0])
        self._passes = ((1, 0.0),) if whole else passes  # they are part of the one graph, however many of them are wanted
        self._read_ms = min((ms / (rows * n) for rows, n, _, ms in profile.prefill), default=0.0)  # a token; the model itself takes no less
        self._ms = [between(profile.tokens, n) for n in range(tokens + 1)]
        for n in range(2, len(self._ms)):
            self._ms[n] = max(self._ms[n], self._ms[n - 1] + LEAST * self._ms[1])
        self._rates: dict[int, _Rates] = {}
        self._without = 0  # steps since the last draft
        self._patience = FIRST  # of those, before some are tried
        self._looked, self._rest = True, 0.0  # whether some were looked for in this step; steps in which none are
        self._trying, self._luck = 0, 0  # the last step with drafts tried so many a row; the rows that had luck, less the others
        self._slow = self._dear = 1.0  # times what the profile says: a step takes, and its drafts add
        self._expected_ms = 0.0  # that those of the last step chosen add, by the profile
        self._least: dict[int, float] = {}  # by rows: ms of a draft, in the step in which they cost least

    def looks(self, rows: int, length: int) -> float:
        """What a row's first draft has to be worth to be looked for in this step: nothing where it is time to try some."""
        self._looked = self._rest < 1.0
        if not self._looked:
            self._rest -= 1.0
            self._without += 1
            return inf
        if self._without >= self._patience or self._more_ms:
            return 0.0  # in a step that others' drafts pay for, one more costs nothing
        return self._cheapest_ms(rows) * self._dear * rows / self._plain(rows, length)

    def hope(self, record: Record) -> float:
        """What the first draft of a row is worth at best."""
        best = max((rates.first for kind, rates in self._rates.items() if kind != FORCED), default=1.0)
        return best if record.own is None else (best + record.own) / 2

    def _cheapest_ms(self, rows: int) -> float:
        if rows not in self._least:
            most = len(self._ms) - 1 - rows
            costs = ((self._added(rows, n) + VERIFY_MS) / n for n in range(1, most + 1))
            self._least[rows] = min(costs, default=inf)
        return self._least[rows]

    def _plain(self, rows: int, length: int) -> float:
        """ms of a step without drafts."""
        graph = next((b for b in self._batch if b >= rows), rows) if self._more_ms else rows
        return self._decode.at(graph, length)

    def _added(self, rows: int, drafts: int) -> float:
        """ms that so many add to a step."""
        if self._more_ms:
            return next((ms for most, ms in self._more_ms.items() if most >= rows), max(self._more_ms.values()))
        return self._ms[rows + drafts] - self._ms[rows]

    def choose(self, candidates: Sequence[Candidate], length: int) -> list[int]:
        """Drafts of each row of a decode step, the longest of which attends `length` positions."""
        rows, plain_ms = len(candidates), self._plain(len(candidates), length)
        self._expected_ms = 0.0
        chosen, queue, made = self._one_by_one(candidates, _Step(float(rows), rows, plain_ms))
        chained = [i for i, c in enumerate(candidates) if c.drafts and c.behind is not None]
        if chained:
            made = self._chained(candidates, chained, made, chosen)
        if made.size > rows:
            self._without, self._rest, self._trying = 0, 0.0, 0
            self._expected_ms = (made.ms - plain_ms) / self._dear
            return chosen
        if self._looked:
            self._without += 1
            self._rest = rows * LOOK_MS / (LOOK_SHARE * plain_ms)
        ready = queue or {i for i in chained if not candidates[i].behind}
        after = self._patience if ready else PROBE_CHAINED
        tried = ready or chained[:1]
        if self._without <= after or not tried:
            return [0] * rows
        deep = len(self._ms) if self._more_ms else max(1, 2 * self._trying * (self._luck > 0))
        self._without, self._luck, self._patience = 0, 0, min(2 * self._patience, PROBE)
        self._trying = deep if queue else 0  # heads that are right may be too dear all the same, and are not tried once more for it
        chosen = [min(deep, c.drafts) if i in tried else 0 for i, c in enumerate(candidates)]
        self._expected_ms = VERIFY_MS + self._added(rows, sum(chosen))
        if chained:
            self._expected_ms += max(chosen[i] for i in chained) * between(self._passes, len(chained))
        return chosen

    def _one_by_one(self, candidates: Sequence[Candidate], plain: _Step) -> tuple[list[int], set[int], _Step]:
        """Of drafts that are there already those that pay, by row; the rows that have some; and the step with them."""
        taken, order, read_ms = 0, [], 0.0
        best = _Step(plain.tokens * (1 + MARGIN), plain.size, plain.ms)
        tokens, ms = plain.tokens, plain.ms
        queue = [(-self._survival(c.record, 1.0, 0), i, 0) for i, c in enumerate(candidates) if c.drafts and c.behind is None]
        there, left = {i for _, i, _ in queue}, sum(candidates[i].drafts for _, i, _ in queue)
        heapify(queue)
        while queue:
            worth, i, place = -queue[0][0], queue[0][1], queue[0][2]
            if (tokens + worth * left) * best.ms <= best.tokens * ms:
                break  # not even if all the others were for nothing
            order.append(i)
            read_ms += READ_MS * candidates[i].read
            ms = plain.ms + self._dear * (VERIFY_MS + self._added(plain.size, len(order)) + read_ms)
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
        return chosen, there, best if taken else plain

    def _chained(self, candidates: Sequence[Candidate], which: list[int], made: _Step, chosen: list[int]) -> _Step:
        """Drafts that a draft model makes, a pass for all rows at a time: as deep as pays, which is not seen before all depths are."""
        best, worth, dear = made, dict.fromkeys(which, 1.0), self._dear
        tokens, size, ms = made.tokens, made.size, made.ms
        ms += dear * (VERIFY_MS + (self._added(size, 1) if self._more_ms else 0.0)) if size == len(candidates) else 0.0
        ms += self._read_ms * sum(candidates[i].behind or 0 for i in which) / SPREAD
        for depth in range(max(candidates[i].drafts for i in which)):
            going = [i for i in which if candidates[i].drafts > depth]
            for i in going:
                worth[i] = self._survival(candidates[i].record, worth[i], depth)
                tokens += worth[i]
            ms += dear * (between(self._passes, len(going)) + (0.0 if self._more_ms else self._ms[size + len(going)] - self._ms[size]))
            ms += dear * READ_MS * sum(candidates[i].read for i in going)
            size += len(going)
            if tokens * best.ms > best.tokens * ms:
                best = _Step(tokens, size, ms)
                for i in which:
                    chosen[i] = min(depth + 1, candidates[i].drafts)
        return best

    def learn(self, record: Record, drafts: int, accepted: int) -> None:
        """So many drafts of a row were tried, of which the first `accepted` came true."""
        rates = self._kind(record.kind)
        self._luck += 1 if accepted else -1
        if self._trying and self._luck > 0:
            self._without = PROBE  # what comes true is tried once more
        for place in range(min(accepted + 1, drafts)):
            came = float(place < accepted)
            if place:
                rates.later += CLASS_RATE * (came - rates.later)
            else:
                rates.first += CLASS_RATE * (came - rates.first)
            own = rates.first if record.own is None else record.own
            record.own = own + OWN_RATE * (came - own)

    def took(self, rows: int, length: int, drafted: bool, ms: float) -> None:
        """The step chosen last has taken so long, the host's part with it."""
        plain_ms = self._plain(rows, length)
        if not drafted:
            self._slow += RATE * (_within(ms / plain_ms) - self._slow)
            self._dear += FORGET * (1.0 - self._dear)
            return
        weight = min(1.0, 4 * self._expected_ms / plain_ms)  # what adds little is little seen
        self._dear += RATE * weight * (_within((ms / self._slow - plain_ms) / self._expected_ms) - self._dear)

    def _kind(self, kind: int) -> _Rates:
        return self._rates.setdefault(kind, _Rates(GUESSED.get(kind, LIKELY)))

    def _survival(self, record: Record, before: float, place: int) -> float:
        rates = self._kind(record.kind)
        rate = rates.later if place else rates.first
        return before * (rate if record.own is None else (rate + record.own) / 2)


def _within(ratio: float) -> float:
    return min(max(ratio, 1 / MOST_OFF), MOST_OFF)
