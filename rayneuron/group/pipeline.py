"""One stage of the model as a step program, and one engine step as micro-batches that keep the stages busy together.

Shapes: B rows, T new tokens, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rayneuron.devices.base import Batch, Pending, Program, Shape, StepOutput, Weights
from rayneuron.engine.buckets import Capacity
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.engine.runner import choose
from rayneuron.engine.sequence import Plan
from rayneuron.engine.step import finish, places, step
from rayneuron.models import decoder
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives
from rayneuron.models.kv import Kv

if TYPE_CHECKING:
    from rayneuron.config import Deployment

WORTH_TOKENS = 32  # new tokens of a micro-batch below which reading the weights once more costs more than overlap gains
A_STAGE = 2  # micro-batches a stage: of S stages and M of them, (S - 1) / (M + S - 1) of the time is idle; 2 x 2 gives 20 %


@dataclass(frozen=True, slots=True)
class Stage:
    """Which part of the model a rank computes: `first` embeds, `last` samples; hidden states, of `dtype`, pass between stages.

    `sequence_parallel`: norms on its share of T. Plain data, since compiled graphs are looked up by it.
    """

    dtype: torch.dtype
    first: bool = True
    last: bool = True
    sequence_parallel: bool = False


def stage_of(config: Deployment, dtype: torch.dtype, stage: int = 0) -> Stage:
    """The `stage`-th of a deployment's stages."""
    return Stage(dtype, stage == 0, stage == config.pipeline_parallel - 1, config.sequence_parallel and config.tensor_parallel > 1)


def program(arch: Arch, stage: Stage, rule: NeuronSampling | None = None) -> Program:
    """What a step of this stage is. `engine.step.step` itself wherever that says it all, so that one compile serves every way to start."""
    if stage.first and stage.last and not stage.sequence_parallel:
        return partial(step, arch) if rule is None else partial(step, arch, rule=rule)
    return partial(stage_step, arch, stage) if rule is None else partial(stage_step, arch, stage, rule=rule)


def stage_step(
    arch: Arch, stage: Stage, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape,
    *, rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """As `engine.step.step`, of the layers this stage holds: from `batch.hidden`, to the output's `hidden` if it is not the last."""
    hidden = batch.hidden
    if hidden is None and not stage.first:  # meeting the shapes at start: nobody has sent anything yet
        hidden = torch.zeros(shape.rows, shape.tokens, arch.hidden, dtype=stage.dtype)
    if stage.sequence_parallel and comm.ranks > 1 and shape.tokens % comm.ranks == 0 and not arch.post_norm and arch.norms != "after":
        hidden = sequence_parallel(arch, ops, comm, weights, kv, batch, shape, hidden)
    else:
        where = places(batch, shape, weights)
        where = where if stage.last else replace(where, read=None)
        hidden = decoder.forward(arch, ops, comm, weights, kv, batch.tokens, where, hidden)
    if not stage.last:
        return StepOutput(hidden=hidden)
    return finish(arch, ops, comm, weights, hidden, batch, shape, rule)


class Scattered:
    """Collectives as a layer sees them under sequence parallelism: its sum over ranks leaves each rank its share of T [B,T/ranks,E]."""

    def __init__(self, comm: Collectives) -> None:
        self._comm, self.ranks = comm, comm.ranks
        self.gather, self.send, self.receive, self.broadcast = comm.gather, comm.send, comm.receive, comm.broadcast
        self.reduce_scatter = comm.reduce_scatter

    @property
    def rank(self) -> int:
        """Asked for by a step that may; where the rank is data, the device refuses."""
        return self._comm.rank

    def reduce(self, x: Tensor) -> Tensor:
        """[B,T,E] -> this rank's share of the sum [B,T/ranks,E]."""
        return self.reduce_scatter(x, 1)


def sequence_parallel(
    arch: Arch, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape, hidden: Tensor | None
) -> Tensor:
    """`decoder.forward` with the residual and the norms split over T: all-gather after a norm, reduce-scatter where a sum was.

    The same sums in the same order, hence the same bits, of 1/ranks of the norms and of the residual's memory.
    """
    if hidden is None:
        hidden = decoder.embed(arch, ops, comm, weights["top"], batch.tokens, batch.positions)
    share = getattr(comm, "share", None)  # of a device whose graphs serve every rank, so that Python may not ask which
    mine = share(hidden, 1) if share is not None else hidden.chunk(comm.ranks, 1)[comm.rank]

    def norm(w: Any, name: str, x: Tensor, kind: str, eps: float) -> Tensor:
        y = ops.norm(w, name, x, kind, eps)
        return comm.gather(y, 1) if name in ("ln1", "ln2", "norm") else y

    unfused = {f.name: f.default for f in fields(ops) if f.name == "layers"}  # a device's fused form knows nothing of shares
    split = replace(ops, norm=norm, **unfused)
    last = arch.final_norm and "head.w" in weights["top"]
    out = decoder.forward(arch, split, Scattered(comm), weights, kv, batch.tokens, places(batch, shape, weights), mine)
    return out if last else comm.gather(out, 1)


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A step of a group: its micro-batches in worker 0's process, the rows of each, and what sees it to its end."""

    number: int
    parts: Sequence[Pending]
    rows: Sequence[int]
    end: Callable[[UnderWay], StepOutput]

    def wait(self) -> StepOutput:
        """Its outputs. Steps end in order. Raises WorkerLost."""
        return self.end(self)


def divide(capacity: Capacity, plan: Plan, stages: int, wanted: int | None) -> list[tuple[Shape, Plan]]:
    """The plan's rows as micro-batches with their graphs; one where dividing does not pay. `wanted`: their number, None to choose."""
    works = plan.works
    whole = choose(capacity, plan)
    tokens = sum(w.count for w in works)
    count = A_STAGE * stages if wanted is None else wanted
    if wanted is None:
        count = min(count, tokens // WORTH_TOKENS)
    count = max(1, min(count, len(works) if stages > 1 else 1))
    each, more = divmod(len(works), count)
    parts, at = [], 0
    for i in range(count):
        size = each + (i < more)
        parts.append(Plan(plan.tag, works[at : at + size]))
        at += size
    return [(replace(choose(capacity, p), want=whole.want) if count > 1 else whole, p) for p in parts]


def merge(outputs: Sequence[StepOutput], sizes: Sequence[int]) -> StepOutput:
    """The micro-batches' outputs as one, in the plan's order of rows, idle rows left out."""
    if len(outputs) == 1:
        return outputs[0]

    def joined(parts: list[Tensor | None]) -> Tensor | None:
        there = [p[:n] for p, n in zip(parts, sizes, strict=True) if p is not None]
        return torch.cat(there) if len(there) == len(parts) else None

    return StepOutput(**{f.name: joined([getattr(o, f.name) for o in outputs]) for f in fields(StepOutput)})
