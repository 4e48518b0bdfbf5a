"""A step of a model that has heads beside it, which draft from its hidden states; the model itself decides.

Shapes: B rows, T new tokens, R rows of a pass, F features of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.base import Batch, Shape, StepOutput, Weights
from rayneuron.engine import step as plain
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.engine.passes import Pass, passes, slot_of
from rayneuron.models import decoder, head_layers
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives
from rayneuron.models.heads import Heads
from rayneuron.models.kv import Kv, KvSpace

Choose = Callable[[Weights, Tensor, Pass], None]  # the drafts of a pass, by the weights of a head and hidden [R,E]


def step(
    arch: Arch, heads: Heads, ops: Any, comm: Collectives, weights: Weights, kv: Kv, batch: Batch, shape: Shape,
    *, rule: NeuronSampling | None = None,
) -> StepOutput:  # fmt: skip
    """As `engine.step.step`. Where the batch says DRAFTED, the heads fill in what is then verified. Of every token its features are kept in
    its slot, and the KV of its entry, with the true features before it instead of those that were guessed."""
    own, before, drafted = _own(weights), _before(ops, kv, batch, shape), None
    if shape.tag == "verify":
        choose = _chooser(arch, heads, ops, comm, shape, rule)
        if heads.chained:
            drafted = _chain(heads, ops, comm, own, _draft_kv(kv), batch, shape, before, choose)
        else:
            drafted = _at_once(heads, ops, own, batch, shape, kv.shape.space, before, choose)
        batch = replace(batch, tokens=drafted)
    taps, where = decoder.Taps(heads.taps), replace(plain.places(batch, shape, weights), read=None)
    hidden = decoder.forward(arch, ops, comm, weights, kv, batch.tokens, where, taps=taps)
    found = head_layers.features(heads, ops, own["top"], hidden, taps)
    if heads.chained:
        shifted = torch.cat((before[:, None], found[:, :-1]), 1)
        head_layers.enter(heads, ops, comm, own, _draft_kv(kv), batch.tokens, shifted, replace(where, adapters=None))
    kv.features = ops.write_features(kv.features, batch.slots, found)
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


def _before(ops: Any, kv: Kv, batch: Batch, shape: Shape) -> Tensor:
    """The features of the position before each row's first new token [B,F]; zero where there is none."""
    first = batch.positions[:, :1]
    slots = slot_of(batch.blocks, first - 1, kv.shape.space, shape.length)
    return torch.where(first > 0, ops.read_features(kv.features, slots[:, 0]), 0.0)


def _chooser(arch: Arch, heads: Heads, ops: Any, comm: Collectives, shape: Shape, rule: NeuronSampling | None) -> Choose:
    """How a draft is chosen: as the model itself chooses, with the same random number. Of a smaller vocabulary the ids rise with those of
    the model, and so what is drawn by sums over them is what would be drawn of the whole."""
    arch = replace(heads.arch, vocab=heads.arch.spoken or heads.arch.vocab) if heads.headed else arch

    def choose(w: Weights, hidden: Tensor, turn: Pass) -> None:
        known = w["top"].get("ids")  # of a smaller vocabulary: what the model calls them
        if shape.want.ids == "likeliest":
            ids = decoder.greedy(arch, ops, comm, w, hidden)
        else:
            ids = turn.sample(ops, decoder.logits(arch, ops, comm, w, hidden), rule)
        turn.put(ids if known is None else known[ids.long()])

    return choose


def _at_once(heads: Heads, ops: Any, own: Weights, batch: Batch, shape: Shape, space: KvSpace, before: Tensor, choose: Choose) -> Tensor:
    """The tokens [B,T], each row's drafts by as many Medusa heads."""
    columns = list(batch.tokens.unbind(1))
    for turn in passes(ops, batch, shape, space, columns, heads.most):
        w = own["layers"][min(turn.j, len(own["layers"]) - 1)]  # more are wanted when times are measured
        choose({"top": w} if "head.w" in w else own, head_layers.blocks(ops, w, turn.of(before)), turn)
    return torch.stack(columns, 1)


def _chain(
    heads: Heads, ops: Any, comm: Collectives, own: Weights, kv: Kv, batch: Batch, shape: Shape, before: Tensor, choose: Choose
) -> Tensor:
    """The tokens [B,T], each row's drafts one after the other: the first with true features, the others with those guessed before."""
    columns, guessed = list(batch.tokens.unbind(1)), before
    for turn in passes(ops, batch, shape, kv.shape.space, columns):
        ids, where = turn.new()
        said, found = head_layers.draft(heads, ops, comm, own, kv, ids, turn.of(guessed)[:, None], where)
        guessed = found[:, 0] if turn.which is None else guessed.index_copy(0, turn.which, found[:, 0])
        choose(own, said[:, 0], turn)
    return torch.stack(columns, 1)
