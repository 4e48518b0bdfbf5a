"""How far a draft model has read each sequence: it reads a text only where its drafts are wanted, and then in chunks, as a prompt is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rayneuron.engine.buckets import Capacity, pack_prefill
from rayneuron.engine.hold import Hold
from rayneuron.engine.sequence import Sequence, Work
from rayneuron.policies.chunks import Chunks

MOST = 64  # drafts of a step, which a row may have beyond what comes true


@dataclass(slots=True)
class Reached:
    """The first `count` positions of what a sequence holds have the draft model's KV."""

    hold: Hold | None = None
    count: int = 0


class Readings:
    """The draft model's KV lies in the blocks of the model's own, and is written by steps that draft or fill alone. `_known` remembers of
    which content each block was filled last, so that whoever shares a prefix need not read it again. No step waits for it longer than
    for a chunk of a prompt (`chunks`; None: any)."""

    def __init__(self, capacity: Capacity, chunks: Chunks | None) -> None:
        self._capacity, self._chunks = capacity, chunks
        self._known: dict[int, bytes] = {}

    def behind(self, sequence: Sequence, read: Reached, start: int) -> int:
        """How many of the first `start` ids are still to be read before it may draft: one that is missing it reads with the next."""
        if read.hold is not sequence.hold:
            read.hold = sequence.hold
            read.count = min(self._there(sequence), start)
        return 0 if read.count >= start - 1 else start - read.count

    def fill(self, wanted: Iterable[tuple[Sequence, Reached, int]]) -> list[Work]:
        """Chunks of some of those who are behind, (sequence, read, until): what one step reads. They count as read."""
        queue = list(wanted)
        if not queue:
            return []
        most = self._capacity.chunk if self._chunks is None else self._chunks.most(max(read.count for _, read, _ in queue))
        counts = pack_prefill(self._capacity, [until - read.count for _, read, until in queue], most)
        works = []
        for (sequence, read, _), count in zip(queue, counts, strict=False):
            works.append(Work.of(sequence, read.count, count))
            self.reached(sequence, read, read.count + count)
        return works

    def reached(self, sequence: Sequence, read: Reached, count: int) -> None:
        """A step reads up to there; what it writes beyond is written anew."""
        size, hold = self._capacity.block, read.hold
        if hold is None or hold is not sequence.hold:
            return
        for i in range(read.count // size, min(len(hold.blocks), (count + MOST) // size + 1)):
            if (i + 1) * size <= count and i < len(sequence.hashes):
                self._known[hold.blocks[i]] = sequence.hashes[i]
            else:
                self._known.pop(hold.blocks[i], None)
        read.count = count

    def _there(self, sequence: Sequence) -> int:
        """What others have had read: of the blocks of a known prefix, or of the choice that led."""
        hold, leader, size = sequence.hold, sequence.leader, self._capacity.block
        if hold is None:
            return 0
        there = 0
        for block, digest in zip(hold.blocks, sequence.hashes, strict=False):
            if self._known.get(block) != digest:
                break
            there += size
        if leader is not None and leader.drafter is not None and leader.hold is leader.drafter.read.hold and leader.hold is not None:
            alike = next((i for i, pair in enumerate(zip(hold.blocks, leader.hold.blocks, strict=False)) if pair[0] != pair[1]), None)
            shared = min(len(hold.blocks), len(leader.hold.blocks)) if alike is None else alike
            there = max(there, min(leader.drafter.read.count, shared * size))
        return there
