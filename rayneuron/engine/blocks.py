"""The KV store of one engine: who holds which row and which blocks."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayneuron.models.kv import KvSpace


@dataclass(slots=True, eq=False)
class Hold:
    """What one sequence holds: a row, and blocks in the order of its positions. `shared`: how many of the first others read too; nobody
    writes those. `table` int32 [width]: the blocks, null behind the last. `copy`: (from, to) blocks still to be copied before it runs."""

    row: int
    blocks: list[int]
    table: NDArray[np.int32]
    shared: int = 0
    copy: tuple[int, int] | None = None


class Blocks:
    """Owner of every row and block. The lowest free ones go first, so that rows stay dense and memory that was never used stays untouched.

    Invariant (`check`): free + held rows are all rows; a block is free, or as many hold it as its count says.
    """

    def __init__(self, space: KvSpace) -> None:
        self.space = space
        self._rows = list(range(space.rows))
        self._free = list(range(space.blocks))
        self._holders = [0] * space.blocks
        self._table = np.full((space.rows, space.width(space.limit)), space.null, np.int32)

    @property
    def free_rows(self) -> int:
        """Rows nobody holds."""
        return len(self._rows)

    @property
    def used_tokens(self) -> int:
        """Positions in blocks that somebody holds."""
        return (self.space.blocks - len(self._free)) * self.space.block

    @property
    def total_tokens(self) -> int:
        """Positions in all blocks."""
        return self.space.blocks * self.space.block

    def fits(self, tokens: int) -> bool:
        """Whether one sequence of `tokens` could ever run alone."""
        return tokens <= self.space.limit and self.space.width(tokens) <= self.space.blocks

    def admit(self, tokens: int, like: Hold | None = None, known: int = 0) -> Hold | None:
        """A row with room for `tokens`, or None. Of the first `known` positions of `like` whole blocks are shared, the rest is copied."""
        shared = known // self.space.block if like is not None else 0
        if not self._rows or self.space.width(tokens) - shared > len(self._free):
            return None
        row = heapq.heappop(self._rows)
        hold = Hold(row, list(like.blocks[:shared]) if like is not None else [], self._table[row], shared)
        for block in hold.blocks:
            self._holders[block] += 1
        if like is not None:
            like.shared = max(like.shared, shared)
        hold.table[:shared] = hold.blocks
        self.extend(hold, tokens)
        if like is not None and known % self.space.block:
            hold.copy = like.blocks[shared], hold.blocks[shared]
        return hold

    def extend(self, hold: Hold, tokens: int) -> bool:
        """Make room for `tokens` positions; False, and nothing changed, where too few blocks are free."""
        have, need = len(hold.blocks), self.space.width(tokens)
        if need <= have:
            return True
        if need - have > len(self._free):
            return False
        for at in range(have, need):
            block = heapq.heappop(self._free)
            self._holders[block] = 1
            hold.blocks.append(block)
            hold.table[at] = block
        return True

    def release(self, hold: Hold) -> None:
        """Give a row and its blocks back; shared ones stay with those who still hold them."""
        for block in hold.blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                heapq.heappush(self._free, block)
        hold.blocks.clear()
        hold.table[:] = self.space.null
        heapq.heappush(self._rows, hold.row)

    def check(self, holds: Iterable[Hold]) -> None:
        """Raise AssertionError if the invariant is broken. `holds`: all there are."""
        holds = list(holds)
        counted = Counter(block for hold in holds for block in hold.blocks)
        assert sorted([*self._rows, *(hold.row for hold in holds)]) == list(range(self.space.rows)), self._rows
        assert [counted[block] for block in range(self.space.blocks)] == self._holders, (counted, self._holders)
        assert sorted(self._free) == [block for block, n in enumerate(self._holders) if not n], self._free
        for hold in holds:
            width = len(hold.blocks)
            assert hold.table[:width].tolist() == hold.blocks and (hold.table[width:] == self.space.null).all(), hold
            assert all(counted[block] == 1 for block in hold.blocks[hold.shared :]), "somebody may write a block that others read"
