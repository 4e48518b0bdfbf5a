"""An engine of the fleet that skips ahead: while the same sequences decode, one step is as long as the next."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush, heapreplace
from math import ceil
from operator import attrgetter

from rayneuron.engine.buckets import Capacity
from rayneuron.engine.pressure import pressure
from rayneuron.engine.sequence import Sequence as Running
from rayneuron.engine.sequence import Work
from rayneuron.news import Pressure
from rayneuron.policies.chunks import Chunks
from rayneuron.sim.host import ExactHost, Gained, TracedScheduler

_ORDER = attrgetter("order")


class _Member:
    """One that decodes: what its sequence says was so after `since` steps of the group."""

    __slots__ = ("sequence", "since")

    def __init__(self, sequence: Running, since: int) -> None:
        self.sequence = sequence
        self.since = since


class _Grouped(TracedScheduler):
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

    def _grow(self) -> list[Work]:
        decoding = [s for s in self.running if s.phase == "decode"]
        if len(decoding) != len(self.members):
            self._join(decoding)
        if not self._pass(2 * self.steps + 1):
            self.disband()  # somebody is preempted
            return super()._grow()
        self.together = [Work.of(one, one.computed, 1) for one in decoding[:1]]
        return self.together

    def remove(self, sequence: Running) -> None:
        """Forget it, in the group and elsewhere."""
        member = self.members.pop(sequence, None)
        if member is not None and sequence.computed - member.since == self.lead:
            self._lead()
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
        room = blocks.free + len(blocks.cached)
        if len(running) * (count // size + 1) > room:
            ends_at = [(s.hold, s.computed + self.steps - m.since + count) for s, m in self.members.items()]
            if sum([max(0, -(-end // size) - len(hold.blocks)) for hold, end in ends_at if hold is not None]) > room:
                return 1
        return count

    @property
    def longest(self) -> int:
        """Positions that the next step attends."""
        return self.lead + self.steps + 1

    def leap(self, count: int) -> list[Running]:
        """So many steps have ended: who has its first token, or its last one."""
        self.steps += count
        passed = self._pass(2 * self.steps)
        assert passed, "a leap was longer than there are blocks"
        told, self.fresh = [m for m in self.fresh if m.sequence in self.members], []
        while self._ends and self._ends[0][0] <= self.steps:
            member = heappop(self._ends)[2]
            if self.members.get(member.sequence) is member and member not in told:
                told.append(member)
        for member in told:
            self._catch_up(member)
        if self.blocks.log is not None and self.blocks.log.open:
            self.blocks.log.flush()
        return sorted([member.sequence for member in told], key=_ORDER)

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
            sequence.ids += bytes(count)
            sequence.run(sequence.computed + count)
            sequence.settled, member.since = sequence.computed, self.steps

    def _join(self, decoding: list[Running]) -> None:
        size = self.capacity.block
        for sequence in decoding:
            if sequence not in self.members:
                self.members[sequence] = member = _Member(sequence, self.steps)
                computed, order = sequence.computed, sequence.order
                assert sequence.hold is not None
                if computed >= len(sequence.hold.blocks) * size:
                    heappush(self._due, (2 * self.steps + 1, order, member))
                else:
                    heappush(self._due, (2 * (self.steps + (computed // size + 1) * size - computed), order, member))
                heappush(self._ends, (self.steps + sequence.max_tokens - sequence.generated, order, member))
                if not sequence.generated:
                    self.fresh.append(member)
        self._lead()

    def _lead(self) -> None:
        self.lead = max([s.computed - m.since for s, m in self.members.items()], default=0)

    def _pass(self, until: int) -> bool:
        """What happens up to then: blocks that are full are registered, those that are needed taken; False where there is none for one."""
        due, size, blocks = self._due, self.capacity.block, self.blocks
        while due and due[0][0] <= until:
            when, order, member = due[0]
            sequence = member.sequence
            if self.members.get(sequence) is not member or sequence.hold is None:
                heappop(due)
                continue
            hold, computed = sequence.hold, sequence.computed + (when >> 1) - member.since
            if when & 1:
                if not blocks.extend(hold, computed + 1):
                    return False
                heapreplace(due, (when - 1 + 2 * size, order, member))
                continue
            if self.caching and computed // size > hold.shared:
                blocks.settle(hold, self.hashes[order][: computed // size], b"")
            needs = computed >= len(hold.blocks) * size
            heapreplace(due, (when + 1 if needs else when + 2 * size, order, member))
        return True


class JumpHost(ExactHost):
    """As `ExactHost` to the last token, in fewer calls: a leap ends with the first answer, the next bucket, or what comes between."""

    scheduler: _Grouped
    scheduler_class = _Grouped
    _leap: tuple[float, float, int] | None = None  # from when, how long a step is, how many steps
    _leaps = 0

    def kill(self) -> list[Gained]:
        """It is gone; what its steps gave up to now is on its way."""
        super().kill()
        if self._leap is None:
            return []
        began_s, step_s, count = self._leap
        done = min(count, int((self.clock.now_s - began_s) / step_s + 1e-9))
        self.scheduler.steps += done
        self.busy_s += done * step_s
        return [self._progress(sequence) for sequence in self.scheduler.disband()]

    def pressure(self, seen: int) -> Pressure:
        """How busy it says it is."""
        longest = self.scheduler.longest if self.scheduler.members else 0
        return pressure(self.scheduler, self.costs, self._output, seen, self.accepting, longest)

    def _turn(self) -> None:
        scheduler = self.scheduler
        for sequence in [self._sequences[key] for key in self._unwanted if key in self._sequences]:
            scheduler.catch_up(sequence)
            self._forget(self._progress(sequence).key)
        self._unwanted.clear()
        self._take()
        plan = scheduler.plan()
        self._running = plan is not None
        if plan is None:
            return
        if plan.works is not scheduler.together:
            scheduler.launch(plan, overlaps=False)
            self._begin(plan, self._step_s(plan))
            return
        self._leap = (self.clock.now_s, self._decode_s(len(scheduler.members), scheduler.longest), scheduler.alike())
        self._land_after(self._leap[2])

    def _land_after(self, count: int) -> None:
        assert self._leap is not None
        began_s, step_s, _ = self._leap
        self._leap = (began_s, step_s, count)
        self._leaps += 1
        self.clock.at(began_s + count * step_s, self._land, self._leaps)

    def interrupt(self) -> None:
        """Something is to be looked at when a step ends."""
        if self._leap is None:
            super().interrupt()
            return
        began_s, step_s, count = self._leap
        needed = max(1, ceil((self.clock.now_s - began_s) / step_s - 1e-9))
        if needed < count:
            self._land_after(needed)

    def _land(self, leap: int) -> None:
        if leap != self._leaps or not self.alive or self._leap is None:
            return
        _, step_s, count = self._leap
        self._leap = None
        self.busy_s += count * step_s
        self.steps += count
        told = []
        for sequence in self.scheduler.leap(count):
            if not self._had[sequence.order]:
                self.cached_tokens += sequence.cached
            told.append(self._progress(sequence))
        self._turn()
        self._listener(self, told)
