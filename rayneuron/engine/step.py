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

HOW = ("temperature", "top_k", "top_p", "min_p")


def step(
    arch: Arch, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape, *, rule: NeuronSampling | None = None
) -> StepOutput:
    """Write KV for the new tokens, and return what `shape.want` asks for. No host sync, no data-dependent shape.

    `rule`: sample as NxD Inference does, edge cases included, instead of as transformers does.
    """
    hidden = decoder.forward(arch, ops, comm, weights, kv, batch.tokens, places(batch, shape, weights))  # B T E
    return finish(arch, ops, comm, weights, hidden, batch, shape, rule)


def places(batch: Batch, shape: Shape, weights: Weights) -> Places:
    """Where the new tokens of a step are, where the weights have room for adapters, whose they are, and which `finish` reads."""
    adapters = batch.adapters if "lora_rank" in weights else None
    read = None if shape.tokens == 1 or shape.want.pooled or shape.want.at == "all" else batch.last
    return Places(batch.positions, batch.rows, batch.blocks, batch.slots, shape.length, adapters, read)


def finish(
    arch: Arch, ops: Any, comm: Collectives, weights: Weights, hidden: torch.Tensor, batch: Batch, shape: Shape,
    rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """The end of a step: hidden [B,T,E] to logits and next ids."""
    want = shape.want
    if want.pooled:
        return StepOutput(pooled=_pooled(hidden, batch.last))
    if want.ids is None:
        return StepOutput(logits=ops.whole(decoder.logits(arch, ops, comm, weights, hidden)))
    if want.at == "all":
        return _every(arch, ops, comm, weights, hidden, batch, shape, rule)
    if shape.tokens > 1:
        if ops.dynamic and want.ids == "likeliest" and not (batch.last >= 0).any():
            return StepOutput(ids=torch.zeros(shape.rows, 1, dtype=torch.int32))  # of prompts that go on, nobody reads an id
        hidden = hidden[torch.arange(shape.rows, dtype=torch.int32, device=batch.last.device), batch.last.clamp(min=0)]
    else:
        hidden = hidden[:, 0]
    if want.ids == "likeliest":
        return StepOutput(ids=decoder.greedy(arch, ops, comm, weights, hidden)[:, None])
    logits = decoder.logits(arch, ops, comm, weights, hidden)  # B V
    ids, complete = sample(ops, logits, [getattr(batch, name) for name in HOW], batch.uniform[:, 0], rule)
    return StepOutput(ids=ids[:, None], complete=complete, logits=ops.whole(logits))


def _pooled(hidden: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """hidden [B,T,E], last [B] -> [B,2,E] float32: the last true token's, and the sum of all true ones."""
    rows, tokens, _ = hidden.shape
    at = torch.arange(tokens, dtype=torch.int32, device=last.device)
    whole = (hidden.float() * (at <= last[:, None])[..., None]).sum(1)
    return torch.stack([hidden[torch.arange(rows, dtype=torch.int32, device=last.device), last].float(), whole], 1)


def _every(
    arch: Arch, ops: Any, comm: Collectives, weights: Weights, hidden: torch.Tensor, batch: Batch, shape: Shape,
    rule: NeuronSampling | None,
) -> StepOutput:  # fmt: skip
    """An id behind every new token, as if each were a row of its own; padding is left out where the device can."""
    flat, dims, where = hidden.flatten(0, 1), hidden.shape[:2], None
    if ops.dynamic:
        true = (torch.arange(shape.tokens) <= batch.last[:, None]).flatten()
        true[0] = True  # only at warm-up it is not: a product has a row
        where = true.nonzero()[:, 0]
        flat, dims = flat[where], where.shape
    if shape.want.ids == "likeliest":
        return StepOutput(ids=decoder.greedy(arch, ops, comm, weights, flat).view(dims))

    def each(x: torch.Tensor) -> torch.Tensor:  # [B] or [B,T], of every token
        x = (x[:, None].expand(-1, shape.tokens) if x.dim() == 1 else x).reshape(-1)
        return x if where is None else x[where]

    logits = decoder.logits(arch, ops, comm, weights, flat)
    ids, complete = sample(ops, logits, [each(getattr(batch, name)) for name in HOW], each(batch.uniform), rule)
    return StepOutput(ids=ids.view(dims), complete=complete.view(dims), logits=ops.whole(logits).unflatten(0, dims))


def sample(
    ops: Any, logits: torch.Tensor, how: list[torch.Tensor], uniform: torch.Tensor, rule: NeuronSampling | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B,V] and [B] of each of `HOW` -> ids [B], complete [B]."""
    temperature, top_k, top_p, min_p = how
    if rule is not None:
        return neuron_sampling.sample(logits, top_k, top_p, temperature, uniform, rule, ops)
    fused: tuple[torch.Tensor, torch.Tensor] | None = ops.sample(logits, *how, uniform) if ops.sample is not None else None
    return sampling.sample(logits, temperature, top_k, top_p, min_p, uniform, ops=ops) if fused is None else fused
