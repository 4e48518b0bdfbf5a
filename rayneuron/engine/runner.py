"""One rank: its device, and the shapes it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from rayneuron.devices.base import LIKELIEST, LOGITS, SAMPLED, SCORES, Batch, Device, Pending, Program, Shape, Want, Weights
from rayneuron.engine.batch import pack
from rayneuron.engine.buckets import Capacity, decode_shape, inventory, prefill_shape
from rayneuron.engine.scheduler import Plan, wants_scores
from rayneuron.engine.step import step
from rayneuron.models import Progress
from rayneuron.models.arch import Arch
from rayneuron.models.memory import kv_shape


class Runs(Protocol):
    """What the engine needs of a runner: one rank here, or a group of them (group.group)."""

    @property
    def capacity(self) -> Capacity:
        """Rows, lengths and buckets."""

    @property
    def overlaps(self) -> bool:
        """Whether `start` returns before the step has ended, so that it pays to begin the next; at most one other is under way."""

    def start(self, plan: Plan) -> Pending:
        """Begin one step."""

    def close(self) -> None:
        """Give everything back."""


class Runner:
    """Runs plans on one device. `program`: what a step is, where it is not the whole model on one rank."""

    def __init__(self, arch: Arch, device: Device, capacity: Capacity, program: Program | None = None) -> None:
        self.arch = arch
        self.device = device
        self.capacity = capacity
        self.program = program or partial(step, arch)
        self.overlaps = device.overlaps

    def load(self, weights: Weights) -> None:
        """Hand weights to the device and allocate KV."""
        self.device.load(weights, kv_shape(self.arch, self.capacity.space, self.device.comm.ranks, len(weights["layers"])))

    def warm(self, progress: Progress) -> None:
        """Make every shape of the inventory ready. Afterwards no request meets a first time."""
        self.device.compile(self.program, inventory(self.capacity), progress)

    def start(self, plan: Plan) -> Pending:
        """Pack, copy shared prompt KV, begin. Raises RowError before anything has been done."""
        shape = choose(self.capacity, plan)
        return self.begin(plan.copies, shape, pack(plan.works, shape, self.capacity.space))

    def begin(self, copies: Sequence[tuple[int, int]], shape: Shape, batch: Batch) -> Pending:
        """Begin a step that somebody has packed, after copying blocks."""
        if copies:
            self.device.kv_copy(copies)
        return self.device.start(shape, batch)

    def close(self) -> None:
        """Give the device back."""
        self.device.close()


def choose(capacity: Capacity, plan: Plan) -> Shape:
    """The graph of a plan: the smallest listed shape that holds it."""
    works = plan.works
    length = max(w.start + w.count for w in works)
    want = _want(plan)
    if plan.tag == "decode":
        return decode_shape(capacity, len(works), length, want)
    return prefill_shape(capacity, [w.count for w in works], length, want)


def _want(plan: Plan) -> Want:
    """The least a step must return. Rows that end inside their prompt sample nothing."""
    works = plan.works
    if plan.tag == "prefill" and len(works) == 1 and wants_scores(works[0].sequence):
        return SCORES
    ending = [w.sequence.params for w in works if w.last]
    if any(p.logprobs is not None or p.edits_logits for p in ending):
        return LOGITS
    return SAMPLED if any(p.temperature for p in ending) else LIKELIEST
