"""One engine of the fleet, exact: the real scheduler, blocks and shapes, with times instead of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rayneuron.devices.base import LIKELIEST, Shape
from rayneuron.engine.buckets import Capacity, prefill_shape
from rayneuron.engine.hold import Hold
from rayneuron.engine.pressure import pressure
from rayneuron.engine.remote import First, Loan
from rayneuron.engine.scheduler import Scheduler
from rayneuron.engine.sequence import Plan
from rayneuron.engine.sequence import Sequence as Running
from rayneuron.news import KvNews, Pressure
from rayneuron.policies.chunks import Chunks, fit
from rayneuron.policies.cost import Costs, moved
from rayneuron.policies.step_times import prefill_grid
from rayneuron.sim.clock import Clock
from rayneuron.sim.kept import TracedBlocks
from rayneuron.types import Request, SamplingParams

_REQUEST = Request(id="", prompt_ids=[], params=SamplingParams(max_tokens=None, temperature=0.0))


class Simulated(Running, eq=False):
    """One of a fleet, under the `key` its gateway knows it by. `had`: output tokens that the listener knows of; `names`: hashes of the
    first blocks it will ever fill."""

    key: int = 0
    had: int = 0
    names: Sequence[bytes] = ()


_BLANK: Any = Simulated(_REQUEST, 0, [], 0, 0, 0)  # what all have in common


class Gained(Struct, frozen=True):
    """What steps gave a sequence: `count` tokens behind `at`, the last at the time of the call; `ended`: its answer is whole."""

    key: int
    at: int
    count: int
    ended: bool


class TracedScheduler(Scheduler):
    """The real one; what blocks hold is said by the trace, not by ids that nobody has."""

    blocks: TracedBlocks

    def __init__(self, capacity: Capacity, model: str | None, chunks: Chunks | None) -> None:
        super().__init__(capacity, model, chunks, blocks=TracedBlocks(capacity, model is not None))

    def _hashes(self, sequence: Any) -> list[bytes]:
        hashes: list[bytes] = sequence.hashes
        have, names = len(hashes), sequence.names
        if have < len(names) and (need := len(sequence.ids) // self.capacity.block) > have:
            hashes += names[have:need]
        return hashes

    def _settle(self, sequence: Running, hold: Hold) -> None:
        self.blocks.fill(hold, sequence.settled // self.capacity.block, self._hashes(sequence))

    def _root(self, sequence: Running) -> bytes:
        return b""


class ExactHost:
    """Takes sequences, and tells `listener` at the end of every step what they got."""

    scheduler_class: type[TracedScheduler] = TracedScheduler

    def __init__(
        self,
        clock: Clock,
        capacity: Capacity,
        costs: Costs,
        listener: Callable[[ExactHost, list[Gained]], None],
        caching: bool = False,
    ) -> None:
        profile = costs.profile
        self.clock = clock
        self.scheduler = self.scheduler_class(capacity, "simulated" if caching else None, fit(profile))
        self.costs = costs
        self.alive = self.accepting = True
        self.steps = self.tokens = self.cached_tokens = 0
        self.busy_s = 0.0
        self.slow = 1.0  # steps take so many times as long
        self._listener = listener
        self._prefill = prefill_grid(profile)
        self._known: dict[Shape, float] = {}
        self._sequences: dict[int, Simulated] = {}  # by key
        self._orders = 0
        self._running = False
        self._unwanted: list[int] = []
        self._output = profile.output_tokens
        self._told = (0, 0)  # of what others know

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self._sequences

    @property
    def sequences(self) -> int:
        """How many it has, with those that wait."""
        return len(self._sequences)

    def submit(self, key: int, prompt: int, output: int, hashes: Sequence[bytes] = (), done: int = 0, loan: Loan | None = None) -> None:
        """A prompt that will be answered with so many tokens, of which `done` were generated elsewhere. hashes: of the first blocks of
        both, and nobody asks for those behind them. `loan`: it is computed for another engine."""
        self._orders = order = self._orders + 1
        sequence = _BLANK.__copy__()
        sequence.ids, sequence.hashes = bytearray(prompt + done), []  # ids are only counted
        sequence.prompt_len, sequence.max_tokens, sequence.loan = prompt, output, loan
        sequence.order, sequence.rank = order, (0, order)
        sequence.key, sequence.had, sequence.names = key, done, hashes
        self._sequences[key] = sequence
        self.scheduler.add(sequence)
        self.interrupt()

    def cancel(self, key: int) -> None:
        """Nobody wants it any more; it ends with the step under way."""
        if key in self._sequences:
            self._unwanted.append(key)
            self.interrupt()

    def prompt(self, asked: str) -> int:
        """Tokens of the prompt that the scheduler asks others for under this key."""
        order = int(asked.rpartition("/")[2])
        return next(sequence.prompt_len for sequence in self._sequences.values() if sequence.order == order)

    def unpin(self, ticket: bytes) -> None:
        """What it has computed for another engine is there."""
        self.scheduler.blocks.unpin(ticket)
        self.interrupt()

    def kill(self) -> list[Gained]:
        """It is gone; what steps that had ended gave, and nobody was told yet."""
        self.alive = False
        return []

    def pressure(self, seen: int) -> Pressure:
        """How busy it says it is."""
        told = pressure(self.scheduler, self.costs, self._output, seen, self.accepting)
        return told if self.slow == 1.0 else self._slowed(told)

    def _slowed(self, told: Pressure) -> Pressure:
        """By the times its steps take, which a real engine measures all the time."""
        slow = self.slow
        return replace(told, backlog_ms=slow * told.backlog_ms, slot_ms=slow * told.slot_ms, step_ms=slow * told.step_ms)

    def pace(self, times: float) -> None:
        """From the next step on they take so many times as long as the profile says."""
        self.slow = times
        if self.alive:
            self.interrupt()

    def news(self) -> KvNews | None:
        """What prefixes it has had or lost since it was asked last."""
        log = self.scheduler.blocks.log
        if log is None or (not log.open and self._told == (log.epoch, log.number)):
            return None
        told = self._told if self._told[0] == log.epoch else (log.epoch, 0)
        news = self.scheduler.blocks.news(*told)
        assert news is not None
        self._told = (news.epoch, news.number)
        return news

    def everything(self) -> KvNews:
        """All prefixes it has."""
        news = self.scheduler.blocks.news()
        assert news is not None
        return news

    def interrupt(self) -> None:
        """Something is to be looked at when a step ends."""
        if not self._running:
            self._turn()

    def _turn(self) -> None:
        """Between two steps."""
        for key in self._unwanted:
            self._forget(key)
        self._unwanted.clear()
        self._take()
        plan = self.scheduler.plan()
        self._running = plan is not None
        if plan is not None:
            self.scheduler.launch(plan, overlaps=False)
            self._begin(plan, self._step_s(plan))

    def _take(self) -> None:
        """What others have computed."""
        prefills, told = self.scheduler.prefills, list[Gained]()
        for event in prefills.take() if prefills is not None else ():
            if not isinstance(event, First):
                self.scheduler.arrived(event.key, True)
            elif (waits := self.scheduler.remote[event.key][1]) is not None:
                waits.ids.append(1)
                told.append(self._progress(waits))
        if told:
            self._listener(self, told)

    def _begin(self, plan: Plan, step_s: float) -> None:
        self.busy_s += step_s
        self.clock.at(self.clock.now_s + step_s, self._end, plan)

    def _end(self, plan: Plan) -> None:
        if self.alive:
            told = self._commit(plan)
            self._turn()
            self._listener(self, told)

    def _commit(self, plan: Plan) -> list[Gained]:
        """A step has ended: `engine.sequence.advance` without logits."""
        self.steps += 1
        self.scheduler.landed(plan)
        told = []
        for work in plan.works:
            sequence = work.sequence
            if work.valid and work.last:
                if not sequence.generated:
                    self.cached_tokens += sequence.cached
                sequence.append(1)
                told.append(self._progress(sequence))
        return told

    def _progress(self, sequence: Any) -> Gained:
        """What a sequence has that the listener does not know of."""
        at, generated = sequence.had, sequence.generated
        count, ended = generated - at, generated >= sequence.max_tokens
        self.tokens += count
        sequence.had = generated
        if ended:
            self._output = moved(self._output, generated)
            self._forget(sequence.key)
        return Gained(sequence.key, at, count, ended)

    def _forget(self, key: int) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.finish_reason = "stop"
            if sequence.loan is None or sequence.hold is None:
                self.scheduler.remove(sequence)
            else:
                self.scheduler.lend(sequence)

    def _step_s(self, plan: Plan) -> float:
        c, works = self.scheduler.capacity, plan.works
        length = max([w.start + w.count for w in works])
        if plan.tag == "decode":
            return self._decode_s(len(works), length)
        if len(works) == 1:
            return self.costs.step_ms(works[0].count, works[0].start) * self.slow / 1e3
        profile = self.costs.profile
        if not profile.padded:
            return (self._prefill.at(sum([w.count for w in works]), length) + profile.host_ms) * self.slow / 1e3
        shape = prefill_shape(c, [w.count for w in works], length, LIKELIEST)
        ms = self._known.get(shape)
        if ms is None:
            ms = self._known[shape] = self._prefill.at(shape.rows * shape.tokens, shape.length) + profile.host_ms
        return ms * self.slow / 1e3

    def _decode_s(self, rows: int, length: int) -> float:
        return self.costs.decode_ms(rows, length) * self.slow / 1e3
