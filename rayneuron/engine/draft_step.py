"""A step of a model that has a draft model beside it, which reads the same ids and says what may come next; the model itself decides.

Shapes: B rows, T new tokens, R rows of a pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.base import DRAFTED, Batch, Shape, StepOutput, Weights
from rayneuron.engine import step as plain
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.engine.passes import Pass, passes, slot_of
from rayneuron.models import decoder
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives
from rayneuron.models.kv import Kv, KvSpace, Places

# By so many logits a likeliest draft leads the next for another one to be made behind it. Of what the int8 copy of smollm2 says in chats
# with less of a lead (35 in 100) 71 % come true, with more 99 %.
LEAD = 0.75


def step(
    arch: Arch, draft: Arch, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape,
    *, rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """As `engine.step.step`. Where the batch says DRAFTED, the draft model fills in what is then verified, and leaves what it does not
    make, which is padding; a step that only fills its KV computes nothing else."""
    if shape.tag == "fill":
        decoder.forward(draft, ops, comm, weights["draft"], _own(kv), batch.tokens, plain.places(batch, shape, weights["draft"]))
        return StepOutput()
    if shape.tag != "verify":
        return plain.step(arch, ops, comm, weights, kv, batch, shape, rule=rule)
    tokens = _drafted(draft, ops, comm, weights["draft"], _own(kv), batch, shape, rule)
    batch = replace(batch, tokens=tokens)
    if ops.dynamic and (undone := tokens <= DRAFTED).any():
        batch = _shorter(batch, undone, kv.shape.space)
    out = plain.step(arch, ops, comm, weights, kv, batch, shape, rule=rule)
    out.drafts = tokens
    return out


def _own(kv: Kv) -> Kv:
    assert kv.draft is not None
    return kv.draft


def _drafted(
    draft: Arch, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape, rule: NeuronSampling | None
) -> Tensor:
    """The tokens [B,T], each row's drafts made one after the other. A first pass reads the last known id and the one before it, whose KV
    is missing where the last draft of the step before came true; where it is not, that writes the same again."""
    columns = list(batch.tokens.unbind(1))
    for turn in passes(ops, batch, shape, kv.shape.space, columns):
        ids, where = turn.new()
        if not turn.j:
            ids, where = _two(turn, ids, where)
        hidden = decoder.forward(draft, ops, comm, weights, kv, ids, where)[:, -1]
        if shape.want.ids == "likeliest":
            leads = torch.empty(len(hidden)) if turn.asked else None
            turn.put(decoder.greedy(draft, ops, comm, weights, hidden, leads))
            turn.unsure = None if leads is None else leads < LEAD
        else:
            turn.put(turn.sample(ops, decoder.logits(draft, ops, comm, weights, hidden), rule))
    return torch.stack(columns, 1)


def _shorter(batch: Batch, undone: Tensor, space: KvSpace) -> Batch:
    """With padding for what is undone [B,T]."""
    return replace(
        batch,
        tokens=batch.tokens.clamp(min=0),
        positions=batch.positions.masked_fill(undone, space.limit),
        slots=batch.slots.masked_fill(undone, space.nowhere),
        last=batch.last - undone.sum(1, dtype=batch.last.dtype),
    )


def _two(turn: Pass, ids: Tensor, where: Places) -> tuple[Tensor, Places]:
    """With the id before the last known one, which the first of the drafts to be made tells."""
    told = turn.true(DRAFTED - turn.of(turn.batch.tokens[:, 1, None]), 0)
    at = where.positions - 1
    slots = turn.true(slot_of(where.blocks, at, turn.space, where.length), turn.space.nowhere)
    where = replace(where, positions=torch.cat((at, where.positions), 1), slots=torch.cat((slots, where.slots), 1))
    return torch.cat((told, ids), 1), where
