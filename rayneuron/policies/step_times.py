"""What a step takes, read off the points that were measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from rayneuron.types import Profile

FLAT_MS = 20.0  # of a step that nobody has measured


class Grid:
    """Milliseconds at every (x, y) of two axes: bilinear between the points, beyond the outermost what those say."""

    __slots__ = ("ms", "xs", "ys")

    def __init__(self, points: Iterable[tuple[int, int, float]]) -> None:
        known = {(x, y): ms for x, y, ms in points}
        self.xs = sorted({x for x, _ in known})
        self.ys = sorted({y for _, y in known})
        self.ms = [known[x, y] for x in self.xs for y in self.ys]

    def at(self, x: int, y: int) -> float:
        """The milliseconds of a place."""
        return sum([self.ms[i] * share for i, share in self.shares(x, y)])

    def shares(self, x: int, y: int) -> list[tuple[int, float]]:
        """Which of `ms` a place is made of, and their shares."""
        (i, right), (j, upper), width = _between(self.xs, x), _between(self.ys, y), len(self.ys)
        left, lower, at = 1 - right, 1 - upper, i * width + j
        corners = ((at, left * lower), (at + 1, left * upper), (at + width, right * lower), (at + width + 1, right * upper))
        return [corner for corner in corners if corner[1]]

    def points(self) -> list[tuple[int, int, float]]:
        """As it was made of, x running fastest."""
        return [(x, y, self.ms[i * len(self.ys) + j]) for j, y in enumerate(self.ys) for i, x in enumerate(self.xs)]


def decode_grid(profile: Profile) -> Grid:
    """x: rows, y: attended positions, both sizes of buckets."""
    return Grid(profile.decode)


def prefill_grid(profile: Profile) -> Grid:
    """x: new tokens of all rows together, y: attended positions, both sizes of buckets."""
    return Grid((rows * tokens, length, ms) for rows, tokens, length, ms in profile.prefill)


def between(points: Sequence[tuple[int, float]], n: int) -> float:
    """Milliseconds of n tokens: in proportion between the points, and as between the last two beyond them."""
    if len(points) < 2:
        return points[0][1]
    at = next((i for i in range(1, len(points)) if n <= points[i][0]), len(points) - 1)
    (x, left), (y, right) = points[at - 1], points[at]
    return left + (right - left) * (n - x) / (y - x)


def _between(axis: Sequence[int], value: int) -> tuple[int, float]:
    """The last point that is not beyond a value, and how far from there to the next the value lies."""
    at = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 1)
    if at == len(axis) - 1 or value <= axis[at]:
        return at, 0.0
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def flat(rows: int, length: int) -> Profile:
    """Of an engine that nobody has measured: every step takes the same."""
    prefill = ((1, length, length, FLAT_MS),)
    return Profile(
        batch=(rows,), lengths=(length,), context=(length,), prefix=(), chunk=length, decode=((rows, length, FLAT_MS),), prefill=prefill,
        tokens=(),
    )  # fmt: skip
