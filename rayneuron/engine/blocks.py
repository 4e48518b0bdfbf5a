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
    """What one sequence holds: a row, and blocks in the order of its positions. `shared`: how many of the first nobody may write, since
    others read them too. `table`: the store's, int32 [rows, width]; line `row` has the blocks, null behind the last."""

    row: int
    blocks: list[int]
    table: NDArray[np.int32]
    shared: int = 0


class Blocks:
    """Owner of every row and block. The lowest free ones go first, so that rows stay dense and memory that was never used stays untouched.

    Invariant (`check`): free + held rows are all rows; a block is free, in limbo, or as many hold it as its count says. Limbo: what is
    freed while steps are under way, which may still read it, until they have ended.
    """

    def __init__(self, space: KvSpace) -> None:
        self.space = space
        self.limbo: dict[int, int] = {}  # block: the step it waits for
        self._rows = list(range(space.rows))
        self._free = list(range(space.blocks))
        self._holders = [0] * space.blocks
        self._copies: dict[int, int] = {}  # to: from, which is held until it has been copied
        self._begun = self._ended = 0
        self._table = np.full((space.rows, space.width(space.limit)), space.null, np.int32)

    @property
    def free_rows(self) -> int:
        """Rows nobody holds."""
        return len(self._rows)

    @property
    def used_tokens(self) -> int:
        """Positions in blocks that somebody holds."""
        return (self.space.blocks - len(self._free) - len(self.limbo)) * self.space.block

    @property
    def total_tokens(self) -> int:
        """Positions in all blocks."""
        return self.space.blocks * self.space.block

    def admit(self, tokens: int, like: Hold | None = None, known: int = 0) -> Hold | None:
        """A row with room for `tokens`, or None. Of the first `known` positions of `like` whole blocks are shared, the rest is copied."""
        shared = known // self.space.block if like is not None else 0
        if not self._rows or -(-tokens // self.space.block) - shared > len(self._free):
            return None
        row = heapq.heappop(self._rows)
        hold = Hold(row, list(like.blocks[:shared]) if like is not None else [], self._table, shared)
        for block in hold.blocks:
            self._holders[block] += 1
        self._table[row, :shared] = hold.blocks
        self.extend(hold, tokens)
        if like is not None:
            like.shared = max(like.shared, shared)
            if known % self.space.block:
                self._copies[hold.blocks[shared]] = like.blocks[shared]
                self._holders[like.blocks[shared]] += 1
        return hold

    def extend(self, hold: Hold, tokens: int) -> bool:
        """Make room for `tokens` positions; False, and nothing changed, where too few blocks are free."""
        have, need = len(hold.blocks), -(-tokens // self.space.block)
        if need <= have:
            return True
        if need - have > len(self._free):
            return False
        for at in range(have, need):
            block = heapq.heappop(self._free)
            self._holders[block] = 1
            hold.blocks.append(block)
            hold.table[hold.row, at] = block
        return True

    def release(self, hold: Hold) -> None:
        """Give a row and its blocks back; shared ones stay with those who still hold them."""
        for block in hold.blocks:
            if block in self._copies:
                self._drop(self._copies.pop(block))
            self._drop(block)
        hold.blocks.clear()
        hold.table[hold.row] = self.space.null
        heapq.heappush(self._rows, hold.row)

    def copies(self) -> list[tuple[int, int]]:
        """(from, to) of the copies that the next step begins with."""
        return [(source, target) for target, source in self._copies.items()]

    def begin(self) -> None:
        """A step has begun, with the copies there were."""
        self._begun += 1
        for source in self._copies.values():
            self._drop(source)
        self._copies.clear()

    def end(self) -> None:
        """The step that has been under way longest has ended."""
        self._ended += 1
        for block in [block for block, step in self.limbo.items() if step <= self._ended]:
            del self.limbo[block]
            heapq.heappush(self._free, block)

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if self._begun > self._ended:
            self.limbo[block] = self._begun
        else:
            heapq.heappush(self._free, block)

    def check(self, holds: Iterable[Hold]) -> None:
        """Raise AssertionError if the invariant is broken. `holds`: all there are."""
        holds = list(holds)
        counted = Counter(block for hold in holds for block in hold.blocks)
        counted.update(self._copies.values())
        assert sorted([*self._rows, *(hold.row for hold in holds)]) == list(range(self.space.rows)), self._rows
        assert [counted[block] for block in range(self.space.blocks)] == self._holders, (counted, self._holders)
        assert sorted([*self._free, *self.limbo]) == [block for block, n in enumerate(self._holders) if not n], self._free
        for hold in holds:
            width, line = len(hold.blocks), hold.table[hold.row]
            assert line[:width].tolist() == hold.blocks and (line[width:] == self.space.null).all(), hold
            written = [block for block in hold.blocks[hold.shared :] if block not in self._copies.values()]
            assert all(counted[block] == 1 for block in written), "somebody may write a block that others read"
