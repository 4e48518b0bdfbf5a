"""Where keys and values lie: blocks of positions, and what a step says about them; no torch.

N blocks, S positions of a block, B rows, T new tokens, M blocks of a row, H KV heads of a rank, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvSpace:
    """How KV is numbered: `blocks` blocks of `block` positions, shared by `rows` sequences of at most `limit` positions each.

    A slot is a place in a block: block x `block` + offset. Contiguous KV is one block a row, `block` >= `limit`.
    Row `rows` is idle, and position `limit` padding. Two more blocks exist: `null`, which is never written, where a row's table ends, and
    `scratch`, never in the table of a true row, where what is to be forgotten goes. Two, because a masked position is still read, and NaN
    survives a mask that is added; one, where every row has one block and no table ends.
    """

    rows: int
    limit: int
    blocks: int
    block: int
    null: int = field(init=False)
    scratch: int = field(init=False)  # the last one
    total: int = field(init=False)
    nowhere: int = field(init=False)  # a slot in scratch

    def __post_init__(self) -> None:
        scratch = self.blocks + (self.block < self.limit)
        for name, value in (("null", self.blocks), ("scratch", scratch), ("total", scratch + 1), ("nowhere", scratch * self.block)):
            object.__setattr__(self, name, value)

    def width(self, length: int) -> int:
        """Blocks that hold `length` positions."""
        return -(-length // self.block)


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of one rank: `space`, in each of `layers` layers, of `heads` heads of `dim` values.

    shards: ranks that hold the same heads, each every shards-th position of a block (flash decoding). draft: that of a draft model, or of
    heads, in the same blocks; features: numbers that every position has beside it, which heads draft from.
    """

    space: KvSpace
    layers: int
    heads: int
    dim: int
    shards: int = 1
    draft: KvShape | None = None
    features: int = 0

    @property
    def columns(self) -> int:
        """Positions of a block that a rank holds."""
        return -(-self.space.block // self.shards)

    def held(self, length: int) -> int:
        """Columns of a row, block after block, in which a rank holds its share of the first `length` positions."""
        whole, rest = divmod(length, self.space.block)
        return whole * self.columns + -(-rest // self.shards)

    @property
    def elements(self) -> int:
        """Numbers in all layers, keys and values, null and scratch included."""
        return 2 * self.layers * self.space.total * self.heads * self.columns * self.dim


@dataclass(slots=True)
class Kv:
    """The KV of one rank inside a step: a (keys, values) pair a layer, each [N, H, S, D]. A layer that is written is rebound.
    features [N, S, F], where its shape has some."""

    shape: KvShape
    layers: list[Any]
    draft: Kv | None = None
    features: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """Where the new tokens of a step are, int32: positions [B,T], rows [B], the blocks that hold each row [B,M], and the slots [B,T] where
    KV goes. The first `length` positions are attended. adapters [B]: a slot, negative for none; None where there are no slots.
    read [B]: the index of the only new token of a row whose output anybody reads, negative for none; None: all are. What a device gives for
    others may be anything finite."""

    positions: Tensor
    rows: Tensor
    blocks: Tensor
    slots: Tensor
    length: int
    adapters: Tensor | None = None
    read: Tensor | None = None
