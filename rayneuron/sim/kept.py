"""Blocks whose hashes a trace says. Those behind the hashes hold what nobody will ever ask for: they are kept as any, under no name."""

from __future__ import annotations

from collections.abc import Sequence

from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import Capacity
from rayneuron.engine.hold import Hold
from rayneuron.engine.kv_events import KvLog
from rayneuron.engine.registered import NAMELESS

_KEPT = 16  # batches of KV events: who listens is told of each as it comes


class TracedBlocks(Blocks):
    """The store of one engine of a fleet. `logs`: it keeps prefixes, and says so."""

    def __init__(self, capacity: Capacity, logs: bool) -> None:
        # a trace says which blocks are equal, not which begin alike
        super().__init__(capacity.space, KvLog(_KEPT) if logs else None, part=None)

    def fill(self, hold: Hold, count: int, hashes: Sequence[bytes]) -> None:
        """The first `count` blocks of a hold are full. `hashes`: of the first of all it will ever fill."""
        if self.log is None:
            return
        if hold.shared < len(hashes):
            self.settle(hold, hashes[:count], b"")
        hold.shared = max(hold.shared, count)

    def _shorten(self, hold: Hold, blocks: int) -> None:
        """As there; only now does it matter that blocks without a name are full."""
        known = self.registered.hashes
        known.update({block: NAMELESS for block in hold.blocks[: hold.shared] if block not in known})
        super()._shorten(hold, blocks)
