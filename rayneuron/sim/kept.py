"""Blocks whose hashes a trace says. Those behind the hashes, which nobody will ever ask for, are kept as any, and not registered."""

from __future__ import annotations

from collections.abc import Sequence

from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import Capacity
from rayneuron.engine.hold import Hold
from rayneuron.engine.kv_events import KvLog

_KEPT = 16  # batches of KV events: who listens is told of each as it comes


class TracedBlocks(Blocks):
    """The store of one engine of a fleet. `logs`: it keeps prefixes, and says so."""

    def __init__(self, capacity: Capacity, logs: bool) -> None:
        # a trace says which blocks are equal, not which begin alike
        super().__init__(capacity.space, KvLog(_KEPT) if logs else None, part=None)
        self._full: set[int] = set()  # of those that are being given back

    def fill(self, hold: Hold, count: int, hashes: Sequence[bytes]) -> None:
        """The first `count` blocks of a hold are full. `hashes`: of the first of all it will ever fill."""
        if self.log is None:
            return
        if hold.shared < len(hashes):
            self.settle(hold, hashes[:count], b"")
        if hold.shared < count:
            hold.shared = count

    def _shorten(self, hold: Hold, blocks: int) -> None:
        self._full.update(hold.blocks[: hold.shared])  # only now does it matter
        super()._shorten(hold, blocks)

    def _rest(self, blocks: list[int]) -> None:
        full = self._full
        fresh = [block for block in blocks if block not in full]
        kept = [block for block in blocks if block in full] if fresh else blocks
        self.cached.add(kept)
        full.difference_update(kept)
        for block in fresh:
            self._free.give(block)

    def _check_cached(self) -> None:
        assert self._full.isdisjoint([*self.cached, *self._free])
