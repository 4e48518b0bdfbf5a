"""What a request costs an engine, in predicted milliseconds: read off the sizes of its graphs and the times of its steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from rayneuron.policies.chunks import fit
from rayneuron.policies.prefix_buckets import select_prefix
from rayneuron.policies.step_times import decode_grid, prefill_grid
from rayneuron.types import Profile

SOME_TOKENS = 128.0  # of an output, before the first has ended
LATER = 0.3  # of what all lose in steps to come, beside what is lost now: till then some have ended, and others have come anyway
A_PROMPT, AN_OUTPUT = 512, 64  # the request by which engines are compared
HALF_LIFE = 64  # of averages: steps, or requests, after which half of what is known is newer
RATE = 1 - 0.5 ** (1 / HALF_LIFE)
_KEPT = 16_384  # prefill steps, and places where prompts begin, that are remembered


Beside = tuple[list[float], int, float]  # what `Costs.beside` says


class _Cut:
    """Where the whole steps of a prompt end that is computed from some place on, and what it took until there; `beyond`: the next end."""

    __slots__ = ("beyond", "ends", "sums")

    def __init__(self, start: int, first: int) -> None:
        self.ends, self.sums, self.beyond = [start], [0.0], start + first


class Costs:
    """The times of one profile. Every step is of the graph that the engine would choose, so that crossing a bucket has its price."""

    __slots__ = (
        *("__weakref__", "_chunks", "_cuts", "_decode", "_grid", "_lengths", "_pairs", "_prompts", "_rows", "_sizes", "_stands"),
        *("_steps", "_together", "_typical", "profile"),
    )

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        grid, host_ms = decode_grid(profile), profile.host_ms
        self._rows, self._lengths = profile.batch[-1], profile.lengths
        lengths = (*profile.lengths, profile.lengths[-1])  # beyond the largest size, that of the largest
        sizes = [_rows(profile, rows) for rows in range(self._rows + 1)]
        self._decode = [[grid.at(rows, length) + host_ms for length in lengths] for rows in sizes]  # by true rows
        self._together = [[rows * ms for ms in line] for rows, line in enumerate(self._decode)]  # of all rows
        self._grid = prefill_grid(profile)
        self._chunks = fit(profile)
        self._pairs = [(tokens, prefix) for tokens in profile.context for prefix in profile.prefix]
        self._sizes: dict[tuple[int, int], float] = {}
        self._steps: dict[tuple[int, int], float] = {}  # the same by true tokens
        self._cuts: dict[tuple[int, bool], _Cut] = {}
        self._typical = self.stretches(A_PROMPT, AN_OUTPUT)
        self._stands: dict[tuple[int, int], tuple[float, Beside, float]] = {}  # by rows, and which of the lengths
        self._prompts: dict[tuple[int, int, bool], tuple[float, int]] = {}  # what was asked of late: the same is, several times a request

    def prefill_size(self, count: int, done: int) -> tuple[int, int]:
        """New tokens and attended positions of the graph for `count` of one row behind `done`; without padding, the true ones."""
        p = self.profile
        if not p.padded:
            return count, done + count
        if p.prefix:
            found = select_prefix(self._pairs, count, done)
            return found.prefill, min(found.prefill + found.prefix, p.lengths[-1])
        return _at_least(p.context, count), _at_least(p.lengths, done + count)

    def prefill(self, new: int, cached: int, decoding: bool = False) -> tuple[float, int]:
        """Milliseconds and steps of a prompt's `new` tokens behind `cached` ones, alone; `decoding`: cut as it is while others decode."""
        found = self._prompts.get((new, cached, decoding))
        return self._prompt(new, cached, decoding) if found is None else found

    def _prompt(self, new: int, cached: int, decoding: bool) -> tuple[float, int]:
        cut, end = self._cuts.get((cached, decoding)), cached + new
        if cut is None or cut.beyond <= end:
            cut = self._follow(cached, end, decoding)
        at = bisect_right(cut.ends, end) - 1
        done = cut.ends[at]
        took = (cut.sums[at], at) if done == end else (cut.sums[at] + self.step_ms(end - done, done), at + 1)
        if len(self._prompts) >= _KEPT:
            self._prompts.clear()
        self._prompts[new, cached, decoding] = took
        return took

    def step_ms(self, count: int, done: int) -> float:
        """Of one step that computes `count` tokens of a prompt behind `done`."""
        took = self._steps.get((count, done))
        return self._prefill_step(count, done) if took is None else took

    def _follow(self, cached: int, end: int, decoding: bool) -> _Cut:
        """Whole steps from a place on, up to an end."""
        most = self._chunks.most if decoding and self._chunks is not None else lambda done: self.profile.chunk
        cut = self._cuts.get((cached, decoding))
        if cut is None:
            if len(self._cuts) >= _KEPT:
                self._cuts.clear()
            cut = self._cuts[cached, decoding] = _Cut(cached, most(cached))
        while cut.beyond <= end:
            done = cut.ends[-1]
            cut.sums.append(cut.sums[-1] + self.step_ms(cut.beyond - done, done))
            cut.ends.append(cut.beyond)
            cut.beyond += most(cut.beyond)
        return cut

    def _prefill_step(self, count: int, done: int) -> float:
        if len(self._steps) >= _KEPT:
            self._steps.clear()
            self._sizes.clear()
        size = self.prefill_size(count, done)
        ms = self._sizes.get(size)
        if ms is None:
            ms = self._sizes[size] = self._grid.at(*size) + self.profile.host_ms
        self._steps[count, done] = ms
        return ms

    def prefill_ms(self, new: int, cached: int, rows: int = 0, longest: int = 0) -> float:
        """Until the first token of a prompt whose turn it is; its chunks alternate with the decode steps of `rows` others."""
        ms, steps = self.prefill(new, cached, rows > 0)
        return ms + (steps - 1) * self.decode_ms(rows, longest) if rows and steps > 1 else ms

    def decode_ms(self, rows: int, longest: int) -> float:
        """A decode step of so many rows, the longest of so many positions; beyond the largest sizes, that of the largest."""
        return self._decode[rows if rows < self._rows else self._rows][bisect_left(self._lengths, longest)]

    def stands(self, rows: int, longest: int) -> tuple[float, Beside, float]:
        """Of an engine where so many rows decode, the longest of so many positions: `decode_ms`, `beside`, and what all lose by one more
        request of the kind by which engines are compared."""
        place = rows if rows < self._rows else self._rows, bisect_left(self._lengths, longest)
        found = self._stands.get(place)
        if found is None:
            beside = self.beside(rows, longest)
            found = self._stands[place] = self.decode_ms(rows, longest), beside, LATER * added_ms(beside, self._typical)
        return found

    def beside(self, rows: int, longest: int) -> Beside:
        """Where one more sequence decodes beside `rows` others, the longest of so many positions: what a step takes all of them together,
        by length; which of the lengths theirs is; and what a step takes them without it."""
        if rows >= self._rows:
            rows = self._rows - 1
        at = bisect_left(self._lengths, longest)
        return self._together[rows + 1], at, self._together[rows][at]

    def stretches(self, prompt: int, output: float) -> list[tuple[int, float]]:
        """An output behind its prompt as steps at each of the lengths."""
        lengths, own, left = self._lengths, prompt + 1, output
        at, last = bisect_left(lengths, own), len(lengths) - 1
        if at >= last or left <= lengths[at] - own + 1:
            return [(at, left)]
        found: list[tuple[int, float]] = []
        while at < last and left > (steps := lengths[at] - own + 1):
            found.append((at, steps))
            own, left, at = own + steps, left - steps, at + 1
        found.append((at, left))
        return found

    def added_ms(self, rows: int, longest: int, prompt: int, output: float) -> float:
        """What all sequences together wait longer, this one's own decoding included, where it decodes beside `rows` others."""
        return added_ms(self.beside(rows, longest), self.stretches(prompt, output))

    def work_ms(self, new: int, cached: int, output: float, rows: int = 1) -> float:
        """What a request takes of a device that is full: its prefill, and the share of its rows in the decode steps of all."""
        length = int(new + cached + output / 2)
        return self.prefill(new, cached)[0] + rows * output * self._decode[-1][bisect_left(self._lengths, length)] / self._rows

    def backlog_ms(self, remaining: Iterable[tuple[int, int]], rows: int, longest: int) -> float:
        """Until a prompt that comes now would begin: (new, done) tokens of those before it, their chunks between decode steps."""
        ms = 0.0
        for new, done in remaining:
            took, steps = self.prefill(new, done, rows > 0)
            ms += took + (steps * self.decode_ms(rows, longest) if rows else 0.0)
        return ms


class TimesNow:
    """What the steps of a replica take by its last word, beside the `Costs` it is chosen by. These stay: one that was slow for a while, and
    is asked no more for that, would not measure that it is fast again."""

    __slots__ = ("_decode", "_host_ms", "_prefill")

    def __init__(self, profile: Profile) -> None:
        self._decode, self._prefill, self._host_ms = decode_grid(profile), prefill_grid(profile), profile.host_ms

    def prefill_ms(self, costs: Costs, new: int, cached: int, rows: int, longest: int) -> float:
        """As `Costs.prefill_ms`; by how much its first step has changed, all of a prompt's have."""
        ms, steps = costs.prefill(new, cached, rows > 0)
        first = min(new, costs.profile.chunk)
        ms *= (self._prefill.at(*costs.prefill_size(first, cached)) + self._host_ms) / costs.step_ms(first, cached)
        if not rows or steps < 2:
            return ms
        step_ms = self._decode.at(_rows(costs.profile, rows), _at_least(costs.profile.lengths, longest)) + self._host_ms
        return ms + (steps - 1) * step_ms


def added_ms(beside: Beside, stretches: Iterable[tuple[int, float]]) -> float:
    """`Costs.added_ms` of what `beside` and `stretches` say."""
    (after, at, before), total = beside, 0.0
    for length, steps in stretches:
        total += steps * (after[length if length > at else at] - before)
    return total


def expected(known: float, most: int | None) -> float:
    """Tokens of an output: as many as there were of late (0: nobody knows), never more than asked for."""
    tokens = known or SOME_TOKENS
    return tokens if most is None else min(tokens, most)


def moved(known: float, new: float) -> float:
    """An average of late that has heard of one more; `known` 0: of none before."""
    return known + RATE * (new - known) if known else new


def _rows(profile: Profile, rows: int) -> int:
    return _at_least(profile.batch, rows) if profile.padded else rows


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    return sizes[min(bisect_left(sizes, wanted), len(sizes) - 1)]
