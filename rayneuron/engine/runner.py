"""One rank: its device, the shapes it runs, and prompt KV copied between rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from rayneuron.devices.base import Batch, Device, Output, Pending, Program, Progress, Queues, Shape, StepOutput, Weights
from rayneuron.engine.batch import pack
from rayneuron.engine.buckets import Capacity, decode_shape, inventory, prefill_shape
from rayneuron.engine.scheduler import Plan, wants_scores
from rayneuron.engine.step import step
from rayneuron.models import decoder
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives, Solo


class Runs(Protocol):
    """What the engine needs of a runner: one rank here, or a group of them (parallel.group)."""

    @property
    def capacity(self) -> Capacity:
        """Rows, lengths and buckets."""

    def run(self, plan: Plan) -> StepOutput:
        """One step."""

    def close(self) -> None:
        """Give everything back."""


@runtime_checkable
class RunsAhead(Protocol):
    """A runner whose steps may be begun before the one before has ended."""

    @property
    def ahead(self) -> bool:
        """Whether that gains anything: whether `begin` returns before the step has ended."""

    def begin(self, plan: Plan) -> Pending:
        """Begin one step; at most one other is under way."""


class Runner:
    """Runs plans on one device. KV has one row a slot and a scratch row, and one scratch column behind the last position.

    `program`: what a step is, where it is not the whole model on one rank.
    """

    def __init__(
        self, arch: Arch, device: Device, capacity: Capacity, comm: Collectives | None = None, program: Program | None = None
    ) -> None:
        self.arch = arch
        self.device = device
        self.capacity = capacity
        self.comm = comm or Solo()
        self.program = program or partial(step, arch)

    def load(self, weights: Weights) -> None:
        """Hand weights to the device and allocate KV."""
        shapes = decoder.kv_shapes(self.arch, self.capacity.rows + 1, self.capacity.length + 1, self.comm.ranks, len(weights["layers"]))
        self.device.load(weights, shapes)

    def warm(self, progress: Progress) -> None:
        """Make every shape of the inventory ready. Afterwards no request meets a first time."""
        self.device.compile(self.program, inventory(self.capacity), progress)

    def run(self, plan: Plan) -> StepOutput:
        """One step: copy shared prompt KV, pack, run."""
        self.copy(plan.copies)
        shape = choose(self.capacity, plan)
        return self.device.run(shape, self.pack(plan, shape))

    @property
    def ahead(self) -> bool:
        """Whether the device takes a step while one runs."""
        return isinstance(self.device, Queues)

    def begin(self, plan: Plan) -> Pending:
        """As `run`, without waiting for its end."""
        assert isinstance(self.device, Queues)
        self.copy(plan.copies)
        shape = choose(self.capacity, plan)
        return self.device.start(shape, self.pack(plan, shape))

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first positions of a KV row to another: (from row, to row, positions)."""
        for source, target, positions in copies:
            self.device.kv_write(target, 0, self.device.kv_read(source, 0, positions))

    def pack(self, plan: Plan, shape: Shape) -> Batch:
        """The padded arrays of a plan."""
        return pack(plan.works, shape, self.capacity.rows, self.capacity.length)

    def close(self) -> None:
        """Give the device back."""
        self.device.close()


def choose(capacity: Capacity, plan: Plan) -> Shape:
    """The graph of a plan: the smallest listed shape that holds it."""
    works = plan.works
    length = max(w.start + w.count for w in works)
    output = _output(plan)
    if plan.tag == "decode":
        return decode_shape(capacity, len(works), length, output)
    return prefill_shape(capacity, [w.count for w in works], length, output)


def _output(plan: Plan) -> Output:
    """The least a step must return. Rows that end inside their prompt sample nothing."""
    works = plan.works
    if plan.tag == "prefill" and len(works) == 1 and wants_scores(works[0].sequence):
        return "scores"
    ending = [w.sequence.params for w in works if w.last]
    if any(p.logprobs is not None or p.edits_logits for p in ending):
        return "logits"
    return "sample" if any(p.temperature for p in ending) else "greedy"
