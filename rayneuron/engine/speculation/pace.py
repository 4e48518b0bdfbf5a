"""How many drafts of each row one step tries: as many as pay, by what more tokens cost here and how often drafts have come true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from rayneuron.policies.step_times import decode_grid
from rayneuron.types import Profile

FORCED, CHAINED = -1, -2  # the kinds of what a constraint leaves no choice of, and of what a draft model makes
# By kind, before there is experience: how often the first draft comes true; others LIKELY.
GUESSED = {CHAINED: 0.8, FORCED: 0.95, 0: 0.7, 1: 0.1, 2: 0.2, 3: 0.4}
LIKELY = 0.6
CLASS_RATE, OWN_RATE = 0.05, 0.2  # of the moving averages of a kind, and of a sequence
VERIFY_MS = 0.15  # of the host, that a step takes longer with drafts than without
READ_MS = 0.15  # of the host, for a token it samples or describes itself
PROBE = 32  # steps without any draft, after which one is tried
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
    """Chooses by `profile`, which never changes, and by what it is told of drafts. No clock: the same steps make the same choices.

    A draft is worth its survival, the probability that it and all before it come true. In the order of worth drafts are taken while tokens
    a millisecond rise; worth falls along a row and cost does not, so the first one that does not pay ends it.
    """

    def __init__(self, profile: Profile, tokens: int, whole: bool = False) -> None:
        """tokens: the most of a step. whole: one with drafts takes as long however few they are, as a compiled graph does."""
        self._decode, self._batch = decode_grid(profile), profile.batch
        short = {rows: ms for rows, length, ms in profile.decode if length == profile.lengths[0]}
        self._more_ms = {rows: max(0.0, ms - short[rows]) for rows, ms in profile.verify} if whole else {}
        self._passes = profile.passes or tuple((rows, ms) for rows, length, ms in profile.decode if length == profile.lengths[0])
        self._read_ms = min((ms / (rows * n) for rows, n, _, ms in profile.prefill), default=0.0)  # a token; the model itself takes no less
        self._ms = [_between(profile.tokens, n) for n in range(tokens + 1)]
        self._rates: dict[int, _Rates] = {}
        self._without = 0  # steps since the last draft

    def hopeless(self, record: Record, rows: int, length: int) -> bool:
        """Whether no kind of draft of this row could pay, so that none need be looked for; never where it is time to try one."""
        if self._without >= PROBE or record.own is None or self._more_ms:
            return False  # in a step that others' drafts pay for, one more costs nothing
        best = max((rates.first for kind, rates in self._rates.items() if kind != FORCED), default=1.0)
        return (best + record.own) / 2 * self._decode.at(rows, length) < rows * (self._ms[rows + 1] - self._ms[rows])

    def choose(self, candidates: Sequence[Candidate], length: int) -> list[int]:
        """Drafts of each row of a decode step, the longest of which attends `length` positions."""
        rows, chosen = len(candidates), [0] * len(candidates)
        graph = next((b for b in self._batch if b >= rows), rows) if self._more_ms else rows
        plain_ms = self._decode.at(graph, length)
        made = _Step(float(rows), rows, plain_ms)
        queue = (self._all if self._more_ms else self._one_by_one)(candidates, made, chosen)
        chained = [i for i, c in enumerate(candidates) if c.drafts and c.behind is not None]
        if chained:
            made = self._chained(candidates, chained, made, chosen)
        if made.size > rows and made.tokens * plain_ms > rows * (made.ms + VERIFY_MS):
            self._without = 0
            return chosen
        self._without += 1
        after, first = (PROBE, queue[0][1]) if queue else (PROBE_CHAINED, chained[0] if chained else -1)
        if self._without <= after:
            return [0] * rows
        self._without = 0
        return [int(i == first) for i in range(rows)]

    def _one_by_one(self, candidates: Sequence[Candidate], made: _Step, chosen: list[int]) -> list[tuple[float, int]]:
        """Drafts that are there already, added to a step; what is left of them, the likeliest first."""
        tokens, size, cost_ms = made.tokens, made.size, made.ms
        queue = [(-self._survival(c.record, 1.0, 0), i) for i, c in enumerate(candidates) if c.drafts and c.behind is None]
        heapify(queue)
        while queue:
            worth, i = -queue[0][0], queue[0][1]
            if not worth:
                break  # all there are have been taken
            more_ms = cost_ms + self._ms[size + 1] - self._ms[size] + READ_MS * candidates[i].read
            if (tokens + worth) * cost_ms <= tokens * more_ms:
                break
            tokens, cost_ms, size = tokens + worth, more_ms, size + 1
            chosen[i] += 1
            left = chosen[i] < candidates[i].drafts
            heapreplace(queue, (-self._survival(candidates[i].record, worth, chosen[i]) if left else 0.0, i))
        made.tokens, made.size, made.ms = tokens, size, cost_ms
        return queue

    def _all(self, candidates: Sequence[Candidate], made: _Step, chosen: list[int]) -> list[tuple[float, int]]:
        """All drafts there are, added to a step that takes as long for one; the row whose first is the likeliest."""
        made.ms += next((ms for rows, ms in self._more_ms.items() if rows >= len(candidates)), max(self._more_ms.values()))
        for i, candidate in enumerate(candidates):
            worth, chosen[i] = 1.0, candidate.drafts
            for place in range(candidate.drafts):
                worth = self._survival(candidate.record, worth, place)
                made.tokens += worth
            made.ms += READ_MS * candidate.read * candidate.drafts
        made.size += sum(chosen)
        return sorted((-self._survival(c.record, 1.0, 0), i) for i, c in enumerate(candidates) if c.drafts)[:1]

    def _chained(self, candidates: Sequence[Candidate], which: list[int], made: _Step, chosen: list[int]) -> _Step:
        """Drafts that a draft model makes, a pass for all rows at a time: as deep as pays, which is not seen before all depths are."""
        best, worth = made, dict.fromkeys(which, 1.0)
        tokens, size, ms = made.tokens, made.size, made.ms
        ms += self._read_ms * sum(candidates[i].behind or 0 for i in which) / SPREAD
        for depth in range(max(candidates[i].drafts for i in which)):
            going = [i for i in which if candidates[i].drafts > depth]
            for i in going:
                worth[i] = self._survival(candidates[i].record, worth[i], depth)
                tokens += worth[i]
            ms += _between(self._passes, len(going)) + self._ms[size + len(going)] - self._ms[size]
            ms += READ_MS * sum(candidates[i].read for i in going)
            size += len(going)
            if tokens * best.ms > best.tokens * ms:
                best = _Step(tokens, size, ms)
                for i in which:
                    chosen[i] = min(depth + 1, candidates[i].drafts)
        return best

    def learn(self, record: Record, drafts: int, accepted: int) -> None:
        """So many drafts of a row were tried, of which the first `accepted` came true."""
        rates = self._kind(record.kind)
        if accepted:
            self._without = PROBE  # what comes true is tried once more
        for place in range(min(accepted + 1, drafts)):
            came = float(place < accepted)
            if place:
                rates.later += CLASS_RATE * (came - rates.later)
            else:
                rates.first += CLASS_RATE * (came - rates.first)
            own = rates.first if record.own is None else record.own
            record.own = own + OWN_RATE * (came - own)

    def _kind(self, kind: int) -> _Rates:
        return self._rates.setdefault(kind, _Rates(GUESSED.get(kind, LIKELY)))

    def _survival(self, record: Record, before: float, place: int) -> float:
        rates = self._kind(record.kind)
        rate = rates.later if place else rates.first
        return before * (rate if record.own is None else (rate + record.own) / 2)


def _between(points: Sequence[tuple[int, float]], n: int) -> float:
    """Milliseconds of n tokens: in proportion between the points, and as between the last two beyond them."""
    if len(points) < 2:
        return points[0][1]
    at = next((i for i in range(1, len(points)) if n <= points[i][0]), len(points) - 1)
    (x, left), (y, right) = points[at - 1], points[at]
    return left + (right - left) * (n - x) / (y - x)
