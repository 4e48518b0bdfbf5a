"""The states of graphs for Neuron: KV of the model and of what drafts, by their names; and the graphs that move it.

N blocks of S positions, n of them moved at once, H KV heads of a rank, D head size, F numbers that heads keep of a position.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.devices.base import Weights
from rayneuron.devices.neuron.targets import Move, spare_columns
from rayneuron.models.kv import Kv, KvShape

FEATURES = "features"  # what heads keep [N,S,F]


def carried(kv_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which KV goes in and out of a graph: float8 as bfloat16, which holds all of its numbers."""
    return kv_dtype if kv_dtype.itemsize > 1 else torch.bfloat16


def stores(weights: Weights, kv: KvShape, kv_dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every state by its name: those of what drafts in what that computes in."""
    columns = kv.columns + spare_columns(kv.space)
    made: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    made |= dict.fromkeys(_named(kv, "kv"), ((kv.space.total, kv.heads, columns, kv.dim), kv_dtype))
    if kv.draft is None:
        return made
    dtype = (weights if kv.features else weights["draft"])["top"]["embed.w"].dtype
    made |= dict.fromkeys(_named(kv.draft, "draft_kv"), ((kv.space.total, kv.draft.heads, columns, kv.draft.dim), dtype))
    return {**made, FEATURES: ((kv.space.total, columns, kv.features), dtype)} if kv.features else made


def states(kv: KvShape) -> list[str]:
    """Their names, keys and values of a layer apart."""
    draft = [] if kv.draft is None else _named(kv.draft, "draft_kv")
    return [*_named(kv, "kv"), *draft, *([FEATURES] if kv.features else [])]


def _named(kv: KvShape, word: str) -> list[str]:
    return [f"{word}_{layer}_{part}" for layer in range(kv.layers) for part in "kv"]


def size(weights: Weights, kv: KvShape, kv_dtype: torch.dtype) -> int:
    """Bytes of all of them on a rank."""
    return sum(prod(shape) * dtype.itemsize for shape, dtype in stores(weights, kv, kv_dtype).values())


def put(shape: KvShape, held: Mapping[str, Tensor]) -> Kv:
    """The states as a step has them."""

    def of(kv: KvShape, word: str) -> Kv:
        flat = [held[name] for name in _named(kv, word)]
        return Kv(kv, list(zip(flat[::2], flat[1::2], strict=True)))

    made = of(shape, "kv")
    made.draft = None if shape.draft is None else of(shape.draft, "draft_kv")
    made.features = held.get(FEATURES)
    return made


def taken(kv: Kv) -> list[Tensor]:
    """What a step has made of them, in the order of `states`."""
    layers = [*kv.layers, *([] if kv.draft is None else kv.draft.layers)]
    return [*(store for layer in layers for store in layer), *([] if kv.features is None else [kv.features])]


def forgotten(store: Tensor) -> Tensor:
    """A state rebound with nothing changed that is looked at: zeros go to a place of scratch."""
    last = torch.full((1,), store.shape[0] - 1, dtype=torch.int32, device=store.device)
    return torch.ops.aten.index_put(store, [last, *[last * 0] * (store.dim() - 2)], torch.zeros_like(store[-1:].flatten(0, -2)[:1]))


def move(
    what: Move, kv: Kv, moved: Tensor | None, source: Tensor | None, target: Tensor | None, values: Tensor | None
) -> tuple[Tensor, ...]:
    """The graphs that move KV. moved, source, target [n] int32; values [layers,n,H,2,S,D] as `carried`. Every layer is rebound.

    Padding moves scratch to scratch. Export writes zeros there, since it has to write something. What heads know of a block is copied with
    it; a draft model reads what it has not read.
    """
    out = []
    if what.tag == "kv_copy" and kv.features is not None and kv.draft is not None:
        kv.features = _copied(kv.features, source, target)
        kv.draft.layers = [tuple(_copied(store, source, target) for store in layer) for layer in kv.draft.layers]
    for i, stores in enumerate(kv.layers):
        if what.tag == "kv_export":
            found = [store[cast(Tensor, moved)][:, :, : kv.shape.columns] for store in stores]
            out.append(torch.stack([one.to(carried(one.dtype)) for one in found], 2))
            last = torch.full((1,), stores[0].shape[0] - 1, dtype=torch.int32, device=stores[0].device)
            written = [torch.ops.aten.index_put(store, [last], torch.zeros_like(store[-1:])) for store in stores]
        elif what.tag == "kv_import":
            parts = F.pad(cast(Tensor, values)[i], (0, 0, 0, spare_columns(kv.shape.space))).to(stores[0].dtype).unbind(2)
            written = [torch.ops.aten.index_put(store, [moved], part) for store, part in zip(stores, parts, strict=True)]
        else:
            written = [_copied(store, source, target) for store in stores]
        kv.layers[i] = tuple(written)
    if what.tag == "kv_export":
        return (torch.stack(out),)
    return (cast(Tensor, moved if what.tag == "kv_import" else target) + 0,)


def _copied(store: Tensor, source: Tensor | None, target: Tensor | None) -> Tensor:
    return torch.ops.aten.index_put(store, [target], store[cast(Tensor, source)])
