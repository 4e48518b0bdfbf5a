"""What the steps of this engine take: measured once behind the warm-up, then refined by those that run.

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
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from rayneuron.devices.base import DRAFTED
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import SMALLEST_CONTEXT, at_least
from rayneuron.engine.runner import Runs
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.models.kv import KvSpace
from rayneuron.policies.chunks import fit
from rayneuron.policies.step_times import between, decode_grid, prefill_grid
from rayneuron.types import Profile, Request, SamplingParams

BUDGET_S = 0.5
VERIFY_S = 0.25  # more, for steps with drafts
DECODE_STEPS = 4.0  # a prefill step takes as long as so many where nobody says how long
HALF_LIFE = 64  # steps, or requests, after which half of what is known is newer
MOST_OFF = 5.0  # no more of a disturbed step counts than so many times what was expected, or that part of it
QUIETER = 0.75  # a step that takes less than this part of what it took back then is news
FULL = 0.75  # a step that fills less of its bucket says little of those that fill it
_RATE = 1 - 0.5 ** (1 / HALF_LIFE)


@dataclass(slots=True)
class StepInfo:
    """What the last step did: rows and new tokens, the seconds of planning, running and committing, by row with drafts how many there were
    and how many came true, and why there were none (`Plan.paused`)."""

    tag: str = ""
    rows: int = 0
    tokens: int = 0
    plan_s: float = 0.0
    run_s: float = 0.0
    commit_s: float = 0.0
    drafts: list[tuple[int, int]] = field(default_factory=list)
    paused: str = ""

    @classmethod
    def of(cls, plan: Plan, plan_s: float, run_s: float, commit_s: float) -> StepInfo:
        """Of a step that has been committed."""
        works = plan.works
        drafts = [(len(w.drafts), w.accepted) for w in works if w.drafts] if plan.tag == "verify" else []
        tokens = sum([w.count for w in works]) + sum([tried for tried, _ in drafts])
        return cls(plan.tag, len(works), tokens, plan_s, run_s, commit_s, drafts, plan.paused)


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


def measure(runner: Runs, vocab: int, clock: Callable[[], float] = time.perf_counter) -> Profile:
    """Time up to twelve steps of a warm runner, the lesser of two runs each, within the budget; what it does not reach is estimated.

    Nothing is written but scratch, so that memory nobody has used stays unused. On a CPU attention over long contexts therefore reads few
    pages, and those points are lower bounds until real steps have refined them.
    """
    c = runner.capacity
    deepest = at_least(c.lengths, c.chunk, "sequence length")
    decode = [Point("decode", rows, 1, n) for n in dict.fromkeys((c.lengths[0], c.lengths[-1])) for rows in _some(c.batch)]
    prefill = [Point("prefill", 1, tokens, n) for n in dict.fromkeys((deepest, c.lengths[-1])) for tokens in _some(c.context)]
    short = decode[: len(_some(c.batch))] + prefill[: len(_some(c.context))]
    held = at_least(c.lengths, max(c.verify, 1), "sequence length")
    verify = [Point("verify", rows, c.verify, held) for rows in _some(c.batch) if c.verify]
    tried = [point for rows in _some(c.batch) for point in _verified(rows, c.verify, held) if verify]
    drafted = [dataclasses.replace(p, drafted=True) for p in verify if c.drafts]
    for point in drafted[:1] * 2:  # a draft model's weights are met by its own passes alone: the first ones take many times as long
        _took(runner, point, vocab, clock)
    # a very small step takes what the weights do, and tells nothing of larger ones; what fits where a prompt is longest hangs on attention
    least, width = 1 if c.context[0] >= SMALLEST_CONTEXT else 2, len(_some(c.context))
    sure = (decode[0], *prefill[:least], *prefill[width : width + 1], *verify[:1])
    points = (*sure, *decode[: len(verify)], *tried, *drafted) if drafted else (*sure, *short)
    found = _timed(runner, list(dict.fromkeys((*points, *decode, *prefill))), len(sure), vocab, clock)
    if tried and not drafted:
        found |= _timed(runner, tried, 0, vocab, clock, VERIFY_S)
    tokens = _rising(_added(found, [*decode[: len(verify)], *tried]) if verify else ((p.size, found[p]) for p in short if p in found))
    passes = _rising(_passes(found, drafted))
    _fill(found, decode, 0)
    _fill(found, prefill, 1)
    _fill(found, verify, 1)
    return Profile(
        batch=c.batch,
        lengths=c.lengths,
        context=c.context,
        prefix=c.prefix,
        chunk=c.chunk,
        decode=tuple((p.rows, p.length, found[p]) for p in decode),
        prefill=tuple((p.rows, p.tokens, p.length, found[p]) for p in prefill),
        tokens=tokens,
        verify=tuple((p.rows, found[p]) for p in verify),
        passes=passes,
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
    some, tokens, deep, prefill_ms = profile.prefill[len(_some(profile.context)) // 2]  # of the shorter contexts, by tokens
    known = ((Point("decode", rows, 1, length), decode_ms), (Point("prefill", some, tokens, deep), prefill_ms))
    return any(_took(runner, point, vocab, clock) < QUIETER * was_ms for point, was_ms in known)


def limited(profile: Profile, chunk_ms: float | None) -> Profile:
    """With the longest time of a prefill step while others decode: what the deployment says, else so many decode steps of some rows."""
    if chunk_ms is None:
        rows = profile.batch[len(profile.batch) // 2]
        chunk_ms = DECODE_STEPS * decode_grid(profile).at(rows, profile.lengths[0])
    return replace(profile, chunk_ms=chunk_ms)


class Timing:
    """A profile and what its times have become since. Told by the engine's thread, read by any. `tells`: who else hears of each step, in
    ms with the host's part."""

    def __init__(self, fixed: Profile, tells: Callable[[Plan, float], None] | None = None) -> None:
        self.fixed = fixed
        self._tells = tells
        self._decode, self._prefill = decode_grid(fixed), prefill_grid(fixed)
        chunks = fit(fixed)  # the scheduler stays with that
        self._fitting = chunks.fitting if chunks is not None else ()
        self._host_ms = self._output_tokens = 0.0

    def note(self, plan: Plan, info: StepInfo, overlaps: bool) -> None:
        """A step has run; where it `overlaps` the one before, it took as long as the whole turn."""
        self._host_ms = _moved(self._host_ms, 1e3 * (host_s := info.plan_s + info.commit_s))
        run_s = info.run_s + (host_s if overlaps else 0.0)
        if self._tells is not None:
            self._tells(plan, 1e3 * (info.run_s + host_s))
        works, profile = plan.works, self.fixed
        if plan.fills:
            return
        if plan.tag == "decode":
            grid, true, size = self._decode, len(works), at_least(profile.batch, len(works), "batch")
        elif plan.tag == "prefill" and works[0].sequence.prompt_logprobs is None:
            counts = [work.count for work in works]
            grid, true, size = self._prefill, sum(counts), len(counts) * at_least(profile.context, max(counts), "context")
        else:
            return  # drafts, and the logits of a whole prompt, take time of their own
        if true < FULL * size:
            return
        length = at_least(profile.lengths, max([work.start + work.count for work in works]), "sequence length")
        ratio = min(max(1e3 * run_s / grid.at(size, length), 1 / MOST_OFF), MOST_OFF)
        for at, share in grid.shares(size, length):
            grid.ms[at] *= ratio ** (_RATE * share)

    def ended(self, tokens: int) -> None:
        """A choice has ended by itself, with so many tokens."""
        self._output_tokens = _moved(self._output_tokens, tokens)

    def profile(self) -> Profile:
        """As it is now."""
        prefill = [(1, tokens, length, ms) for tokens, length, ms in self._prefill.points()]
        changed = {"decode": tuple(self._decode.points()), "prefill": tuple(prefill)}
        return replace(self.fixed, **changed, fitting=self._fitting, host_ms=self._host_ms, output_tokens=self._output_tokens)


def _moved(known: float, new: float) -> float:
    return known + _RATE * (new - known) if known else new


def _some(sizes: Listed[int]) -> tuple[int, ...]:
    """The first, the middle and the last."""
    return tuple(dict.fromkeys((sizes[0], sizes[len(sizes) // 2], sizes[-1])))


def _timed(
    runner: Runs, points: Listed[Point], sure: int, vocab: int, clock: Callable[[], float], budget_s: float = BUDGET_S
) -> dict[Point, float]:
    """Milliseconds of the points, the first `sure` of which are never left out."""
    found: dict[Point, float] = {}
    began = clock()
    for again in (False, True):
        for i, point in enumerate(points):
            if (i < sure and not again) or clock() - began + _expected(point, found) / 1e3 <= budget_s:
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
    """Milliseconds: as measured before, or as those alike say at worst; with drafts, as the largest of them says."""
    alike = [(p.size, ms / p.size) for p, ms in found.items() if p.tag == point.tag]
    worst = max(alike, default=(0, 0.0))[1] if point.tag == "verify" else max([ms for _, ms in alike], default=0.0)
    return found.get(point, point.size * worst)


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
