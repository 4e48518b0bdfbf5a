"""What a decode step takes, and what drafts add to it: by the profile, and by what steps have really taken."""

from __future__ import annotations

from math import inf

from rayneuron.policies.step_times import between, decode_grid
from rayneuron.types import Profile

VERIFY_MS = 0.15  # of the host, that a step takes longer with drafts than without
LEAST = 0.01  # of a step of one row, that a token more takes at least; a profile taken beside others may say that it takes nothing
RATE = 1 / 16  # of what is known, by a step; more as long as little is known
MOST_OFF = 8.0  # no step counts as having taken more than so many times what was expected, or less than that part of it
SEEN = 4.0  # what drafts add is little seen where it is less than this part of a step


class DraftCosts:
    """The profile is measured in half a second of the start, beside whatever else starts then: it says how times rise with rows, lengths
    and drafts. How high they are is learnt: of steps without drafts by rows, of what drafts add by rows and drafts, at powers of two."""

    def __init__(self, profile: Profile, tokens: int, whole: bool) -> None:
        """As for `Pace`."""
        self._decode, self._batch = decode_grid(profile), profile.batch
        short = {rows: ms for rows, length, ms in profile.decode if length == profile.lengths[0]}
        self.more_ms = {rows: max(0.0, ms - short[rows]) for rows, ms in profile.verify} if whole else {}
        self.ms = [between(profile.tokens, n) for n in range(tokens + 1)]
        for n in range(2, len(self.ms)):
            self.ms[n] = max(self.ms[n], self.ms[n - 1] + LEAST * self.ms[1])
        self._slow: dict[int, _Factor] = {}  # by rows: times what the profile says of steps without drafts
        self._dear: dict[tuple[int, int], _Factor] = {}  # by rows and drafts: of what these add
        self._drafted = _Factor()  # of all that have some
        self._least: dict[int, float] = {}  # by rows: `least`

    def plain(self, rows: int, length: int) -> float:
        """ms of a step without drafts, the longest row of which attends `length` positions."""
        graph = next((b for b in self._batch if b >= rows), rows) if self.more_ms else rows
        return self._decode.at(graph, length) * (self._slow.get(rows) or self._alike(rows)).value

    def knows(self, rows: int) -> bool:
        """Whether steps of about so many rows have told what one takes without drafts."""
        return rows in self._slow or any(4 * abs(rows - seen) <= rows for seen in self._slow)

    def added(self, rows: int, drafts: int, more_ms: float = 0.0) -> float:
        """ms that so many add to a step, and the host or passes of a draft model, which should take `more_ms`."""
        if not drafts:
            return 0.0
        (low, _), (high, share) = _shares(drafts)
        factor = self._near(rows, low)
        if share:
            factor += share * (self._near(rows, high) - factor)
        return (self._said(rows, drafts) + more_ms) * factor

    def least(self, rows: int) -> float:
        """ms of a draft in the step in which they cost least."""
        if rows not in self._least:
            most = len(self.ms) - 1 - rows
            some = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if n < most]
            self._least[rows] = min((self.added(rows, n) / n for n in [*some, most] if n > 0), default=inf)
        return self._least[rows]

    def took(self, rows: int, length: int, drafts: int, ms: float, more_ms: float = 0.0, tried: bool = False) -> None:
        """A step has taken so long, the host's part with it. `tried`: to see that; what is known is old."""
        plain_ms = self.plain(rows, length)
        if not drafts:
            known = self._slow.setdefault(rows, _Factor(self._alike(rows).value))
            known.learn(ms * known.value / plain_ms, 1.0)
            return
        said = self._said(rows, drafts) + more_ms
        weight = min(1.0, SEEN * max(self.added(rows, drafts, more_ms), ms - plain_ms) / plain_ms)
        self._drafted.learn((ms - plain_ms) / said, weight, tried)
        for size, share in _shares(drafts):
            if share:
                known = self._dear.setdefault((rows.bit_length(), size), _Factor(self._near(rows, size)))
                known.learn((ms - plain_ms) / said, weight * share, tried)
        self._least.clear()

    def _said(self, rows: int, drafts: int) -> float:
        """ms that so many add, by the profile."""
        if self.more_ms:
            graph = next((ms for most, ms in self.more_ms.items() if most >= rows), max(self.more_ms.values()))
            return VERIFY_MS + graph
        return VERIFY_MS + self.ms[min(rows + drafts, len(self.ms) - 1)] - self.ms[rows]

    def _alike(self, rows: int) -> _Factor:
        """What is known of steps with most nearly as many rows."""
        return self._slow[min(self._slow, key=lambda seen: abs(seen - rows))] if self._slow else _Factor()

    def _near(self, rows: int, size: int) -> float:
        """What is known of steps with as many rows and most nearly as many drafts, more than ever were tried adding what the profile says;
        of all, where nothing is."""
        about = rows.bit_length()
        known = self._dear.get((about, size))
        if known is not None:
            return known.value
        alike = [(abs(drafts - size), drafts) for many, drafts in self._dear if many == about]
        if not alike:
            return self._drafted.value
        near = min(alike)[1]
        value = self._dear[about, near].value
        return value if near > size else 1 + (value - 1) * self._said(rows, 1 << near) / self._said(rows, 1 << size)


def _shares(drafts: int) -> tuple[tuple[int, float], tuple[int, float]]:
    """The powers of two between which a number lies, and how near it is to each."""
    low = drafts.bit_length() - 1
    share = drafts / (1 << low) - 1
    return (low, 1 - share), (low + 1, share)


class _Factor:
    """A moving average."""

    __slots__ = ("_seen", "value")

    def __init__(self, value: float = 1.0) -> None:
        self.value, self._seen = value, 1.0

    def learn(self, ratio: float, weight: float, anew: bool = False) -> None:
        """One more, of little weight where it is hardly seen. `anew`: those before count as one."""
        self._seen = weight + (1.0 if anew else self._seen)
        rate = max(RATE, 1 / self._seen) * weight
        self.value = max(self.value + rate * (min(max(ratio, -MOST_OFF), MOST_OFF * self.value) - self.value), 1 / MOST_OFF)
