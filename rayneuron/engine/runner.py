"""One rank: its device, the shapes it runs, and plans as their padded arrays.

Shapes: B rows, T new tokens, M blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rayneuron.devices.base import (
    FOLLOWS,
    LIKELIEST,
    LOGITS,
    POOLED,
    SAMPLED,
    SCORES,
    Batch,
    Device,
    Pending,
    Program,
    Shape,
    Want,
    Weights,
    blank,
)
from rayneuron.engine.buckets import Capacity, decode_shape, fill_shape, inventory, prefill_shape, verify_shape
from rayneuron.engine.hold import Hold
from rayneuron.engine.sampling import uniforms
from rayneuron.engine.sequence import Plan, Work, wants_scores
from rayneuron.engine.shelf import Keeps, Resident, Shelf
from rayneuron.engine.step import HOW, step
from rayneuron.engine.swap import Swap, Swaps
from rayneuron.models import Progress
from rayneuron.models.arch import Arch
from rayneuron.models.heads import Heads
from rayneuron.models.kv import KvSpace
from rayneuron.models.memory import kv_shape

_PLACES = ("tokens", "positions", "slots")


class RowError(Exception):
    """What one work asks for cannot be laid out; the others can."""

    def __init__(self, work: Work, why: Exception) -> None:
        super().__init__(f"{type(why).__name__}: {why}")
        self.work = work


class Runs(Protocol):
    """What the engine needs of a runner: one rank here, or a group of them (group.group)."""

    @property
    def capacity(self) -> Capacity:
        """Rows, lengths and buckets."""

    @property
    def overlaps(self) -> bool:
        """Whether `start` returns before the step has ended, so that it pays to begin the next; at most one other is under way."""

    @property
    def shelf(self) -> Keeps | None:
        """Its adapters on the host; None where there is no room for any."""

    @property
    def swap(self) -> Swaps | None:
        """How it goes on with other weights; None where it cannot."""

    def start(self, plan: Plan) -> Pending:
        """Begin one step."""

    def close(self) -> None:
        """Give everything back."""


class Runner:
    """Runs plans on one device. `program`: what a step is, where it is not the whole model on one rank; `draft`: what drafts within it."""

    def __init__(
        self, arch: Arch, device: Device, capacity: Capacity, program: Program | None = None, draft: Arch | Heads | None = None
    ) -> None:  # fmt: skip
        self.arch, self.draft = arch, draft
        self.device = device
        self.capacity = capacity
        self._space = capacity.space
        self.program = program or partial(step, arch)
        self.overlaps = device.overlaps
        self.shelf: Shelf | Resident | None = None
        self.swap: Swap | None = None

    def load(self, weights: Weights) -> None:
        """Hand weights to the device and allocate KV."""
        ranks = self.device.comm.ranks
        shape = kv_shape(self.arch, self._space, ranks, len(weights["layers"]))
        if isinstance(self.draft, Heads):
            shape = replace(shape, draft=kv_shape(self.draft.arch, self._space, ranks, self.draft.layers), features=self.draft.width)
        elif self.draft is not None:
            shape = replace(shape, draft=kv_shape(self.draft, self._space, ranks))
        self.device.load(weights, shape)

    def prepare(self, progress: Progress) -> None:
        """What `warm` does before it needs other processes."""
        self.device.prepare(self.program, inventory(self.capacity), progress)

    def warm(self, progress: Progress) -> None:
        """Make every shape of the inventory ready. Afterwards no request meets a first time."""
        self.device.compile(self.program, inventory(self.capacity), progress)

    def start(self, plan: Plan) -> Pending:
        """Pack, copy shared prompt KV, begin. Raises RowError before anything has been done."""
        shape, copies = choose(self.capacity, plan), plan.copies
        batch = pack(plan.works, shape, self._space)
        for first in fills(self.capacity, plan):
            self.begin(copies, *first).wait()
            copies = []
        return self.begin(copies, shape, batch, plan.installs)

    def begin(
        self, copies: Sequence[tuple[int, int]], shape: Shape, batch: Batch, installs: Sequence[tuple[int, str]] = ()
    ) -> Pending:  # fmt: skip
        """Begin a step that somebody has packed, after copying blocks and putting adapters into their slots."""
        if copies:
            self.device.kv_copy(copies)
        if installs and isinstance(self.shelf, Shelf):  # where adapters are resident there are none
            self.shelf.install(installs)
        return self.device.start(shape, batch)

    def close(self) -> None:
        """Give the device back."""
        self.device.close()


def choose(capacity: Capacity, plan: Plan) -> Shape:
    """The graph of a plan: the smallest listed shape that holds it."""
    works = plan.works
    length = max([w.start + w.count + len(w.drafts) for w in works])
    want = _want(plan)
    if plan.tag != "prefill":
        return (decode_shape if plan.tag == "decode" else verify_shape)(capacity, len(works), length, want)
    return prefill_shape(capacity, [w.count for w in works], length, want)


def fills(capacity: Capacity, plan: Plan) -> list[tuple[Shape, Batch]]:
    """What a draft model reads before the plan's own step, if anything."""
    works = plan.fills
    if not works:
        return []
    shape = fill_shape(capacity, [w.count for w in works], max([w.start + w.count for w in works]))
    return [(shape, pack(works, shape, capacity.space))]


def _want(plan: Plan) -> Want:
    """The least a step must return. Rows that end inside their prompt sample nothing."""
    works = plan.works
    if works[0].sequence.request.pooling is not None:
        return POOLED
    if plan.tag == "prefill" and len(works) == 1 and wants_scores(works[0].sequence):
        return SCORES
    needs = {w.sequence.needs for w in works if w.last}
    return LOGITS if "logits" in needs else SAMPLED if "sampled" in needs else LIKELIEST


def pack(works: Sequence[Work], shape: Shape, space: KvSpace) -> Batch:
    """Lay works out as rows 0..n-1 of `shape`; the rest are idle. Raises RowError.

    A token that the host has not seen yet is FOLLOWS: the device takes the id that the row sampled last.
    """
    try:
        return _packed(works, shape, space)
    except (ValueError, TypeError, OverflowError):  # `validate` has refused what does not fit; whatever slips through ends alone
        for work in works:
            try:
                _packed([work], shape, space)
            except (ValueError, TypeError, OverflowError) as why:
                raise RowError(work, why) from why
        raise


def _packed(works: Sequence[Work], shape: Shape, space: KvSpace) -> Batch:
    """Row i is work i. What is as in the step before is not made again; each call of numpy or torch costs as much as a few rows."""
    holds = tuple([hold for w in works if (hold := w.sequence.hold) is not None])
    kept = _kept(shape, space, holds)
    if kept.changes != (changes := sum([hold.changes for hold in holds])):
        kept.lay(_idle(shape, space)[0]["blocks"], holds, changes)
    if shape.tokens == 1:
        made = dict(zip(_PLACES, map(torch.from_numpy, _one_each(works, holds, shape, space)), strict=True))
    else:
        made = {name: torch.from_numpy(array) for name, array in _some_each(works, holds, shape, space).items()}
    if shape.want.ids == "sampled":
        made |= _how(shape, space, tuple([w.sequence.how for w in works]))
        made["uniform"] = torch.from_numpy(_drawn(works, _idle(shape, space)[0]["uniform"].copy()))
    return Batch(**{**kept.tensors, **made})


def _one_each(works: Sequence[Work], holds: Sequence[Hold], shape: Shape, space: KvSpace) -> NDArray[np.int32]:
    """[3,B,1]: `_PLACES` of works of one token."""
    size, nowhere, idle = space.block, space.nowhere, shape.rows - len(works)
    starts = [w.start for w in works]
    tokens = [ids[w.start] if w.start < len(ids := w.sequence.ids) else FOLLOWS for w in works]
    slots = [
        hold.blocks[start // size] * size + start % size if start >= hold.shared * size or shape.tag == "fill" else nowhere
        for start, hold in zip(starts, holds, strict=True)
    ]
    values = (*tokens, *[0] * idle, *starts, *[space.limit] * idle, *slots, *[nowhere] * idle)
    return np.fromiter(values, np.int32, len(values)).reshape(3, shape.rows, 1)


def _some_each(works: Sequence[Work], holds: Sequence[Hold], shape: Shape, space: KvSpace) -> dict[str, NDArray[Any]]:
    """`_PLACES` and `last` of works of some tokens: what belongs to the true ones lies one after another (`at`: their positions), `where`
    it goes in arrays [B,T]."""
    n, size, table, tokens = len(works), space.block, holds[0].table, list[int]()
    count = np.array([w.tokens for w in works], np.int32)
    row = np.arange(n).repeat(count)
    column = np.arange(len(row), dtype=np.int32) - (count.cumsum(dtype=np.int32) - count).repeat(count)
    at, where = np.array([w.start for w in works], np.int32)[row] + column, (row, column)
    slots = table[np.array([h.row for h in holds])[row], at // size] * size + at % size
    if shape.tag != "fill":  # a draft model's KV is not read by others unless they have it from whoever filled it
        shared = np.array([h.shared * size for h in holds], np.int32)
        slots[at < shared[row]] = space.nowhere  # computed again for what stands behind it: others read what is there
    for work in works:
        tokens += work.sequence.ids[work.start : work.start + work.count] or (FOLLOWS,)
        tokens += work.drafts
    arrays = {name: _idle(shape, space)[0][name].copy() for name in _PLACES}
    arrays["positions"][where], arrays["slots"][where], arrays["tokens"][where] = at, slots, tokens
    asked = [w.last or shape.want.pooled or shape.want.at == "all" for w in works]
    arrays["last"] = np.full(shape.rows, -1, np.int32)
    arrays["last"][:n] = np.where(asked, count - 1, -1)
    return arrays


def _drawn(works: Sequence[Work], uniform: NDArray[Any]) -> NDArray[Any]:
    """The random numbers of the rows that do not take the likeliest, each by its own position."""
    drawn = [(i, j) for i, w in enumerate(works) if w.sequence.how[0] for j in range(1 + len(w.drafts))]
    if drawn:
        numbers = uniforms([works[i].sequence.seed for i, _ in drawn], [works[i].start + works[i].count + j for i, j in drawn])
        uniform[tuple(np.array(drawn).T)] = numbers
    return uniform


@lru_cache(256)
def _idle(shape: Shape, space: KvSpace) -> tuple[dict[str, NDArray[Any]], dict[str, torch.Tensor]]:
    """The arrays of idle rows, and the same as tensors: what a step leaves as it is need not be made for it. Nobody writes them."""
    arrays = blank(shape, space)
    return arrays, {name: torch.from_numpy(array) for name, array in arrays.items()}


class _Kept:
    """What a step of some holds has as the one before: `tensors`, of which nobody writes any; the blocks are those after so many `changes`
    of theirs."""

    __slots__ = ("changes", "tensors")

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.changes = tensors, -1

    def lay(self, idle: NDArray[Any], holds: Sequence[Hold], changes: int) -> None:
        """Other blocks, in an array of their own: a step under way may still read the last one."""
        for hold in holds:
            hold.lay()
        blocks = idle.copy()
        blocks[: len(holds)] = holds[0].table[[hold.row for hold in holds], : blocks.shape[1]]
        self.tensors["blocks"], self.changes = torch.from_numpy(blocks), changes


@lru_cache(16)  # the steps of who decodes now, with and without drafts, and of some prompts
def _kept(shape: Shape, space: KvSpace, holds: tuple[Hold, ...]) -> _Kept:
    """The tensors of an idle step, and of one of these their rows and adapters."""
    idle, tensors = _idle(shape, space)
    rows, slots = idle["rows"].copy(), idle["adapters"].copy()
    rows[: len(holds)], slots[: len(holds)] = [hold.row for hold in holds], [hold.slot for hold in holds]
    return _Kept({**tensors, "rows": torch.from_numpy(rows), "adapters": torch.from_numpy(slots)})


@lru_cache(16)
def _how(shape: Shape, space: KvSpace, said: tuple[tuple[float, int, float, float], ...]) -> dict[str, torch.Tensor]:
    """How the rows draw. Nobody writes these."""
    made = {}
    for name, values in zip(HOW, zip(*said, strict=True), strict=True):
        array = _idle(shape, space)[0][name].copy()
        array[: len(said)] = np.fromiter(values, array.dtype, len(said))
        made[name] = torch.from_numpy(array)
    return made
