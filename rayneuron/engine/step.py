"""The one compiled function: decoder, head and sampling; prefill, decode and verify are only its shapes.

Shapes: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from rayneuron.devices.base import Batch, Shape, StepOutput, Weights
from rayneuron.engine import neuron_sampling, sampling
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.models import decoder
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives
from rayneuron.models.kv import Kv, Places


def step(
    arch: Arch, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape, *, rule: NeuronSampling | None = None
) -> StepOutput:
    """Write KV for the new tokens, and return what `shape.want` asks for. No host sync, no data-dependent shape.

    `rule`: sample as NxD Inference does, edge cases included, instead of as transformers does.
    """
    hidden = decoder.forward(arch, ops, comm, weights, kv, batch.tokens, places(batch, shape))  # B T E
    return finish(arch, ops, comm, weights, hidden, batch, shape, rule)


def places(batch: Batch, shape: Shape) -> Places:
    """Where the new tokens of a step are."""
    return Places(batch.positions, batch.rows, batch.blocks, batch.slots, shape.length)


def finish(
    arch: Arch, ops: Any, comm: Collectives, weights: Weights, hidden: torch.Tensor, batch: Batch, shape: Shape,
    rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """The end of a step: hidden [B,T,E] to logits and next ids."""
    want = shape.want
    if want.ids is None:
        return StepOutput(logits=ops.whole(decoder.logits(arch, ops, comm, weights, hidden)))
    if shape.tokens > 1:
        hidden = hidden[torch.arange(shape.rows, dtype=torch.int32, device=batch.last.device), batch.last]
    else:
        hidden = hidden[:, 0]
    if want.ids == "likeliest":
        return StepOutput(ids=decoder.greedy(arch, ops, comm, weights, hidden)[:, None])
    logits = decoder.logits(arch, ops, comm, weights, hidden)  # B V
    uniform = batch.uniform[:, 0]
    if rule is not None:
        ids, complete = neuron_sampling.sample(logits, batch.top_k, batch.top_p, batch.temperature, uniform, rule, ops)
        return StepOutput(ids=ids[:, None], complete=complete, logits=ops.whole(logits))
    how = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, uniform)
    fused = ops.sample(logits, *how) if ops.sample is not None else None
    ids, complete = sampling.sample(logits, *how, ops=ops) if fused is None else fused
    return StepOutput(ids=ids[:, None], complete=complete, logits=ops.whole(logits))
