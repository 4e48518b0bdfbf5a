"""A rank's share of every tensor: pure functions on shapes and tensors, written once for all families and devices.

H query heads, K KV heads, D head size. Padding is zeros, so padded heads and channels add nothing to any sum. torch is imported where
tensors are cut, so that a plan takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayneuron.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SHARD, REPLICATE, CONVERT = "shard-over-heads", "REPLICATE_TO_TP_DEGREE", "CONVERT_TO_MHA"
_SPELLINGS = {"shard-over-heads": SHARD, "replicated-heads": REPLICATE, "replicate_to_tp_degree": REPLICATE, "convert_to_mha": CONVERT}
_REFUSED = {
    "shard-over-batch": "KV is held by row on the rank that owns its heads, so a batch is never moved between ranks",
    "all-gather-heads": "attention output stays on the rank that owns its heads and is summed after the output projection",
}


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Which heads every rank holds. `q[i]`, `kv[i]`: source head of padded head i, -1 for a zero head; rank r owns the r-th equal part."""

    strategy: str
    q: tuple[int, ...]
    kv: tuple[int, ...]
    ranks: int

    @property
    def q_heads(self) -> int:
        """Query heads a rank."""
        return len(self.q) // self.ranks

    @property
    def kv_heads(self) -> int:
        """KV heads a rank."""
        return len(self.kv) // self.ranks

    def q_of(self, rank: int) -> tuple[int, ...]:
        """Source heads of one rank's queries."""
        return self.q[rank * self.q_heads : (rank + 1) * self.q_heads]

    def kv_of(self, rank: int) -> tuple[int, ...]:
        """Source heads of one rank's keys and values."""
        return self.kv[rank * self.kv_heads : (rank + 1) * self.kv_heads]


def head_plan(heads: int, kv_heads: int, ranks: int, strategy: str | None = None, shards: int = 1) -> HeadPlan:
    """The heads of every rank (NxD's `determine_sharding_strategy` and its padding rules).

    strategy None: shard where ranks divide the KV heads, replicate where the KV heads divide the ranks, else convert to MHA.
    `shards` > 1 (flash decoding): runs of `shards` ranks hold the same KV heads. Raises ConfigError where nothing fits.
    """
    if heads % kv_heads:
        raise ConfigError(f"{heads} attention heads are not a multiple of {kv_heads} key/value heads")
    if ranks > heads:
        raise ConfigError(
            f"tensor_parallel {ranks} is more than the model's {heads} attention heads; write tensor_parallel: {heads} or less",
            param="tensor_parallel",
        )
    chosen = _strategy(kv_heads, ranks, strategy)
    group = heads // kv_heads
    if shards > 1:
        return _sequence_plan(heads, kv_heads, ranks, shards)
    if chosen == SHARD:
        return HeadPlan(chosen, tuple(range(heads)), tuple(range(kv_heads)), ranks)
    if chosen == REPLICATE:
        copies = ranks // kv_heads
        padded = -(-group // copies) * copies
        q = [k * group + i if i < group else -1 for k in range(kv_heads) for i in range(padded)]
        return HeadPlan(chosen, tuple(q), tuple(r * kv_heads // ranks for r in range(ranks)), ranks)
    tail = (-1,) * (-heads % ranks)
    return HeadPlan(chosen, tuple(range(heads)) + tail, tuple(h // group for h in range(heads)) + tail, ranks)


def _strategy(kv_heads: int, ranks: int, wanted: str | None) -> str:
    if wanted in _REFUSED:
        raise ConfigError(
            f"group_query_attention {wanted!r} is not available here: {_REFUSED[wanted]}; write 'replicated-heads' or leave it out"
        )
    if wanted is None:
        return SHARD if kv_heads % ranks == 0 else REPLICATE if ranks % kv_heads == 0 else CONVERT
    chosen = _SPELLINGS.get(wanted.lower())
    if chosen is None:
        raise ConfigError(f"group_query_attention {wanted!r} is unknown; one of {', '.join(sorted(_SPELLINGS))}")
    if chosen == SHARD and kv_heads % ranks:
        raise ConfigError(f"group_query_attention 'shard-over-heads' needs key/value heads ({kv_heads}) divisible by the degree {ranks}")
    if chosen == REPLICATE and kv_heads % ranks == 0:
        return SHARD
    return CONVERT if chosen == REPLICATE and ranks % kv_heads else chosen


def _sequence_plan(heads: int, kv_heads: int, ranks: int, shards: int) -> HeadPlan:
    groups = ranks // shards
    if ranks % shards or kv_heads % groups or heads % ranks:
        raise ConfigError(
            f"shard_over_sequence over {shards} of {ranks} ranks does not fit {heads} heads and {kv_heads} key/value heads; leave it out"
        )
    each = kv_heads // groups
    kv = [r // shards * each + i for r in range(ranks) for i in range(each)]
    return HeadPlan("shard-over-sequence", tuple(range(heads)), tuple(kv), ranks)


def padded(size: int, ranks: int) -> int:
    """`size` rounded up to a multiple of `ranks`."""
    return -(-size // ranks) * ranks


def take_heads(t: Tensor, index: tuple[int, ...], head_dim: int, dim: int) -> Tensor:
    """Heads `index` of `t`, whose `dim` is heads x head_dim; -1 gives zeros. A contiguous run stays a view."""
    if index == tuple(range(index[0], index[0] + len(index))) and index[0] >= 0:
        return t.narrow(dim, index[0] * head_dim, len(index) * head_dim)
    dim %= t.dim()
    zero = t.new_zeros(t.narrow(dim, 0, head_dim).shape)
    return join([zero if i < 0 else t.narrow(dim, i * head_dim, head_dim) for i in index], dim)


def take_part(t: Tensor, rank: int, ranks: int, dim: int) -> Tensor:
    """The rank-th of `ranks` equal parts of `dim`; the tail is padded with zeros where `ranks` do not divide it."""
    size, dim = t.shape[dim], dim % t.dim()
    each = padded(size, ranks) // ranks
    start, stop = min(rank * each, size), min((rank + 1) * each, size)
    part = t.narrow(dim, start, stop - start)
    if stop - start == each:
        return part
    shape = list(t.shape)
    shape[dim] = each - (stop - start)
    return join([part, t.new_zeros(shape)], dim)


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """torch.cat, also of float8 tensors, which torch does not join but whose bytes it does."""
    import torch

    kind = parts[0].dtype
    if kind.itemsize == 1 and kind.is_floating_point:
        return torch.cat([p.contiguous().view(torch.uint8) for p in parts], dim).view(kind)
    return torch.cat(list(parts), dim)


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of one pipeline stage; earlier stages take the remainder, as the last also holds the head."""
    each, rest = divmod(layers, stages)
    start = stage * each + min(stage, rest)
    return range(start, start + each + (stage < rest))


def sequence_shards(heads: int, kv_heads: int, ranks: int) -> int:
    """How many ranks share one KV group by position (flash decoding): all that would else hold copies of it, or all ranks."""
    shards = ranks // kv_heads if ranks > kv_heads and ranks % kv_heads == 0 else ranks
    _sequence_plan(heads, kv_heads, ranks, shards)
    return shards
