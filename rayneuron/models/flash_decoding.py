"""Flash decoding (`shard_over_sequence`): runs of n ranks hold the same KV heads, each every n-th position.

B rows, T new tokens, H query heads of a rank, G query heads of a group of n ranks, K KV heads of a group, D head size.
Offset o of a block lives on rank o mod n of its group, at column o div n; where n does not divide the block, the last column of some
ranks stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayneuron.models.arch import Arch
from rayneuron.models.attention import StepTables, mask_value
from rayneuron.models.choice import log_sum_exp
from rayneuron.models.kv import KvShape

if TYPE_CHECKING:
    from rayneuron.models.collectives import Collectives
    from rayneuron.models.ops import Layer, Ops


def constants(arch: Arch, rank: int, ranks: int) -> dict[str, Tensor]:
    """What a rank needs to know of its place, as data: its turn, its group's heads, its own among them, the group's ranks."""
    n, each = arch.sequence_shards, arch.heads // ranks
    group, turn = divmod(rank, n)
    return {
        "sequence.turn": torch.tensor([turn], dtype=torch.int32),
        "sequence.heads": torch.arange(group * n * each, (group + 1) * n * each, dtype=torch.int32),
        "sequence.mine": torch.arange(turn * each, (turn + 1) * each, dtype=torch.int32),
        "sequence.peers": torch.arange(group * n, (group + 1) * n, dtype=torch.int32),
    }


def bias(top: Mapping[str, Tensor], positions: Tensor, length: int, window: int, kv: KvShape, dtype: torch.dtype) -> Tensor:
    """Additive [B,1,T,columns] over the positions this rank holds."""
    column = torch.arange(kv.held(length), dtype=torch.int32, device=positions.device)
    offset = column % kv.columns * kv.shards + top["sequence.turn"]
    at = column // kv.columns * kv.space.block + offset
    here = positions[..., None]
    seen = (at <= here) & (at < length) & (offset < kv.space.block)
    if window:
        seen = seen & (at > here - window)
    return torch.where(seen[:, None], 0.0, mask_value(dtype)).to(dtype)


def attend(
    arch: Arch,
    ops: Ops,
    comm: Collectives,
    top: Mapping[str, Tensor],
    kv: KvShape,
    layer: Layer,
    qkv: tuple[Tensor, Tensor, Tensor],
    step: StepTables,
    window: int,
) -> tuple[Tensor, Layer]:
    """Write k, v of the positions that are this rank's, attend them for the group's heads, and merge by log-sum-exp.

    -> [B,T,H*D], and the layer's KV.
    """
    (q, k, v), places = qkv, step.places
    block, offset = places.slots // kv.space.block, places.slots % kv.space.block
    mine = offset % kv.shards == top["sequence.turn"]
    layer = ops.write_kv(layer, torch.where(mine, block * kv.columns + offset // kv.shards, kv.space.scratch * kv.columns), k, v)
    queries = comm.gather(q, 2).index_select(2, top["sequence.heads"])  # B T G D
    out, weight = partial(queries, layer, places.blocks, step.biases[window], arch.scale)
    out, weight = _of_group(comm, top, out), _of_group(comm, top, weight[..., None])  # B T n H D, B T n H 1
    share = weight.softmax(2)
    return (out * share.to(out.dtype)).sum(2).flatten(2), layer


def _of_group(comm: Collectives, top: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """x [B,T,G,*] of every rank -> [B,T,n,H,*]: this rank's heads, from every rank of its group."""
    everybody = comm.gather(x, 2).unflatten(2, (comm.ranks, -1))
    return everybody.index_select(2, top["sequence.peers"]).index_select(3, top["sequence.mine"])


def partial(q: Tensor, layer: Layer, blocks: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over one rank's columns: out [B,T,G,D] and the log of its weight [B,T,G] in float32."""
    from rayneuron.models.ops import read_kv

    k, v = (read_kv(store, blocks, mask.shape[-1], q.dtype) for store in layer)
    b, t, heads, size = q.shape
    group = q.transpose(1, 2).reshape(b, k.shape[1], -1, t, size)  # B K G/K T D
    scores = (torch.einsum("bkgtd,bkld->bkgtl", group, k) * scale).float() + mask[:, :, None]
    weight = log_sum_exp(scores)
    out = torch.einsum("bkgtl,bkld->bkgtd", (scores - weight).exp().to(q.dtype), v)
    return out.reshape(b, heads, t, size).transpose(1, 2), weight.reshape(b, heads, t).transpose(1, 2)
