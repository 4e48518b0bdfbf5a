"""What the beams of a group hold: who goes on with it, who shares and copies it, and how all of it comes free."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Ids
from operator import attrgetter

from rayneuron.engine.adapters import Adapters
from rayneuron.engine.beams import Beam, Candidate, Group, forked
from rayneuron.engine.blocks import Blocks, Hold
from rayneuron.engine.commit import ReadsLogits
from rayneuron.engine.sequence import Sequence
from rayneuron.types import TokenDelta, TokenLogprobs

_RANK = attrgetter("rank")


class Forks:
    """Sequences of the scheduler's `running` leave it here, and new beams come into it. `pending`: groups that lack room for some."""

    def __init__(self, blocks: Blocks, adapters: Adapters, running: list[Sequence]) -> None:
        self._blocks, self._adapters, self._running = blocks, adapters, running
        self.pending: list[Group] = []

    def release(self, sequence: Sequence) -> None:
        """It runs no more, and holds nothing."""
        assert sequence.hold is not None
        self._blocks.release(sequence.hold)
        self._adapters.leave(sequence)
        sequence.hold = None
        self._running.remove(sequence)

    def reserve(self, group: Group) -> None:
        """Rows for all that a group may come to, once its leader has one."""
        group.spare = [self._row() for _ in range(group.width - 1)]

    def advance(self, group: Group, host: ReadsLogits, now: float) -> list[TokenDelta]:
        """Go on where every beam's step has ended, or answer."""
        if not group.complete:
            return []
        stamps = group.leader.stamps
        stamps.prefill_done = stamps.first_token = stamps.first_token or now
        going = group.decide(host)
        if not going:
            return group.answer()
        self._regroup(group, going, [group.shown(at, token, host) for _, at, token in going])
        return []

    def _regroup(self, group: Group, going: Ids[Candidate], logprobs: Ids[list[TokenLogprobs] | None]) -> None:
        """These are a group's beams from now on. The first child of a beam goes on with what that holds; `split` makes the others."""
        parents = [group.beams[at].sequence for _, at, _ in going]
        for sequence in [beam.sequence for beam in group.beams if beam.sequence not in parents]:
            self.release(sequence)
            group.spare.append(self._row())
        group.beams = []
        for parent, (score, _, _), shown in zip(parents, going, logprobs, strict=True):
            child = parent
            if any(beam.sequence is parent for beam in group.beams):
                child = forked(parent)
                group.sources.append((child, parent))
            group.beams.append(Beam(child, score, shown))
        for beam, (_, _, token) in zip(group.beams, going, strict=True):
            beam.sequence.append(token)
        group.told = {}
        if group.sources:
            self.pending.append(group)

    def split(self, group: Group) -> bool:
        """Give new beams the blocks of those they came from, and a copy of the one they go on in; False where the room ends before."""
        while group.sources:
            child, parent = group.sources[-1]
            self._blocks.release(group.spare.pop())
            child.hold = self._blocks.admit(child.computed + 1, (), parent.hold, child.computed)
            if child.hold is None:
                group.spare.append(self._row())
                return False
            group.sources.pop()
            self._adapters.seat(child)
            insort(self._running, child, key=_RANK)
        if group in self.pending:
            self.pending.remove(group)
        return True

    def disband(self, group: Group) -> Sequence:
        """Free all that a group holds; its leader, as it was before the first token."""
        leader = group.leader
        for beam in group.beams:
            beam.sequence.epoch += 1
            if beam.sequence.hold is not None:
                self.release(beam.sequence)
        for hold in group.spare:
            self._blocks.release(hold)
        if group in self.pending:
            self.pending.remove(group)
        del leader.ids[leader.prompt_len :], leader.hashes[leader.prompt_len // self._blocks.space.block :]
        leader.edits = None if leader.edits is None else leader.edits.of(leader)
        group.begin()
        return leader

    def _row(self) -> Hold:
        hold = self._blocks.admit(0)
        assert hold is not None
        return hold
