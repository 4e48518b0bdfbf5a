"""The verbs of a graph in the form that neuronx-cc takes well; `models.ops` and `models.choice` are their reference.

B rows, T new tokens, L attended, H query heads, K KV heads, G = H / K, D head size, N blocks of S positions, M of a row, R ranks, V a
rank's part of the vocabulary, n parts of it. What is kept here, and why: bfloat16 products with a float32 softmax (torch's own attention
copies K and V to float32), nothing infinite (NaN ends a step), cumulative sums by a triangular product (torch-xla's window is as wide as
its input, so its work is squared), choices among the rank's own logits before anything is gathered, KV read where it lies, and in a
decode step before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.models import choice, decoder, experts, rotary
from rayneuron.models.arch import Arch
from rayneuron.models.attention import mask_value
from rayneuron.models.choice import LOWEST
from rayneuron.models.kv import KvShape, Places
from rayneuron.models.linear import linear as product
from rayneuron.models.ops import Layer, Ops, to_kv, top_k

WIDEST = 512  # a cumulative sum up to so many is one triangular product; longer ones are two
PART = 128  # logits that are drawn from together


def verbs(comm: Any, kv: KvShape, *, aligned: bool, together: bool) -> Ops:
    """The verbs of one graph. `aligned`: its row i is KV row i. `together`: the host drives all ranks and joins their logits."""
    return Ops(
        linear, norm, rotary.rotate, partial(write_kv, kv.columns, aligned), partial(attend, aligned), top_k,
        partial(experts.experts, sums=cumsum), cumsum, partial(likeliest, comm), partial(shortlist, comm), partial(log_sum, comm),
        partial(draw, comm), choice.whole if together else comm.gather, comm.ranks, logits,
        write_features=partial(write_features, kv.columns, aligned), read_features=partial(read_features, kv.columns, aligned),
        attend_one=partial(attend_one, kv.columns) if aligned else None,
    )  # fmt: skip


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """As `models.linear.linear`, scaled in float32: a scale rounded to bfloat16 is up to 0.4 % wrong."""
    scale, bias = w.get(name + ".scale"), w.get(name + ".b")
    if scale is None:
        return product(w, name, x)
    y = (F.linear(x, w[name + ".w"].to(x.dtype)).float() * scale.flatten()).to(x.dtype)
    return y if bias is None else y + bias


def norm(w: Mapping[str, Tensor], name: str, x: Tensor, kind: str, eps: float) -> Tensor:
    """As `models.ops.norm`, in float32 by sums: torch-xla's own means divide by a number that might be zero, else NaN."""
    wide, share = x.float(), 1.0 / x.shape[-1]
    if kind != "rms":
        wide = wide - wide.sum(-1, keepdim=True) * share
    wide = wide * ((wide * wide).sum(-1, keepdim=True) * share + eps).rsqrt()
    for part, put in ((".w", torch.mul), (".b", torch.add)):
        wide = put(wide, w[name + part].float()) if name + part in w else wide
    return wide.to(x.dtype)


def write_kv(columns: int, aligned: bool, layer: Layer, slots: Tensor, k: Tensor, v: Tensor) -> Layer:
    """k, v [B,T,K,D] into a layer's (keys, values) [N,K,S,D], of which the first `columns` are attended, at slots [B,T]: new tensors.

    Aligned, row i writes into KV row i, what is to be forgotten into the columns behind. Block, head and column are indices side by side:
    so an update is a run of D numbers, and no store is turned for it.
    """
    block, column = _place(columns, aligned, slots)
    heads = torch.arange(k.shape[2], dtype=torch.int32, device=k.device)
    where = [block[:, None], heads[None, :, None], column[:, None]]  # B 1 T, 1 K 1, B 1 T
    return _written(layer[0], where, k), _written(layer[1], where, v)


def _place(columns: int, aligned: bool, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of slots [B,T], or of each row [B,1], and the columns [B,T]."""
    if aligned:
        block = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)[:, None]
        column = slots - block * columns
        return block, torch.where((column < 0) | (column >= columns), columns, column)
    if columns & (columns - 1) == 0:
        return slots >> (columns.bit_length() - 1), slots & (columns - 1)
    block = torch.div(slots, columns, rounding_mode="floor")
    return block, slots - block * columns


def write_features(columns: int, aligned: bool, store: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """As `models.ops.write_features`, with slots as `write_kv` takes them."""
    return torch.ops.aten.index_put(store, list(_place(columns, aligned, slots)), x)


def read_features(columns: int, aligned: bool, store: Tensor, slots: Tensor) -> Tensor:
    """As `models.ops.read_features`."""
    return store[_place(columns, aligned, slots[:, None])][:, 0]


def _written(store: Tensor, where: list[Tensor], x: Tensor) -> Tensor:
    return torch.ops.aten.index_put(store, where, to_kv(x, store.dtype).transpose(1, 2))


def read(aligned: bool, store: Tensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The positions of every row in `dtype` [B,M,K,S,D], of one block a row [B,1,K,L,D]: where KV lies if it is aligned, else gathered."""
    if aligned:
        part = store[: blocks.shape[0], :, :length].unsqueeze(1)
    elif blocks.shape[1] == 1:
        part = store.index_select(0, blocks[:, 0])[:, :, :length].unsqueeze(1)
    else:
        part = store.index_select(0, blocks.flatten()).unflatten(0, blocks.shape)
    return part if store.dtype.itemsize > 1 else part.to(dtype)


def attend(
    aligned: bool, q: Tensor, layer: Layer, blocks: Tensor, length: int, bias: Tensor, scale: float, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `models.ops.attend`: products in q's dtype, the softmax in float32, and neither K nor V is copied, turned or widened."""
    k, v = (read(aligned, store, blocks, length, q.dtype) for store in layer)
    b, t, heads, size = q.shape
    group = q.transpose(1, 2).reshape(b, k.shape[2], -1, size)  # B K GT D
    scores = torch.einsum("bkgd,bmksd->bkgms", group, k).flatten(3).float() * scale  # B K GT MS
    scores = scores.view(b, k.shape[2], -1, t, scores.shape[-1])
    bias = F.pad(bias, (0, scores.shape[-1] - bias.shape[-1]), value=mask_value(bias.dtype)) if scores.shape[-1] > bias.shape[-1] else bias
    bias = bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (k.shape[2], -1))  # B 1|K 1|G T MS
    scores = ((scores / softcap).tanh() * softcap if softcap else scores) + bias.float()
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, k.shape[2], -1, 1, 1).expand(b, -1, -1, t, -1)), -1)
    share = scores.softmax(-1)[..., : bias.shape[-1]].to(q.dtype)
    share = share.view(b, k.shape[2], -1, k.shape[1], k.shape[3])  # B K GT M S
    out = torch.einsum("bkgms,bmksd->bkgd", share, v)
    return out.reshape(b, heads, t, size).transpose(1, 2).reshape(b, t, heads * size)


def attend_one(
    columns: int, q: Tensor, layer: Layer, k: Tensor, v: Tensor, places: Places, bias: Tensor, scale: float, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Layer]:  # fmt: skip
    """As `write_kv`, then `attend`, of one new token a row where row i is KV row i: the positions before it are attended as they lie,
    the token itself beside them, and only then it is written. So reading KV waits for nothing that the step computes."""
    b, heads = q.shape[0], layer[0].shape[1]
    length, size = bias.shape[-1], q.shape[-1]
    lying = [part if part.dtype.itemsize > 1 else part.to(q.dtype) for part in (store[:b, :, :length] for store in layer)]  # B K L D
    new = [to_kv(x, store.dtype).float()[:, 0, :, None] for x, store in zip((k, v), layer, strict=True)]  # B K 1 D
    group = q.reshape(b, heads, -1, size)  # B K G D
    here = torch.arange(length, dtype=torch.int32, device=q.device) == places.positions  # B L
    bias = bias[:, :, 0].float().view(b, 1 if bias.shape[1] == 1 else heads, -1, length)  # B 1|K 1|G L
    own = torch.where(here[:, None, None], bias, 0.0).sum(-1, keepdim=True)
    bias = torch.where(here[:, None, None], mask_value(torch.float32), bias)
    scores = torch.einsum("bkgd,bkld->bkgl", group, lying[0]).float() * scale
    mine = (group.float() * new[0]).sum(-1, keepdim=True) * scale
    if softcap:
        scores, mine = (scores / softcap).tanh() * softcap, (mine / softcap).tanh() * softcap
    scores, mine = scores + bias, mine + own
    most = torch.maximum(scores.amax(-1, keepdim=True), mine)
    beside = None if sinks is None else sinks.float().view(1, heads, -1, 1)
    most = most if beside is None else torch.maximum(most, beside)
    scores, mine = (scores - most).exp(), (mine - most).exp()
    total = scores.sum(-1, keepdim=True) + mine
    total = total if beside is None else total + (beside - most).exp()
    out = torch.einsum("bkgl,bkld->bkgd", (scores / total).to(q.dtype), lying[1]).float() + mine / total * new[1]
    return out.to(q.dtype).reshape(b, 1, -1), write_kv(columns, True, layer, places.slots, k, v)


def cumsum(x: Tensor) -> Tensor:
    """Cumulative sums of float32 along the last dim, by a product with a triangle of ones; in two steps where it is long."""
    size = x.shape[-1]
    if size <= WIDEST:
        at = torch.arange(size, dtype=torch.int32, device=x.device)
        return x @ (at[:, None] <= at).to(x.dtype)
    parts = F.pad(x, (0, -size % PART)).unflatten(-1, (-1, PART))
    sums = parts.sum(-1)
    return (cumsum(parts) + (cumsum(sums) - sums)[..., None]).flatten(-2)[..., :size]


def logits(arch: Arch, ops: Ops, comm: Any, weights: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """hidden [...,E] -> this rank's part of the logits [...,V] in float32; what sharding padded is the lowest number there is."""
    x = decoder.capped(arch, ops.linear(weights["top"], "head", hidden).float())
    if x.shape[-1] * comm.ranks == arch.vocab:
        return x
    at = torch.arange(x.shape[-1] * comm.ranks, dtype=torch.int32, device=x.device)
    padding = torch.where(at < arch.vocab, 0.0, LOWEST)
    mine = comm.share(padding, 0) if comm.ranks > 1 else padding  # which part that is only data tells
    return torch.where(mine < 0, LOWEST, x)


def likeliest(comm: Any, x: Tensor) -> Tensor:
    """As `choice.likeliest`, over all ranks' parts: each gives its largest and where it is."""
    best = x.amax(-1, keepdim=True)
    ids = _first(x >= best)
    if comm.ranks == 1:
        return ids[..., 0]
    found, ids = comm.gather(best), comm.gather(ids)  # ... R
    ids = ids + torch.arange(comm.ranks, dtype=torch.int32, device=x.device) * x.shape[-1]
    most = 2**31 - 1
    return torch.where(found >= found.amax(-1, keepdim=True), ids, most).amin(-1).to(torch.int32)


def _first(true: Tensor) -> Tensor:
    """The lowest index [..., 1] int32 that is true."""
    size = true.shape[-1]
    at = torch.arange(size, dtype=torch.int32, device=true.device)
    return torch.where(true, at, size - 1).amin(-1, keepdim=True).to(torch.int32)


def shortlist(comm: Any, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `choice.shortlist`: each rank's own, then the largest of those."""
    values, ids = choice.shortlist(x, count)
    if comm.ranks == 1:
        return values, ids
    first = torch.arange(comm.ranks, dtype=torch.int32, device=x.device)[:, None] * x.shape[-1]
    found, ids = comm.gather(values), comm.gather(ids.to(torch.int32)).unflatten(-1, (comm.ranks, -1)) + first  # B RC, B R C
    values, at = choice.shortlist(found, count)
    return values, ids.flatten(-2).gather(-1, at).long()


def log_sum(comm: Any, x: Tensor) -> Tensor:
    """As `choice.log_sum_exp`, over all ranks' parts."""
    mine = choice.log_sum_exp(x)
    return mine if comm.ranks == 1 else choice.log_sum_exp(comm.gather(mine))


def draw(comm: Any, x: Tensor, uniform: Tensor) -> Tensor:
    """As `choice.draw`: first a run of PART ids by the runs' sums, then one of it. Only sums, and one run, pass between ranks."""
    best = x.amax(-1, keepdim=True)
    best = best if comm.ranks == 1 else comm.gather(best).amax(-1, keepdim=True)
    weights = F.pad((x - best).exp(), (0, -x.shape[-1] % PART)).unflatten(-1, (-1, PART))  # B n PART
    sums = weights.sum(-1)
    every = sums if comm.ranks == 1 else comm.gather(sums)  # B Rn
    reached = cumsum(every)
    target = choice.threshold(uniform, reached[:, -1:])
    run = choice.below(every, reached, target)[:, None]
    here = (torch.arange(every.shape[-1], dtype=torch.int64, device=x.device) == run).float()
    mine = here if comm.ranks == 1 else comm.share(here, 1)  # B n: none of it is 1 on other ranks
    inside = (weights * mine[..., None]).sum(1)
    inside = inside if comm.ranks == 1 else comm.reduce(inside)  # B PART
    before = ((reached - every) * here).sum(-1, keepdim=True)
    place = choice.below(inside, cumsum(inside), target - before)
    at = torch.arange(every.shape[-1], dtype=torch.float32, device=x.device)
    first = torch.floor(at / sums.shape[-1]) * (x.shape[-1] - sums.shape[-1] * PART) + at * PART  # id a run begins with, below 2^24
    return (here * first).sum(-1).long() + place
