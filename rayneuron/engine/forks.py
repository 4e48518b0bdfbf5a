"""What the beams of a search hold: who goes on with it, who shares and copies it, and how all of it comes free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Ids
from operator import attrgetter

from rayneuron.engine.adapters import Adapters
from rayneuron.engine.beams import Beam, Branch, Search, forked
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.commit import ReadsLogits
from rayneuron.engine.hold import Hold
from rayneuron.engine.sequence import Sequence, keep_end
from rayneuron.types import TokenDelta, TokenLogprobs

_RANK = attrgetter("rank")


class Forks:
    """Sequences of the scheduler's `running` leave it here, and new beams come into it. `pending`: searches that lack room for some."""

    def __init__(self, blocks: Blocks, adapters: Adapters, running: list[Sequence]) -> None:
        self._blocks, self._adapters, self._running = blocks, adapters, running
        self.pending: list[Search] = []

    def release(self, sequence: Sequence) -> None:
        """It runs no more, and holds nothing."""
        assert sequence.hold is not None
        keep_end(sequence, self._blocks)
        self._blocks.release(sequence.hold)
        self._adapters.leave(sequence)
        sequence.hold = None
        self._running.remove(sequence)

    def seats(self, search: Search) -> bool:
        """Whether there are rows for all that a search may come to, and more blocks than those with which it has been preempted."""
        blocks = self._blocks
        room = blocks.space.blocks - blocks.used - len(blocks.limbo)
        return blocks.free_rows >= search.width and room >= search.needs

    def reserve(self, search: Search) -> None:
        """Take those rows, once its leader has one."""
        search.spare = [self._row() for _ in range(search.width - 1)]

    def advance(self, search: Search, host: ReadsLogits, now: float) -> list[TokenDelta]:
        """Go on where every beam's step has ended, or answer."""
        if not search.complete:
            return []
        stamps = search.leader.stamps
        stamps.prefill_done = stamps.first_token = stamps.first_token or now
        going = search.decide(host)
        if not going:
            return search.answer()
        self._go_on(search, going, [search.shown(at, token, host) for _, at, token in going])
        return []

    def _go_on(self, search: Search, going: Ids[Branch], logprobs: Ids[list[TokenLogprobs] | None]) -> None:
        """These are a search's beams from now on. The first child of a beam goes on with what that holds; `split` makes the others."""
        parents = [search.beams[at].sequence for _, at, _ in going]
        for sequence in [beam.sequence for beam in search.beams if beam.sequence not in parents]:
            self.release(sequence)
            search.spare.append(self._row())
        search.beams = []
        for parent, (score, _, _), shown in zip(parents, going, logprobs, strict=True):
            child = parent
            if any(beam.sequence is parent for beam in search.beams):
                child = forked(parent)
                search.sources.append((child, parent))
            search.beams.append(Beam(child, score, shown))
        for beam, (_, _, token) in zip(search.beams, going, strict=True):
            beam.sequence.append(token)
        search.told = {}
        if search.sources:
            self.pending.append(search)

    def split(self, search: Search) -> bool:
        """Give new beams the blocks of those they came from, and a copy of the one they go on in; False where the room ends before."""
        while search.sources:
            child, parent = search.sources[-1]
            self._blocks.release(search.spare.pop())
            child.hold = self._blocks.admit(child.computed + 1, (), parent.hold, child.computed)
            if child.hold is None:
                search.spare.append(self._row())
                return False
            search.sources.pop()
            self._adapters.seat(child)
            insort(self._running, child, key=_RANK)
        if search in self.pending:
            self.pending.remove(search)
        return True

    def disband(self, search: Search) -> Sequence:
        """Free all that a search holds; its leader, as it was before the first token."""
        leader = search.leader
        held = {block for beam in search.beams if beam.sequence.hold is not None for block in beam.sequence.hold.blocks}
        search.needs = min(len(held) + 1, self._blocks.space.blocks)
        for beam in search.beams:
            beam.sequence.epoch += 1
            if beam.sequence.hold is not None:
                self.release(beam.sequence)
        for hold in search.spare:
            self._blocks.release(hold)
        if search in self.pending:
            self.pending.remove(search)
        del leader.ids[leader.prompt_len :], leader.hashes[leader.prompt_len // self._blocks.space.block :]
        leader.edits = None if leader.edits is None else leader.edits.of(leader)
        search.begin()
        return leader

    def _row(self) -> Hold:
        hold = self._blocks.admit(0)
        assert hold is not None
        return hold
