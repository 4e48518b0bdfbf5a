"""The verbs a device may replace, and their plain torch form.

B rows, T new tokens, L attended, H query heads, K KV heads, D head size. All forms are exportable: static shapes, no host reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.models import feedforward, rotary
from rayneuron.models.linear import linear

FP8_LIMIT = {torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}  # Neuron's e4m3 ends at 240, not 448


@dataclass(frozen=True, slots=True)
class Ops:
    """Every product, norm, rotation, KV access and selection goes through one of these.

    linear(w, name, x); norm(w, name, x, kind, eps); rotate(x, cos, sin, pairs); write_kv(kv, rows, positions, k, v) in place;
    attend(q, kv, rows, length, bias, scale) -> [B,T,H*D]; top_k(x, k) -> values, int64 indices (last dim);
    experts(w, x, which, share, act) -> the weighted sum of the chosen experts of every token.
    Three fused forms a device may have, with the arguments and results of `decoder.layers`, `decoder.greedy` and `engine.sampling.sample`;
    None is returned for what they do not cover, which the verbs above then do.
    """

    linear: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    write_kv: Callable[..., None]
    attend: Callable[..., Tensor]
    top_k: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]
    layers: Callable[..., Tensor | None] | None = None
    greedy: Callable[..., Tensor | None] | None = None
    sample: Callable[..., tuple[Tensor, Tensor] | None] | None = None


def norm(w: Mapping[str, Tensor], name: str, x: Tensor, kind: str, eps: float) -> Tensor:
    """RMS or layer norm over the last dim; a missing weight or bias is one or zero."""
    if kind == "rms":
        return F.rms_norm(x, x.shape[-1:], w[name + ".w"], eps)
    return F.layer_norm(x, x.shape[-1:], w.get(name + ".w"), w.get(name + ".b"), eps)


def to_kv(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the KV store keeps it; float8 is clamped to what the device can hold, not wrapped to NaN."""
    limit = FP8_LIMIT.get(dtype)
    return (x if limit is None else x.clamp(-limit, limit)).to(dtype)


def write_kv(kv: Tensor, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k, v [B,T,K,D] at kv [2,rows,K,length,D] in place. rows int32 [B], positions int32 [B,T]."""
    at = rows[:, None].expand(positions.shape)
    store = kv if kv.dtype.itemsize > 1 else kv.view(torch.uint8)  # torch scatters no float8; bytes it does
    for i, x in enumerate((k, v)):
        value = to_kv(x, kv.dtype)
        store[i][at, :, positions] = value if store is kv else value.view(torch.uint8)


def read_kv(kv: Tensor, rows: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [B,K,L,D] of the first `length` positions of `rows`, in `dtype`."""
    if kv.dtype.itemsize == 1:
        part = kv.view(torch.uint8)[:, :, :, :length][:, rows].view(kv.dtype).to(dtype)
    else:
        part = kv[:, :, :, :length][:, rows]
    return part[0], part[1]


def attend(q: Tensor, kv: Tensor, rows: Tensor, length: int, bias: Tensor, scale: float) -> Tensor:
    """Attention of q [B,T,H,D] over the first `length` positions -> [B,T,H*D]. bias [B,1|H,T,L] is added to the scaled scores."""
    k, v = read_kv(kv, rows, length, q.dtype)
    b, t, heads, size = q.shape
    group = heads // k.shape[1]
    if group > 1 and t == 1:  # the queries of a group are rows of one product: nothing is repeated
        q = q.view(b, k.shape[1], group, size)
        bias = bias if bias.shape[1] == 1 else bias.view(b, k.shape[1], group, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).reshape(b, 1, heads * size)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias, scale=scale, enable_gqa=group > 1)
    return out.transpose(1, 2).reshape(b, t, heads * size)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dim, descending, and their indices."""
    values, which = x.topk(k, -1)
    return values, which


PLAIN = Ops(linear, norm, rotary.rotate, write_kv, attend, top_k, feedforward.experts)
