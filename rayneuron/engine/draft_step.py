"""A step of a model that has a draft model beside it, which reads the same ids and says what may come next; the model itself decides.

Shapes: B rows, T new tokens, R rows that draft.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.base import DRAFTED, Batch, Shape, StepOutput, Weights
from rayneuron.engine import step as plain
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.models import decoder
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives
from rayneuron.models.kv import Kv, Places


def step(
    arch: Arch, draft: Arch, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape,
    *, rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """As `engine.step.step`. Where the batch says DRAFTED, the draft model fills in what is then verified; a step that only fills its KV
    computes nothing else. Only on devices whose ops are dynamic."""
    if shape.tag == "fill":
        decoder.forward(draft, ops, comm, weights["draft"], _own(kv), batch.tokens, plain.places(batch, shape, weights["draft"]))
        return StepOutput()
    if shape.tag != "verify":
        return plain.step(arch, ops, comm, weights, kv, batch, shape, rule=rule)
    tokens = _drafted(draft, ops, comm, weights["draft"], _own(kv), batch, shape, rule)
    out = plain.step(arch, ops, comm, weights, kv, replace(batch, tokens=tokens), shape, rule=rule)
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
    wanted = (batch.tokens <= DRAFTED).sum(1)  # B
    tokens = batch.tokens.clone()
    for j in range(int(wanted.max())):
        rows = (wanted > j).nonzero()[:, 0]
        new, at, slots = tokens[rows, j, None], batch.positions[rows, j, None], batch.slots[rows, j, None]  # R 1
        if not j:
            before = at - 1
            slots = torch.cat((_slots(kv, batch, rows, before), slots), 1)
            new, at = torch.cat((_before(tokens, rows), new), 1), torch.cat((before, at), 1)
        where = Places(at, batch.rows[rows], batch.blocks[rows], slots, shape.length)
        hidden = decoder.forward(draft, ops, comm, weights, kv, new, where)[:, -1]
        tokens[rows, j + 1] = _chosen(draft, ops, comm, weights, hidden, batch, rows, j, shape, rule)
    return tokens


def _before(tokens: Tensor, rows: Tensor) -> Tensor:
    """The id before the last known one [R,1], which the first of the drafts to be made tells."""
    return DRAFTED - tokens[rows, 1, None]


def _slots(kv: Kv, batch: Batch, rows: Tensor, at: Tensor) -> Tensor:
    """The slots of positions at [R,1]."""
    size = kv.shape.space.block
    return batch.blocks[rows].gather(1, (at // size).long()) * size + at % size


def _chosen(
    draft: Arch, ops: Any, comm: Collectives, weights: Weights, hidden: Tensor, batch: Batch, rows: Tensor, j: int, shape: Shape,
    rule: NeuronSampling | None,
) -> Tensor:  # fmt: skip
    """hidden [R,E] -> ids [R]: as the model itself chooses, with the same random number, which for logits that are much alike gives much
    the same ids; so drafts of sampled rows come true nearly as often as those of others."""
    if shape.want.ids == "likeliest":
        return decoder.greedy(draft, ops, comm, weights, hidden)
    logits = decoder.logits(draft, ops, comm, weights, hidden)
    ids, _ = plain.sample(ops, logits, [getattr(batch, name)[rows] for name in plain.HOW], batch.uniform[rows, j], rule)
    return ids
