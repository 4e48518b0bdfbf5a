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


def step(
    arch: Arch, ops: Any, comm: Collectives, weights: Weights, kv: list[torch.Tensor], batch: Batch, shape: Shape,
    *, rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """Write KV for the new tokens in place, and return what `shape.output` asks for. No host sync, no data-dependent shape.

    `rule`: sample as NxD Inference does, edge cases included, instead of as transformers does.
    """
    hidden = decoder.forward(arch, ops, comm, weights, kv, batch.tokens, batch.positions, batch.rows, shape.length)  # B T E
    return finish(arch, ops, comm, weights, hidden, batch, shape, rule)


def finish(
    arch: Arch, ops: Any, comm: Collectives, weights: Weights, hidden: torch.Tensor, batch: Batch, shape: Shape,
    rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """The end of a step: hidden [B,T,E] to logits and next ids."""
    if shape.output == "scores":
        return StepOutput(logits=decoder.logits(arch, ops, comm, weights, hidden))
    if shape.tokens > 1:
        hidden = hidden[torch.arange(shape.rows, dtype=torch.int32, device=batch.last.device), batch.last]
    else:
        hidden = hidden[:, 0]
    if shape.output == "greedy":
        return StepOutput(ids=decoder.greedy(arch, ops, comm, weights, hidden))
    logits = decoder.logits(arch, ops, comm, weights, hidden)  # B V
    if rule is not None:
        ids, complete = neuron_sampling.sample(logits, batch.top_k, batch.top_p, batch.temperature, batch.uniform, rule)
        return StepOutput(ids=ids, complete=complete, logits=logits)
    how = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)
    fused = ops.sample(logits, *how) if ops.sample is not None else None
    ids, complete = sampling.sample(logits, *how) if fused is None else fused
    return StepOutput(ids=ids, complete=complete, logits=logits)
