"""The verbs a device may replace, and their plain torch form.

B rows, T new tokens, L attended, H query heads, K KV heads, D head size, N blocks of S positions, M of a row. All forms are exportable:
static shapes, no host reads, nothing written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.models import choice, rotary
from rayneuron.models.experts import experts
from rayneuron.models.linear import linear

FP8_LIMIT = {torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}  # Neuron's e4m3 ends at 240, not 448


Layer = tuple[Tensor, Tensor]  # keys and values


def write_features(store: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """A store of what heads keep of positions [N,S,F], with x [B,T,F] at slots int32 [B,T]: a new tensor."""
    return torch.ops.aten.index_put(store.flatten(0, 1), [slots], x).view(store.shape)


def read_features(store: Tensor, slots: Tensor) -> Tensor:
    """Those at slots [B]: [B,F]."""
    return store.flatten(0, 1)[slots]


@dataclass(frozen=True, slots=True)
class Ops:
    """Every product, norm, rotation, KV access and selection goes through one of these.

    linear(w, name, x); norm(w, name, x, kind, eps); rotate(x, cos, sin, pairs); write_kv(layer, slots, k, v) -> the layer's KV afterwards,
    which may be the same, written in place; attend(q, layer, blocks, length, bias, scale, softcap=0, sinks=None) -> [B,T,H*D];
    top_k(x, k) -> values, int64 indices (last dim); experts(w, x, which, share, act, limit=0) -> the weighted sum of the chosen experts
    of every token.
    `cumsum`, and of logits `likeliest`, `shortlist`, `log_sum`, `draw` and `whole` as in `models.choice`. `parts`: ranks among which
    they find the vocabulary divided, as `logits` then leaves it: it has the arguments of `decoder.logits`.
    `write_features` and `read_features` are of the store of what heads keep of each position.
    `attend_one`, if there is one, does write_kv and attend where every row has one new token: (q, layer, k, v, places, bias, scale,
    softcap=0, sinks=None) -> [B,1,H*D], the layer's KV afterwards.
    `dynamic`: sizes may depend on values, so that padding can be left out.
    Three fused forms a device may have, with the arguments and results of `decoder.layers`, `decoder.greedy` and `engine.sampling.sample`;
    None is returned for what they do not cover, which the verbs above then do.
    """

    linear: Callable[..., Tensor]
    norm: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    write_kv: Callable[..., Layer]
    attend: Callable[..., Tensor]
    top_k: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]
    cumsum: Callable[[Tensor], Tensor] = choice.cumsum
    likeliest: Callable[[Tensor], Tensor] = choice.likeliest
    shortlist: Callable[[Tensor, int], tuple[Tensor, Tensor]] = choice.shortlist
    log_sum: Callable[[Tensor], Tensor] = choice.log_sum_exp
    draw: Callable[[Tensor, Tensor], Tensor] = choice.draw
    whole: Callable[[Tensor], Tensor] = choice.whole
    parts: int = 1
    logits: Callable[..., Tensor] | None = None
    write_features: Callable[[Tensor, Tensor, Tensor], Tensor] = write_features
    read_features: Callable[[Tensor, Tensor], Tensor] = read_features
    attend_one: Callable[..., tuple[Tensor, Layer]] | None = None
    dynamic: bool = False
    layers: Callable[..., Tensor | None] | None = None
    greedy: Callable[..., Tensor | None] | None = None
    sample: Callable[..., tuple[Tensor, Tensor] | None] | None = None


def norm(w: Mapping[str, Tensor], name: str, x: Tensor, kind: str, eps: float) -> Tensor:
    """RMS or layer norm over the last dim, in the dtype of the weight; a missing weight or bias is one or zero."""
    weight, bias = w.get(name + ".w"), w.get(name + ".b")
    kept = x if weight is None else x.to(weight.dtype)
    if kind == "rms":
        return F.rms_norm(kept, x.shape[-1:], weight, eps).to(x.dtype)
    return F.layer_norm(kept, x.shape[-1:], weight, None if bias is None else bias.to(kept.dtype), eps).to(x.dtype)


def to_kv(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the KV store keeps it; float8 is clamped to what the device can hold, not wrapped to NaN."""
    limit = FP8_LIMIT.get(dtype)
    return (x if limit is None else x.clamp(-limit, limit)).to(dtype)


def bytes_of(x: Tensor) -> Tensor:
    """x, or its bytes where it is float8, which torch neither indexes nor scatters."""
    return x if x.dtype.itemsize > 1 else x.view(torch.uint8)


def write_kv(layer: Layer, slots: Tensor, k: Tensor, v: Tensor) -> Layer:
    """A layer's (keys, values), [N,K,S,D] each, with k, v [B,T,K,D] at slots int32 [B,T]: new tensors."""
    size = layer[0].shape[2]
    where = [slots // size, None, slots % size]
    return _written(layer[0], where, k), _written(layer[1], where, v)


def _written(store: Tensor, where: list[Tensor | None], x: Tensor) -> Tensor:
    return torch.ops.aten.index_put(bytes_of(store), where, bytes_of(to_kv(x, store.dtype))).view(store.dtype)


def read_kv(store: Tensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` positions of every row [B,K,L,D] in `dtype`, of store [N,K,S,D], through blocks int32 [B,M]."""
    plain = bytes_of(store)
    if blocks.shape[1] == 1:
        part = plain[:, :, :length][blocks[:, 0]]
    else:
        part = plain[blocks].transpose(1, 2).flatten(2, 3)[:, :, :length]  # B M K S D
    return part if store.dtype.itemsize > 1 else part.view(store.dtype).to(dtype)


def attend(
    q: Tensor, layer: Layer, blocks: Tensor, length: int, bias: Tensor, scale: float, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Attention of q [B,T,H,D] over the first `length` positions -> [B,T,H*D]. bias [B,1|H,T,L] is added to the scaled scores.

    `softcap` bounds the scores by a tanh before that; `sinks` [H] are scores of a position that is nowhere.
    """
    k, v = (read_kv(store, blocks, length, q.dtype) for store in layer)
    b, t, heads, size = q.shape
    group = heads // k.shape[1]
    if softcap or sinks is not None:
        q = q.transpose(1, 2).unflatten(1, (-1, group))  # B K G T D
        scores = torch.einsum("bkgtd,bkld->bkgtl", q, k).float() * scale
        if softcap:
            scores = (scores / softcap).tanh() * softcap
        scores = scores + (bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (-1, group))).float()
        if sinks is not None:
            beside = sinks.float().view(1, -1, group, 1, 1).expand(b, -1, -1, t, -1)
            scores = torch.cat((scores, beside), -1)
        share = scores.softmax(-1)[..., : k.shape[2]].to(q.dtype)
        return torch.einsum("bkgtl,bkld->bkgtd", share, v).flatten(1, 2).transpose(1, 2).reshape(b, t, heads * size)
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


PLAIN = Ops(linear, norm, rotary.rotate, write_kv, attend, top_k, experts)
