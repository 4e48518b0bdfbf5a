"""How many drafts of each row one step tries: as many as pay, by what more tokens cost here and how often drafts have come true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from rayneuron.policies.step_times import decode_grid
from rayneuron.types import Profile

FORCED = -1  # the kind of what a constraint leaves no choice of
# By kind, before there is experience: how often the first draft comes true; others LIKELY.
GUESSED = {FORCED: 0.95, 0: 0.7, 1: 0.1, 2: 0.2, 3: 0.4}
LIKELY = 0.6
CLASS_RATE, OWN_RATE = 0.05, 0.2  # of the moving averages of a kind, and of a sequence
VERIFY_MS = 0.15  # of the host, that a step takes longer with drafts than without
READ_MS = 0.15  # of the host, for a token it samples or describes itself
PROBE = 32  # steps without any draft, after which one is tried


@dataclass(slots=True)
class Record:
    """How the drafts of one sequence have fared. `kind`: of those under way; longer matches are another kind than shorter ones."""

    kind: int = 0
    own: float | None = None


@dataclass(slots=True)
class Candidate:
    """What a row could try: so many drafts of its record's kind. `read`: the host reads the logits of each."""

    record: Record
    drafts: int
    read: bool = False


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

    def __init__(self, profile: Profile, tokens: int) -> None:
        """tokens: the most of a step."""
        self._decode = decode_grid(profile)
        self._ms = [_between(profile.tokens, n) for n in range(tokens + 1)]
        self._rates: dict[int, _Rates] = {}
        self._without = 0  # steps since the last draft

    def hopeless(self, record: Record, rows: int, length: int) -> bool:
        """Whether no kind of draft of this row could pay, so that none need be looked for; never where it is time to try one."""
        if self._without >= PROBE or record.own is None:
            return False
        best = max((rates.first for kind, rates in self._rates.items() if kind != FORCED), default=1.0)
        return (best + record.own) / 2 * self._decode.at(rows, length) < rows * (self._ms[rows + 1] - self._ms[rows])

    def choose(self, candidates: Sequence[Candidate], length: int) -> list[int]:
        """Drafts of each row of a decode step, the longest of which attends `length` positions."""
        rows, chosen = len(candidates), [0] * len(candidates)
        tokens, size, plain_ms = float(rows), rows, self._decode.at(rows, length)
        cost_ms = plain_ms
        queue = [(-self._survival(c.record, 1.0, 0), i) for i, c in enumerate(candidates) if c.drafts]
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
        if size > rows and tokens * plain_ms > rows * (cost_ms + VERIFY_MS):
            self._without = 0
            return chosen
        self._without += 1
        probing = self._without > PROBE and queue
        if probing:
            self._without = 0
        return [int(bool(probing) and i == queue[0][1]) for i in range(rows)]

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
