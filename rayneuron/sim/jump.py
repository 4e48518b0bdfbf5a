"""An engine of the fleet that skips ahead: while the same sequences decode, one step is as long as the next."""

from __future__ import annotations

from bisect import bisect_left
from math import ceil

from rayneuron.engine.sequence import Plan, Work
from rayneuron.sim.host import ExactHost, Gained


class JumpHost(ExactHost):
    """As `ExactHost` to the last token, in fewer calls: a leap ends with the first answer, the next bucket, or what comes between."""

    _leap: tuple[Plan, float, float, int] | None = None  # from when, how long a step is, how many steps
    _leaps = 0

    def _begin(self, plan: Plan, step_s: float) -> None:
        count = self._steps_alike(plan)
        if count == 1:
            super()._begin(plan, step_s)
            return
        self._leap = (plan, self.clock.now_s, step_s, count)
        self._land_after(count)

    def _steps_alike(self, plan: Plan) -> int:
        """Decode steps that will be as this one, unless somebody interrupts them."""
        scheduler = self.scheduler
        running, blocks = scheduler.running, scheduler.blocks
        if plan.tag != "decode" or len(plan.works) < len(running) or (scheduler.waiting and blocks.free_rows):
            return 1  # who waits for blocks may find some of its own registered meanwhile
        if any(s.generated == 0 for s in running):
            return 1  # when the first token came is asked of each
        length = max([s.computed for s in running])
        lengths = scheduler.capacity.lengths
        count = min(lengths[bisect_left(lengths, length)] - length + 1, min([s.max_tokens - s.generated for s in running]))
        size = scheduler.capacity.block
        short = sum([max(0, -(-(s.computed + count - 1) // size) - len(s.hold.blocks)) for s in running if s.hold is not None])
        if short > blocks.free and (short > blocks.free + len(blocks.cached) or self._finds_equals(count)):
            return 1  # somebody is preempted; or how many blocks are evicted hangs on when others come free
        return count

    def _finds_equals(self, count: int) -> bool:
        """Whether a block that is filled meanwhile may be there already, so that one of the two is given back."""
        filled: set[bytes] = set()
        for sequence in self.scheduler.running:
            hold, end = sequence.hold, (sequence.computed + count - 1) // self.scheduler.capacity.block
            if hold is not None and self.scheduler.caching:
                for digest in self.scheduler.hashes[sequence.order][hold.shared : end]:
                    if digest in filled or self.scheduler.knows(digest):
                        return True
                    filled.add(digest)
        return False

    def _land_after(self, count: int) -> None:
        assert self._leap is not None
        plan, began_s, step_s, _ = self._leap
        self._leap = (plan, began_s, step_s, count)
        self._leaps += 1
        self.clock.at(began_s + count * step_s, self._land, self._leaps)

    def _interrupt(self) -> None:
        if self._leap is None:
            super()._interrupt()
            return
        _, began_s, step_s, count = self._leap
        needed = max(1, ceil((self.clock.now_s - began_s) / step_s - 1e-9))
        if needed < count:
            self._land_after(needed)

    def _land(self, leap: int) -> None:
        if leap != self._leaps or not self.alive or self._leap is None:
            return
        plan, _, step_s, count = self._leap
        self._leap = None
        self.busy_s += count * step_s
        told = self._leapt(plan, count)
        self._turn()
        self._listener(self, told)

    def _leapt(self, plan: Plan, count: int) -> list[Gained]:
        """What so many steps of a plan gave: the first as a step does it, the others at once."""
        if count == 1:
            return self._commit(plan)
        scheduler = self.scheduler
        self.steps += count
        scheduler.landed(plan)
        more, at = [], []
        for work in plan.works:
            sequence, hold = work.sequence, work.sequence.hold
            if work.valid and hold is not None:
                start, generated = sequence.computed, sequence.generated
                sequence.ids += [1] * count
                grown = scheduler.blocks.extend(hold, start + count - 1)
                assert grown, "a leap was longer than there are blocks"
                sequence.run(start + count - 1)
                more.append(Work(sequence, start, count - 1))
                at.append(generated)
        scheduler.blocks.begin()
        scheduler.landed(Plan("decode", more))
        return [self._progress(work.sequence, generated, count) for work, generated in zip(more, at, strict=True)]
