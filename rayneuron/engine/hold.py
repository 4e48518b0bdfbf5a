"""What one sequence holds of the KV store: a row and blocks; the line of the table that says so to the device is laid when a step is."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray


class Hold(Struct, eq=False):
    """A row, blocks in the order of its positions, and the `slot` of its adapter in the device.

    `shared`: how many of the first nobody may write, since others read them or may: with hashes, those that are registered. `known`:
    positions whose KV was there at admission. `table`: the store's, int32 [rows, width]; line `row` has the first `laid` blocks, null
    behind them. `age`: resets of the store before it was admitted; what has been forgotten since must not be built upon. `changes` of its
    blocks since.
    """

    row: int
    blocks: list[int]
    table: NDArray[np.int32]
    age: int
    shared: int = 0
    known: int = 0
    slot: int = -1
    changes: int = 0
    laid: int = 0

    def swap(self, at: int, block: int) -> None:
        """Hold another block at a place."""
        self.blocks[at] = block
        self.changes += 1
        if at < self.laid:
            self.table[self.row, at] = block

    def lay(self) -> None:
        """Have all blocks in the table, as who packs a step reads them there."""
        if self.laid < len(self.blocks):
            self.table[self.row, self.laid : len(self.blocks)] = self.blocks[self.laid :]
            self.laid = len(self.blocks)

    def lift(self, null: int) -> None:
        """Have none there: the row is to be another's."""
        if self.laid:
            self.table[self.row, : self.laid], self.laid = null, 0
