"""Attention of one layer, and the masks and alibi slopes a step needs once.

B rows, T new tokens, L attended, H query heads and K KV heads of a rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayneuron.models.arch import Arch
from rayneuron.models.kv import Places

if TYPE_CHECKING:
    from rayneuron.models.collectives import Collectives
    from rayneuron.models.ops import Layer, Ops
    from rayneuron.models.shard import HeadPlan


@dataclass(frozen=True, slots=True)
class StepTables:
    """What every layer of one step shares: where its tokens are, biases by window, cos/sin or None, and this architecture's norm.

    `split`: how to attend where KV is split over ranks by position (flash decoding), None where it is not. `local`: cos and sin of layers
    with a window, where they are others. `whole_norm`: the norm of queries or keys over the heads of all ranks.
    """

    places: Places
    biases: Mapping[int, Tensor]
    cos: Tensor | None
    sin: Tensor | None
    q_heads: int
    kv_heads: int
    norm: Callable[[Mapping[str, Tensor], str, Tensor], Tensor]
    split: Callable[..., tuple[Tensor, Layer]] | None = None
    local: tuple[Tensor, Tensor] | None = None
    whole_norm: Callable[[Mapping[str, Tensor], str, Tensor], Tensor] | None = None


def alibi_slopes(heads: int) -> list[float]:
    """Slopes of ALiBi (Press et al. 2022): powers of 2^(-8/n), for other counts filled from the next power of two."""
    near = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / near) for i in range(near)]
    return slopes + [2 ** (-4 * (2 * i + 1) / near) for i in range(heads - near)]


def mask_value(dtype: torch.dtype) -> float:
    """Large and negative, and finite: a row that sees nothing gives garbage, never NaN."""
    return torch.finfo(dtype).min / 2


def bias(positions: Tensor, length: int, window: int, slopes: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Additive [B,1|H,T,L]: zero (or slope x position) where a token may look, `mask_value` elsewhere. slopes [H] float32 or None."""
    at = torch.arange(length, dtype=torch.int32, device=positions.device)
    here = positions[..., None]
    seen = at <= here
    if window:
        seen = seen & (at > here - window)
    base = torch.zeros((), dtype=torch.float32, device=positions.device)
    if slopes is not None:
        base = slopes[:, None, None] * at.float()
    return torch.where(seen[:, None], base, mask_value(dtype)).to(dtype)


def attention(
    arch: Arch, ops: Ops, w: Mapping[str, Tensor], kv: Layer, x: Tensor, step: StepTables, index: int
) -> tuple[Tensor, Layer]:  # fmt: skip
    """This rank's summand of layer `index` [B,T,E], and the layer's KV with k and v of the new tokens."""
    window = arch.window(index)
    q, k, v = project(arch, ops, w, x, step)
    if step.whole_norm is not None:
        q, k = step.whole_norm(w, "q_norms", q), step.whole_norm(w, "k_norms", k)
    elif arch.qk_norm:
        q, k = step.norm(w, "q_norm", q), step.norm(w, "k_norm", k)
    cos, sin = step.local if step.local is not None and window else (step.cos, step.sin)
    if cos is not None and index not in arch.nope:
        q, k = ops.rotate(q, cos, sin, arch.rope.pairs), ops.rotate(k, cos, sin, arch.rope.pairs)
    more = (arch.softcap_scores, sinks(arch, w)) if arch.softcap_scores or arch.sinks else ()
    if step.split is not None:
        mixed, kv = step.split(kv, (q, k, v), step, window)
    elif ops.attend_one is not None and x.shape[1] == 1:
        mixed, kv = ops.attend_one(q, kv, k, v, step.places, step.biases[window], arch.scale, *more)
    else:
        kv = ops.write_kv(kv, step.places.slots, k, v)
        mixed = ops.attend(q, kv, step.places.blocks, step.places.length, step.biases[window], arch.scale, *more)
    return ops.linear(w, "o", mixed), kv


def whole_norm(
    arch: Arch, comm: Collectives, plan: HeadPlan, w: Mapping[str, Tensor], name: str, x: Tensor
) -> Tensor:  # fmt: skip
    """RMS norm of x [B,T,H,D] over the heads of all ranks, each counted once however many ranks hold it."""
    heads = plan.q if name == "q_norms" else plan.kv
    one_of_each = [heads.index(i) for i in range(max(heads) + 1)]
    squares = comm.gather(x.float().square().sum(-1))[..., one_of_each]
    scale = (squares.sum(-1) / (len(one_of_each) * arch.head_dim) + arch.eps).rsqrt()
    weight = w[f"{name}.w"].float().view(x.shape[-2:])
    return (x.float() * scale[..., None, None] * weight).to(x.dtype)


def sinks(arch: Arch, w: Mapping[str, Tensor]) -> Tensor | None:
    """The sinks of this rank's query heads [H], which are stored once a channel so that they are cut as queries are."""
    return w["sinks.w"].view(-1, arch.head_dim)[:, 0] if arch.sinks else None


def project(arch: Arch, ops: Ops, w: Mapping[str, Tensor], x: Tensor, step: StepTables) -> tuple[Tensor, Tensor, Tensor]:
    """q [B,T,H,D], k and v [B,T,K,D], from one fused product or three."""
    sizes = [step.q_heads * arch.head_dim, step.kv_heads * arch.head_dim, step.kv_heads * arch.head_dim]
    parts = ops.linear(w, "qkv", x).split(sizes, -1) if "qkv.w" in w else [ops.linear(w, n, x) for n in "qkv"]
    if arch.clip_qkv:
        parts = [p.clamp(-arch.clip_qkv, arch.clip_qkv) for p in parts]
    q, k, v = (p.unflatten(-1, (-1, arch.head_dim)) for p in parts)
    return q, k, v
