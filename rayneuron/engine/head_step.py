"""A step of a model that has heads beside it, which draft from its hidden states; the model itself decides.

Shapes: B rows, T new tokens, R rows that draft, F features of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.base import DRAFTED, Batch, Shape, StepOutput, Weights
from rayneuron.engine import step as plain
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.models import decoder, head_layers
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives
from rayneuron.models.heads import Heads
from rayneuron.models.kv import Kv, Places

Choose = Callable[[Weights, Tensor, Tensor, int], Tensor]  # (weights of a head, hidden [R,E], rows [R], which draft) -> ids [R]


def step(
    arch: Arch, heads: Heads, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape,
    *, rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """As `engine.step.step`. Where the batch says DRAFTED, the heads fill in what is then verified. Of every token its features are kept in
    its slot, and the KV of its entry, with the true features before it instead of those that were guessed. Only on devices whose ops are
    dynamic."""
    own, before, drafted = _own(weights), _before(kv, batch, shape), None
    if shape.tag == "verify":
        choose = _chooser(arch, heads, ops, comm, batch, shape, rule)
        if heads.chained:
            drafted = _chain(heads, ops, comm, own, _draft_kv(kv), batch, shape, before, choose)
        else:
            drafted = _at_once(ops, own, batch, before, choose)
        batch = replace(batch, tokens=drafted)
    taps, where = decoder.Taps(heads.taps), plain.places(batch, shape, weights)
    hidden = decoder.forward(arch, ops, comm, weights, kv, batch.tokens, where, taps=taps)
    found = head_layers.features(heads, ops, own["top"], hidden, taps)
    if heads.chained:
        shifted = torch.cat((before[:, None], found[:, :-1]), 1)
        head_layers.enter(heads, ops, comm, own, _draft_kv(kv), batch.tokens, shifted, replace(where, adapters=None))
    _store(kv)[batch.slots.flatten()] = found.flatten(0, 1)
    out = plain.finish(arch, ops, comm, weights, hidden, batch, shape, rule)
    out.drafts = drafted
    return out


def _own(weights: Weights) -> dict[str, Any]:
    """The heads' weights, with the model's embedding and head where they have none."""
    draft, top = weights["draft"], weights["top"]
    lacks = tuple(f"{name}." for name in ("embed", "head") if f"{name}.w" not in draft["top"])
    return {**draft, "top": {**draft["top"], **{name: t for name, t in top.items() if name.startswith(lacks)}}} if lacks else draft


def _draft_kv(kv: Kv) -> Kv:
    assert kv.draft is not None
    return kv.draft


def _store(kv: Kv) -> Tensor:
    """The features of every slot."""
    assert kv.features is not None
    return kv.features.view(-1, kv.shape.features)


def _before(kv: Kv, batch: Batch, shape: Shape) -> Tensor:
    """The features of the position before each row's first new token [B,F]; zero where there is none."""
    size, first = kv.shape.space.block, batch.positions[:, :1]
    at = (first - 1).clamp(0, shape.length - 1)
    slots = batch.blocks.gather(1, (at // size).long()) * size + at % size
    return _store(kv)[slots[:, 0]] * (first > 0)


def _chooser(
    arch: Arch, heads: Heads, ops: Any, comm: Collectives, batch: Batch, shape: Shape, rule: NeuronSampling | None
) -> Choose:  # fmt: skip
    """How a draft is chosen: as the model itself chooses, with the same random number."""
    arch = replace(heads.arch, vocab=heads.arch.spoken or heads.arch.vocab) if heads.headed else arch

    def choose(w: Weights, hidden: Tensor, rows: Tensor, j: int) -> Tensor:
        known = w["top"].get("ids")  # of a smaller vocabulary: what the model calls them
        if shape.want.ids == "likeliest":
            ids = decoder.greedy(arch, ops, comm, w, hidden)
            return ids if known is None else known[ids.long()]
        logits = decoder.logits(arch, ops, comm, w, hidden)
        if known is not None:
            logits = logits.new_full((len(logits), heads.arch.vocab), -torch.inf).index_copy(1, known.long(), logits)
        how = [getattr(batch, name)[rows] for name in plain.HOW]
        return plain.sample(ops, logits, how, batch.uniform[rows, j], rule)[0]

    return choose


def _at_once(ops: Any, own: Weights, batch: Batch, before: Tensor, choose: Choose) -> Tensor:
    """The tokens [B,T], each row's drafts by as many Medusa heads."""
    tokens, wanted = batch.tokens.clone(), (batch.tokens <= DRAFTED).sum(1)
    for j in range(int(wanted.max())):
        rows, w = (wanted > j).nonzero()[:, 0], own["layers"][min(j, len(own["layers"]) - 1)]  # more are wanted when times are measured
        head = {"top": w} if "head.w" in w else own
        tokens[rows, j + 1] = choose(head, head_layers.blocks(ops, w, before[rows]), rows, j)
    return tokens


def _chain(
    heads: Heads, ops: Any, comm: Collectives, own: Weights, kv: Kv, batch: Batch, shape: Shape, before: Tensor, choose: Choose
) -> Tensor:
    """The tokens [B,T], each row's drafts one after the other: the first with true features, the others with those guessed before."""
    tokens, wanted = batch.tokens.clone(), (batch.tokens <= DRAFTED).sum(1)
    guessed = before.clone()
    for j in range(int(wanted.max())):
        rows = (wanted > j).nonzero()[:, 0]
        where = Places(batch.positions[rows, j, None], batch.rows[rows], batch.blocks[rows], batch.slots[rows, j, None], shape.length)
        said, found = head_layers.draft(heads, ops, comm, own, kv, tokens[rows, j, None], guessed[rows, None], where)
        guessed[rows] = found[:, 0]
        tokens[rows, j + 1] = choose(own, said[:, 0], rows, j)
    return tokens
