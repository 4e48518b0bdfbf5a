"""What the steps of this engine take, measured once behind the warm-up (`engine.timing` refines it).

Speculation asks what more tokens add to a step. On the CPU that hangs on how many there are, not on whose they are, and the first one
beyond what a product takes at once may cost more than all the next; so `Profile.tokens` is what one draft, one of each row and all of them
add to a decode step of some rows, over the shortest contexts (where nothing is verified, decode by rows and one row's prefill). Read it as
differences: a step of n tokens takes tokens(n) - tokens(rows), in proportion between the points, more than the decode step of as many
rows, which the decode grid knows by context.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Literal

from rayneuron.devices.base import DRAFTED
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import SMALLEST_CONTEXT, at_least
from rayneuron.engine.runner import Runs
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.models.kv import KvSpace
from rayneuron.policies.step_times import between
from rayneuron.types import Profile, Request, SamplingParams

BUDGET_S = 0.5
VERIFY_S = 0.25  # more, for steps with drafts
QUIETER = 0.75  # a step that takes less than this part of what it took back then is news


@dataclass(frozen=True, slots=True)
class Point:
    """A step to measure: `tokens` new ones of each of `rows`, the last at position length - 1. `drafted`: by a draft model; `one`: only
    the first row has drafts."""

    tag: Literal["prefill", "decode", "verify"]
    rows: int
    tokens: int
    length: int
    drafted: bool = False
    one: bool = False

    @property
    def size(self) -> int:
        """New tokens of all rows."""
        return self.rows + self.tokens - 1 if self.one else self.rows * self.tokens


def measure(runner: Runs, vocab: int, clock: Callable[[], float] = time.perf_counter, padded: bool = True) -> Profile:
    """Time up to twelve steps of a warm runner, the lesser of two runs each, within the budget; what it does not reach is estimated.

    Nothing is written but scratch, so that memory nobody has used stays unused. On a CPU attention over long contexts therefore reads few
    pages, and those points are lower bounds until real steps have refined them.
    """
    c = runner.capacity
    deepest = at_least(c.lengths, c.chunk, "sequence length")
    decode = [Point("decode", rows, 1, n) for n in dict.fromkeys((c.lengths[0], c.lengths[-1])) for rows in _some(c.batch)]
    prefill = [Point("prefill", 1, tokens, n) for n in dict.fromkeys((deepest, c.lengths[-1])) for tokens in _some(c.context)]
    ones = [] if padded else [Point("prefill", 1, 1, n) for n in dict.fromkeys((deepest, c.lengths[-1]))]  # a bucket says nothing of them
    short = decode[: len(_some(c.batch))] + prefill[: len(_some(c.context))]
    held = at_least(c.lengths, max(c.verify, 1), "sequence length")
    verify = [Point("verify", rows, c.verify, held) for rows in _some(c.batch) if c.verify]
    tried = [point for rows in _some(c.batch) for point in _verified(rows, c.verify, held) if verify]
    drafted = [dataclasses.replace(p, drafted=True) for p in verify if c.drafts]
    for point in drafted[:1] * 2:  # a draft model's weights are met by its own passes alone: the first ones take many times as long
        _took(runner, point, vocab, clock)
    # a very small step takes what the weights do, and tells nothing of larger ones; what fits where a prompt is longest hangs on attention
    least, width = 1 if c.context[0] >= SMALLEST_CONTEXT else 2, len(_some(c.context))
    sure = (decode[0], *ones[:1], *prefill[:least], *prefill[width : width + 1], *verify[:1])
    first = (*decode[: len(verify)], *tried, *drafted) if drafted else short
    rest = [point for point in dict.fromkeys((*first, *decode, *ones, *prefill)) if point not in sure]
    found = _timed(runner, sure, rest, vocab, clock)
    if tried and not drafted:
        found |= _timed(runner, (), tried, vocab, clock, VERIFY_S)
    tokens = _rising(_added(found, [*decode[: len(verify)], *tried]) if verify else ((p.size, found[p]) for p in short if p in found))
    passes = _rising(_passes(found, drafted))
    _fill(found, decode, 0)
    _fill(found, ones, 1)
    _fill(found, prefill, 1)
    _fill(found, verify, 1)
    return Profile(
        batch=c.batch,
        lengths=c.lengths,
        context=c.context,
        prefix=c.prefix,
        chunk=c.chunk,
        decode=tuple((p.rows, p.length, found[p]) for p in decode),
        prefill=tuple((p.rows, p.tokens, p.length, found[p]) for p in (*ones, *prefill)),
        tokens=tokens,
        verify=tuple((p.rows, found[p]) for p in verify),
        passes=passes,
        padded=padded,
    )


def _verified(rows: int, most: int, length: int) -> Iterator[Point]:
    """Steps of so many rows with drafts: with one, one of each row, and all."""
    if rows > 1:
        yield Point("verify", rows, 2, length, one=True)
    for tokens in dict.fromkeys((2, most)):
        yield Point("verify", rows, tokens, length)


def _added(found: dict[Point, float], short: Listed[Point]) -> Iterator[tuple[int, float]]:
    """(tokens, ms) of a step: the first row's decode step, and on top of it what more tokens add. At each number the most rows that are no
    more tell."""
    known: list[tuple[int, float]] = []
    for plain in [point for point in short if point.tag == "decode" and point in found]:
        base = between(known, plain.rows) if known else found[plain]
        known = [each for each in known if each[0] < plain.rows] + [(plain.rows, base)]
        tried = [point for point in short if point.tag == "verify" and point.rows == plain.rows and point in found]
        known += [(point.size, base + max(0.0, found[point] - found[plain])) for point in tried]
    yield from known


def _passes(found: dict[Point, float], drafted: Iterable[Point]) -> Iterator[tuple[int, float]]:
    """(rows, ms) of one pass of the draft model: what a step takes longer for those it makes."""
    for point in drafted:
        without = found.get(dataclasses.replace(point, drafted=False))
        if point in found and without is not None:
            yield point.rows, max(0.0, found[point] - without) / (point.tokens - 1)


def outdated(profile: Profile, runner: Runs, vocab: int, clock: Callable[[], float] = time.perf_counter) -> bool:
    """Whether a decode or a prefill step takes far less than the profile says: others kept the machine busy back then. How long a chunk
    may be hangs on both."""
    rows, length, decode_ms = profile.decode[0]
    sizes = _some(profile.context)
    some, tokens, deep, prefill_ms = next(at for at in profile.prefill if at[1] == sizes[len(sizes) // 2])  # over the shorter context
    known = ((Point("decode", rows, 1, length), decode_ms), (Point("prefill", some, tokens, deep), prefill_ms))
    return any(_took(runner, point, vocab, clock) < QUIETER * was_ms for point, was_ms in known)


def _some(sizes: Listed[int]) -> tuple[int, ...]:
    """The first, the middle and the last."""
    return tuple(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))


def _timed(
    runner: Runs, sure: Listed[Point], rest: Listed[Point], vocab: int, clock: Callable[[], float], budget_s: float = BUDGET_S
) -> dict[Point, float]:
    """Milliseconds of the points. The `sure` ones are never left out, and first come again while there is time, however
    long they took: one that was disturbed would be multiplied in what is estimated."""
    began = clock()
    found = {point: _took(runner, point, vocab, clock) for point in sure}
    for i, point in enumerate((*sure, *rest, *rest)):
        expected_ms = 0.0 if i < len(sure) else _expected(point, found)
        if clock() - began + expected_ms / 1e3 <= budget_s:
            took = _took(runner, point, vocab, clock)
            found[point] = min(took, found.get(point, took))
    return found


def _took(runner: Runs, point: Point, vocab: int, clock: Callable[[], float]) -> float:
    """Milliseconds of one run."""
    plan = Plan(point.tag, _works(point, runner.capacity.space, vocab))
    started = clock()
    runner.start(plan).wait()
    return 1e3 * (clock() - started)


def _expected(point: Point, found: dict[Point, float]) -> float:
    """Milliseconds: as measured before, or in proportion to the largest of those alike that are no larger."""
    alike = [(p.size, ms) for p, ms in found.items() if p.tag == point.tag]
    size, ms = max([at for at in alike if at[0] <= point.size], default=min(alike, default=(1, 0.0)))
    return found.get(point, ms * max(point.size / size, 1.0))


def _works(point: Point, space: KvSpace, vocab: int) -> list[Work]:
    """The rows of a step; where the KV holds less, what it holds."""
    rows, ledger = min(point.rows, space.blocks), Blocks(space)
    length = min(point.length, space.blocks // rows * space.block)
    ids, count = [7919 * i % vocab for i in range(length)], min(point.tokens, length)
    request = Request(id="warm-up", prompt_ids=[], params=SamplingParams(temperature=0.0))
    works = []
    for _ in range(rows):
        hold = ledger.admit(length)
        assert hold is not None
        hold.shared = len(hold.blocks)  # nobody writes what is shared
        sequence = Sequence(request, 0, ids, seed=0, max_tokens=1, order=0, prompt_len=length, hold=hold)
        works.append(Work.of(sequence, length - count, 1 if point.tag == "verify" else count))
        if point.tag == "verify" and (len(works) == 1 or not point.one):
            works[-1].drafts = (DRAFTED,) * (count - 1) if point.drafted else tuple(ids[length - count + 1 :])
    return works


def _fill(found: dict[Point, float], points: Listed[Point], power: int) -> None:
    """Estimate what there was no time for: of the shortest length from the next smaller size, times the ratio of sizes to a power; of a
    longer one from the same size of the shorter, and what its positions add to the smallest, times the ratio of sizes. A longer context
    never takes less time."""
    width = len(points) // max(len({point.length for point in points}), 1)
    for i, point in enumerate(points):
        if i < width:
            before = points[max(i - 1, 0)]
            found.setdefault(point, found[before] * (point.size / before.size) ** power)
            continue
        shorter, first = found[points[i - width]], points[i - i % width]
        added = found.get(first, 0.0) - found[points[i - i % width - width]]
        found[point] = max(found.get(point, shorter + max(added, 0.0) * point.size / first.size), shorter)


def _rising(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """By size, none less than one before it."""
    made: dict[int, float] = {}
    most = 0.0
    for size, ms in sorted(points):
        most = max(most, ms)
        made[size] = most
    return tuple(made.items())
