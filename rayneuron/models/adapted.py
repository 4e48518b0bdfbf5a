"""What adapters add to products in plain torch: those of all slots at once, masked by row; static shapes, exportable.

B rows, T new tokens, S slots of rank R side by side: `name.lora_a` [in, S x R], `name.lora_b` [S x R, out].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rayneuron.models.rules import FUSED, PRODUCTS

if TYPE_CHECKING:
    from rayneuron.models.ops import Ops

Pairs = dict[str, tuple[Tensor, Tensor]]  # of a layer's products ("q", "gate"): A [R, in], B [out, R] with the scale in it


def adapted(ops: Ops, adapters: Tensor, rank: int) -> Ops:
    """`ops` whose products add what the adapters of their rows add. adapters int32 [B]: a slot, negative for none; rank: R."""
    if not rank:
        raise RuntimeError("the device keeps its adapters for whole layers alone, and has been asked for a layer's parts")
    if ops.dynamic and not bool((adapters >= 0).any()):
        return ops
    return replace(ops, linear=partial(linear, ops.linear, adapters, rank))


def linear(base: Any, adapters: Tensor, rank: int, w: Mapping[str, Any], name: str, x: Tensor) -> Tensor:
    """The product of `base`, x [B,T,in] -> [B,T,out], and of each row its adapter's share."""
    y: Tensor = base(w, name, x)
    parts = FUSED.get(name, (name,))
    pairs = {part: (w[f"{part}.lora_a"], w[f"{part}.lora_b"]) for part in parts if f"{part}.lora_a" in w}
    if not pairs:
        return y
    at = torch.arange(next(iter(pairs.values()))[0].shape[1], dtype=torch.int32, device=x.device) - adapters[:, None] * rank
    own = ((at >= 0) & (at < rank))[:, None].to(x.dtype)  # B 1 SR
    made = {part: ((x @ a) * own) @ b for part, (a, b) in pairs.items()}
    if len(made) < len(parts):
        made |= {part: y.new_zeros(*y.shape[:-1], size) for part, size in _absent(parts, pairs, y.shape[-1]).items()}
    return y + torch.cat([made[part] for part in parts], -1)


def _absent(parts: Sequence[str], pairs: Pairs, outputs: int) -> dict[str, int]:
    """The outputs of what has no tables among what is multiplied at once: of the last two, k and v or gate and up, each has as many."""
    known = {part: b.shape[1] for part, (_, b) in pairs.items()}
    each = next((known[part] for part in parts[-2:] if part in known), (outputs - sum(known.values())) // 2)
    sizes = dict(zip(parts, (*[outputs - 2 * each] * (len(parts) - 2), each, each), strict=True))
    return {part: size for part, size in sizes.items() if part not in known}


def tables(w: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]], slots: int, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """A layer's weights with room for adapters. sizes: [out, in] of this rank's part of each product."""
    room = dict(w)
    for name, (outputs, inputs) in sizes.items():
        room[f"{name}.lora_a"] = torch.zeros(inputs, slots * rank, dtype=dtype)
        room[f"{name}.lora_b"] = torch.zeros(slots * rank, outputs, dtype=dtype)
    return room


def put(layers: Sequence[Mapping[str, Any]], slot: int, rank: int, adapter: Sequence[Pairs]) -> None:
    """Write an adapter's pairs into the slot of every layer's tables, zeros where it has none."""
    here = slice(slot * rank, (slot + 1) * rank)
    for w, pairs in zip(layers, adapter, strict=True):
        for name in [name.removesuffix(".w") for name in PRODUCTS if f"{name[:-1]}lora_a" in w]:
            a, b = w[f"{name}.lora_a"][:, here], w[f"{name}.lora_b"][here]
            a.zero_(), b.zero_()
            if name in pairs:
                down, up = pairs[name]
                a[:, : len(down)], b[: len(down)] = down.T, up.T
