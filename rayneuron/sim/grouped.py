"""Sequences of an engine that decode together: their steps are counted, and each is looked at where something becomes of it."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any

from rayneuron.engine.buckets import Capacity
from rayneuron.engine.sequence import Plan, Work
from rayneuron.engine.sequence import Sequence as Running
from rayneuron.policies.chunks import Chunks
from rayneuron.sim.host import Simulated, TracedScheduler

_ORDER = attrgetter("order")


class _Member:
    """One that decodes: what its sequence says was so after `since` steps of the group."""

    __slots__ = ("sequence", "since")

    def __init__(self, sequence: Simulated, since: int) -> None:
        self.sequence = sequence
        self.since = since


class Grouped(TracedScheduler):
    """Those who decode take their steps together, and only counted: a sequence is looked at where it fills a block, needs one or ends.

    `due`: what happens at which step to whom, in the order in which the scheduler would do it: twice the steps that have ended, and one
    more where it happens as the next is planned.
    """

    def __init__(self, capacity: Capacity, model: str | None, chunks: Chunks | None) -> None:
        super().__init__(capacity, model, chunks)
        self.steps = 0  # of the group
        self.together: list[Work] = []  # stands in a plan for all who decode
        self.members: dict[Running, _Member] = {}
        self.fresh: list[_Member] = []  # whose first token is still to come
        self.lead = 0  # of the furthest: computed positions beyond the group's steps
        self._due: list[tuple[int, int, _Member]] = []
        self._ends: list[tuple[int, int, _Member]] = []

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        if self.running or self.waiting:
            return super().plan()
        self._prefilled_last = False
        return None

    def skip(self, sequence: Running, settled: int, under_way: int) -> None:
        """Steps of a prompt have ended up to a position, and the next is under way."""
        sequence.settled = settled
        sequence.run(under_way)
        if sequence.hold is not None:
            self._settle(sequence, sequence.hold)

    def _grow(self) -> list[Work]:
        decoding = [s for s in self.running if s.phase == "decode"]
        if len(decoding) != len(self.members):
            self._join(decoding)
        if not self._pass(2 * self.steps + 1):
            self.disband()  # somebody is preempted
            return super()._grow()
        self.together = [Work.of(decoding[0], decoding[0].computed, 1)] if decoding else []
        return self.together

    def remove(self, sequence: Running) -> None:
        """Forget it, in the group and elsewhere."""
        member = self.members.pop(sequence, None)
        if member is not None and self.members and sequence.computed - member.since == self.lead:
            self.lead = max([s.computed - m.since for s, m in self.members.items()])
        super().remove(sequence)

    def alike(self) -> int:
        """The steps that will be as the next one, unless somebody interrupts them."""
        running, blocks, size = self.running, self.blocks, self.capacity.block
        if self.fresh or len(self.members) < len(running) or (self.waiting and blocks.free_rows):
            return 1  # who waits for blocks may find some of its own registered meanwhile
        ends, lengths, longest = self._ends, self.capacity.lengths, self.longest
        while self.members.get(ends[0][2].sequence) is not ends[0][2]:
            heappop(ends)
        count = min(lengths[bisect_left(lengths, longest)] - longest + 1, ends[0][0] - self.steps)
        room = blocks.free + blocks.cached.count
        if len(running) * (count // size + 1) > room:
            ends_at = [(s.hold, s.computed + self.steps - m.since + count) for s, m in self.members.items()]
            if sum([max(0, -(-end // size) - len(hold.blocks)) for hold, end in ends_at if hold is not None]) > room:
                return 1
        return count

    @property
    def longest(self) -> int:
        """Positions that the next step attends."""
        return self.lead + self.steps + 1

    def leap(self, count: int) -> list[Simulated]:
        """So many steps have ended: who has its first token, or its last one."""
        self.steps += count
        passed = self._pass(2 * self.steps, self._apart())
        assert passed, "a leap was longer than there are blocks"
        members, ends = self.members, self._ends
        told: list[Simulated] = []
        if self.fresh:
            told, self.fresh = [m.sequence for m in self.fresh if m.sequence in members], []
        while ends and ends[0][0] <= self.steps:
            member = heappop(ends)[2]
            if members.get(member.sequence) is member and member.sequence not in told:
                told.append(member.sequence)
        for sequence in told:
            self._catch_up(members[sequence])
        if (log := self.blocks.log) is not None and log.open:
            log.flush()
        return sorted(told, key=_ORDER) if len(told) > 1 else told

    def catch_up(self, sequence: Running) -> None:
        """Let one say itself what it has."""
        member = self.members.get(sequence)
        if member is not None:
            self._catch_up(member)

    def disband(self) -> list[Running]:
        """From now on each says for itself."""
        found = list(self.members)
        for member in self.members.values():
            self._catch_up(member)
        self.members.clear()
        self._due.clear()
        self._ends.clear()
        self.fresh.clear()
        return found

    def _catch_up(self, member: _Member) -> None:
        sequence, count = member.sequence, self.steps - member.since
        if count:
            sequence.ids.extend(bytes(count))
            sequence.computed = sequence.settled = sequence.computed + count
            member.since = self.steps

    def _join(self, decoding: list[Any]) -> None:
        size, steps, members = self.capacity.block, self.steps, self.members
        for sequence in decoding:
            if sequence not in members:
                computed, order, generated = sequence.computed, sequence.order, sequence.generated
                if not members or computed - steps > self.lead:
                    self.lead = computed - steps
                members[sequence] = member = _Member(sequence, steps)
                needs = computed >= len(sequence.hold.blocks) * size
                heappush(self._due, (2 * steps + 1 if needs else 2 * (steps + size - computed % size), order, member))
                heappush(self._ends, (steps + sequence.max_tokens - generated, order, member))
                if not generated:
                    self.fresh.append(member)

    def _apart(self) -> bool:
        """Whether nobody has filled a block that there was already, or that another has filled too: then the order tells nothing."""
        filled: list[bytes] = []
        until = 2 * self.steps
        for when, _, member in self._due if self.caching else ():
            names, hold = member.sequence.names, member.sequence.hold
            if when > until or hold is None or hold.shared >= len(names) or self.members.get(member.sequence) is not member:
                continue
            digest = names[hold.shared]
            if digest in filled or self.blocks.registered.get(digest) is not None:
                return False
            filled.append(digest)
        return True

    def _pass(self, until: int, apart: bool = False) -> bool:
        """What happens up to then: blocks that are full are registered, those that are needed taken; False where there is none for one.
        `apart`: to each at once."""
        due, size, blocks = self._due, self.capacity.block, self.blocks
        while due and due[0][0] <= until:
            when, order, member = due[0]
            sequence = member.sequence
            if self.members.get(sequence) is not member or sequence.hold is None:
                heappop(due)
                continue
            at = until if apart else when
            hold, computed = sequence.hold, sequence.computed + (at >> 1) - member.since
            if not blocks.extend(hold, computed + (at & 1)):
                return False
            if self.caching and computed // size > hold.shared:
                blocks.fill(hold, computed // size, sequence.names)
            needs = computed >= len(hold.blocks) * size
            heapreplace(due, (at + 1 if needs else (at & ~1) + 2 * (size - computed % size), order, member))
        return True
