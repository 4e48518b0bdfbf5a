"""An engine of the fleet that skips ahead: over the steps of a prompt that is alone, and of the same sequences while they decode."""

from __future__ import annotations

from math import ceil

from rayneuron.engine.pressure import pressure
from rayneuron.engine.sequence import Plan, Work
from rayneuron.news import Pressure
from rayneuron.sim.grouped import Grouped
from rayneuron.sim.host import ExactHost, Gained


class JumpHost(ExactHost):
    """As `ExactHost` to the last token, in fewer calls: a leap ends with the first answer, the next bucket, or what comes between."""

    scheduler: Grouped
    scheduler_class = Grouped
    _leap: tuple[float, float, int] | None = None  # from when, how long a step is, how many steps
    _leaps = 0
    _begun: Plan | None = None  # whose only work is the step under way of those in `_ahead`
    _ahead: list[tuple[int, int, float, float]] = []  # steps of a prompt: from where, how much, how long each is and when it ends

    def kill(self) -> list[Gained]:
        """It is gone; what its steps gave up to now is on its way."""
        self._advance()
        super().kill()
        if self._leap is not None:
            began_s, step_s, count = self._leap
            done = min(count, int((self.clock.now_s - began_s) / step_s + 1e-9))
            self.scheduler.steps += done
            self.busy_s += done * step_s
        self.scheduler.disband()
        return [gained for sequence in list(self._sequences.values()) if (gained := self._progress(sequence)).count]

    def pressure(self, seen: int) -> Pressure:
        """How busy it says it is."""
        self._advance()
        longest = self.scheduler.longest if self.scheduler.members else 0
        told = pressure(self.scheduler, self.costs, self._output, seen, self.accepting, longest)
        return told if self.slow == 1.0 else self._slowed(told)

    def _turn(self) -> None:
        scheduler = self.scheduler
        if self._unwanted:
            for sequence in [self._sequences[key] for key in self._unwanted if key in self._sequences]:
                scheduler.catch_up(sequence)
                self._forget(self._progress(sequence).key)
            self._unwanted.clear()
        if scheduler.prefills is not None:
            self._take()
        plan = scheduler.plan()
        self._running = plan is not None
        if plan is None:
            return
        if plan.works is not scheduler.together:
            scheduler.launch(plan, overlaps=False)
            if len(scheduler.running) == 1 and not scheduler.waiting:
                self._look_ahead(plan)
            else:
                self._begin(plan, self._step_s(plan))
            return
        self._leap = (self.clock.now_s, self._decode_s(len(scheduler.members), scheduler.longest), scheduler.alike())
        self._land_after(self._leap[2])

    def _look_ahead(self, plan: Plan) -> None:
        """Take all steps of a prompt in one that nobody else waits for or decodes beside."""
        (work,), end_s, most, slow = plan.works, self.clock.now_s, self.scheduler.capacity.chunk, self.slow
        start, end, step_ms = work.start, len(work.sequence.ids), self.costs.step_ms
        self._begun, self._ahead = plan, []
        ahead = self._ahead
        while not ahead or start < end - 1:  # what is left of one token is a decode
            count = end - start if end - start < most else most
            step_s = step_ms(count, start) * slow / 1e3
            end_s += step_s
            ahead.append((start, count, step_s, end_s))
            start += count
        self.busy_s += ahead[0][2]
        self._leaps += 1
        self.clock.at(end_s, self._reach, self._leaps)

    def _advance(self) -> None:
        """Let the step be under way of those ahead that would be."""
        if self._begun is None:
            return
        ahead, now_s, at = self._ahead, self.clock.now_s, 0
        while at < len(ahead) - 1 and ahead[at][3] < now_s:
            at += 1
        if at:
            self.busy_s += sum([step_s for _, _, step_s, _ in ahead[1 : at + 1]])
            self.steps += at
            self._ahead = ahead[at:]
            sequence, (start, count, _, _) = self._begun.works[0].sequence, ahead[at]
            self._begun.works = [Work.of(sequence, start, count)]
            self.scheduler.skip(sequence, start, start + count)

    def _reach(self, leap: int) -> None:
        if leap != self._leaps or not self.alive or self._begun is None:
            return
        self._advance()
        plan, self._begun, self._ahead = self._begun, None, []
        self._end(plan)

    def _land_after(self, count: int) -> None:
        assert self._leap is not None
        began_s, step_s, _ = self._leap
        self._leap = (began_s, step_s, count)
        self._leaps += 1
        self.clock.at(began_s + count * step_s, self._land, self._leaps)

    def interrupt(self) -> None:
        """Something is to be looked at when a step ends."""
        if self._begun is not None:
            self._advance()
            self.clock.at(self._ahead[0][3], self._end, self._begun)
            self._begun, self._ahead, self._leaps = None, [], self._leaps + 1
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
            if not sequence.had:
                self.cached_tokens += sequence.cached
            told.append(self._progress(sequence))
        self._turn()
        self._listener(self, told)
