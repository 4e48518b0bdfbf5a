"""The engine core: add, abort, step (plan, run, commit); single-threaded, token ids only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from rayneuron.devices.base import Pending, StepOutput
from rayneuron.engine.adapters import Adapters
from rayneuron.engine.beams import Search
from rayneuron.engine.commit import adopt, advance, failed
from rayneuron.engine.grammar import Compiles, Constraining
from rayneuron.engine.host_sampling import HostSampling
from rayneuron.engine.neuron_sampling import NeuronSampling, check_request
from rayneuron.engine.pressure import snapshot
from rayneuron.engine.remote import Arrived, First, Loan, Prefills
from rayneuron.engine.requests import Requests, check_room
from rayneuron.engine.runner import RowError, Runs
from rayneuron.engine.scheduler import Scheduler
from rayneuron.engine.sequence import Plan, Sequence
from rayneuron.engine.speculation.drafting import Speculation
from rayneuron.engine.timing import StepInfo, Timing
from rayneuron.errors import RequestError
from rayneuron.policies.admission import validate
from rayneuron.policies.chunks import fit
from rayneuron.types import FinishReason, Profile, Request, SamplingParams, Snapshot, TokenDelta


class Engine:
    """One model instance. Call from one thread; `EngineLoop` gives it its own.

    Every request added ends with exactly one last delta a choice (finish_reason set), whether it finishes, is aborted, or the step fails.
    `rule`: the device samples by NxD's rule, so requests are held to its limits, and what the host samples follows it too.
    `model`: its fingerprint (`hashing`), where the KV of equal prefixes is computed once; None: no prefix is kept. `profile`: what steps
    take, by which prompts are cut; it does not change, so that what was chosen once is chosen again. `speculation`: the drafts tried.
    `grammars` compile what outputs must match, `adapters` are those it may have; None: no request may ask for that.
    """

    def __init__(
        self, runner: Runs, *, vocab: int, eos_ids: Iterable[int] = (), rule: NeuronSampling | None = None, model: str | None = None,
        profile: Profile | None = None, speculation: Speculation | None = None, grammars: Compiles | None = None,
        adapters: Adapters | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.runner, self.capacity = runner, runner.capacity
        self.vocab, self.eos_ids = vocab, frozenset(eos_ids)
        self.scheduler = Scheduler(runner.capacity, model, fit(profile) if profile is not None else None, speculation, adapters)
        self.adapters = self.scheduler.adapters
        self.timing = Timing(profile, speculation.took if speculation is not None else None) if profile is not None else None
        self.info = StepInfo()
        self.steps = self.ledger_wrong = 0  # ledger_wrong: times the books did not balance
        self._clock, self._rule = clock, rule
        self.host = HostSampling(rule)
        self.constraining = Constraining(grammars, vocab)
        self._requests = Requests(self.capacity.length, self.eos_ids)
        self.waits = False  # the last step found nothing to do before something happens elsewhere: others compute, or hold the room
        self._deadlines = False
        self._sound: tuple[SamplingParams, ...] = ()  # the last ones that were found so
        self._ended: list[TokenDelta] = []
        self._last_step_s = self._step_started_s = 0.0
        self._under_way: tuple[Plan, Pending] | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests or self._ended or self._under_way or self.scheduler.remote)

    def validate(self, request: Request) -> None:
        """Raise RequestError if the request could never run here. Safe from any thread."""
        params = request.params
        known = any(sound is params for sound in self._sound)  # the prompts of a call share them, and they may list a vocabulary
        validate(request, self.capacity.length, self.scheduler.blocks.total_tokens, self.vocab, None if known else self.eos_ids)
        if request.adapter is not None:
            self.adapters.check(request.adapter)
        check_room(request, self.capacity)
        if not known:
            if self._rule is not None:
                check_request(params, self._rule)
            if params.structured_outputs is not None:
                self.constraining.check(params)
            self._sound = (params, *self._sound[:1])

    def knows(self, request_id: str) -> bool:
        """Whether a live request has this id: deltas are addressed by it. Safe from any thread."""
        return request_id in self._requests

    def add(self, request: Request, loan: Loan | None = None) -> None:
        """Queue a request, maybe on `loan` to somebody else. Raises RequestError (wrong, or its id is in use)."""
        self.validate(request)
        if self.knows(request.id):
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        self._deadlines |= request.deadline_s is not None
        leader = self._requests.open(request, self._clock(), loan)
        self.adapters.opened(request)
        if request.params.structured_outputs is None or not self.constraining.waits(request):
            self.scheduler.add(leader)

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = "abort", error: str | None = None) -> None:
        """End a request, or one choice of it, now; unknown or finished ids are no error. Its last delta comes with the next step."""
        for choice in list(self._requests.get(request_id, {}).values()):
            if index is None or choice.index == index:
                self._end(choice, reason, error)

    def step(self) -> list[TokenDelta]:
        """Plan, run and commit one step; the deltas of everything that changed since the last call.

        Where steps overlap: begin the next step, then wait for the one before and commit that, while the next one runs.
        """
        self.waits = False
        started = self._step_started_s = self._clock()
        if self._deadlines:
            self._expire(started)
        self._constrain()
        deltas, self._ended = self._ended + self._hear(started), []
        next_plan = self.scheduler.plan()
        begun = next_plan.begins if next_plan is not None else ()
        for sequence in (*begun, *(asked for _, asked in self.scheduler.remote.values() if asked is not None)):
            sequence.stamps.scheduled = sequence.stamps.scheduled or started
        planned = self._clock()
        try:
            done = self._advance(next_plan)
        except RowError as wrong:
            return [*deltas, *self._skip(wrong.work.sequence, wrong)]
        if done is None:
            self.waits = not deltas and self._under_way is None
            return deltas
        plan, output = done
        ran = self._clock()
        deltas += self._commit(plan, output, ran)
        ended = self._last_step_s = self._clock()
        self.steps += 1
        self.info = StepInfo.of(plan, planned - started, ran - planned, ended - ran)
        if self.timing is not None:
            self.timing.note(plan, self.info, self.runner.overlaps)
        return deltas

    def _constrain(self) -> None:
        """Requests whose constraints are compiled now begin, or end."""
        for choices, wrong in self.constraining.ready(self._requests) if self.constraining.coming else ():
            if wrong is None:
                self.scheduler.add(choices[0])
            for choice, why in [(choice, wrong) for choice in choices if wrong is not None]:
                for delta in self._skip(choice, why):
                    delta.fault = "call" if delta.fault == "request" else delta.fault
                    self._ended.append(delta)

    def _skip(self, sequence: Sequence, wrong: Exception) -> list[TokenDelta]:
        """A choice that cannot be laid out in a step, or constrained, ends; the others are planned again in the next step."""
        delta = failed(sequence, wrong)
        if sequence.search is not None:
            return self._searched(sequence.search, delta, self._clock())
        self._forget(sequence, self._clock())
        delta.stamps = sequence.stamps
        return [delta]

    def _advance(self, plan: Plan | None) -> tuple[Plan, StepOutput] | None:
        """Begin a plan, and end it, or the one begun before where steps overlap; what has come to its end."""
        overlaps = self.runner.overlaps
        ending: tuple[Plan, Pending] | None = None
        if plan is not None:
            if any(work.sequence.grammar is not None for work in plan.works):
                self.constraining.prepare(plan.works)
            ending = plan, self.runner.start(plan)  # may raise; what is under way stays so
            self.scheduler.launch(plan, overlaps)
        if overlaps:
            ending, self._under_way = self._under_way, ending
        if ending is None:
            return None
        output = ending[1].wait()
        self.scheduler.landed(ending[0])
        return ending[0], output

    def _hear(self, now: float) -> list[TokenDelta]:
        """What has come of the prompts that others compute."""
        deltas: list[TokenDelta] = []
        for event in self.scheduler.prefills.take() if self.scheduler.prefills is not None else ():
            if isinstance(event, First):
                _, leader = self.scheduler.remote[event.key]
                deltas += self._first(leader, event.deltas, now) if leader is not None else ()
                continue
            whole = isinstance(event, Arrived)
            leader = self.scheduler.arrived(event.key, whole)
            if leader is not None and whole:
                leader.stamps.adopted = now
                for choice in self._requests.followers(leader.request.id):
                    self.scheduler.add(choice)
        return deltas

    def _first(self, leader: Sequence, heard: Iterable[TokenDelta], now: float) -> list[TokenDelta]:
        """First tokens from elsewhere."""
        choices = dict(self._requests[leader.request.id])
        deltas = adopt(choices, heard, now)
        for delta in [delta for delta in deltas if delta.finish_reason is not None]:
            self._forget(choices[delta.index], now)
            delta.stamps = choices[delta.index].stamps
        return deltas

    def unpin(self, ticket: bytes) -> None:
        """Whoever borrowed a prompt's KV has it, or is gone."""
        self.scheduler.blocks.unpin(ticket)

    def fail(self, error: str) -> list[TokenDelta]:
        """End everything with an error: the device is not to be trusted any more."""
        self._under_way = None
        for request_id in list(self._requests):
            self.abort(request_id, reason="error", error=error)
        deltas, self._ended = self._ended, []
        return deltas

    def snapshot(self) -> Snapshot:
        """The load right now; every field is one read, so any thread may call it."""
        return snapshot(self.scheduler, self.steps, self.ledger_wrong, self._last_step_s, self._step_started_s)

    def check_ledger(self) -> None:
        """Raise AssertionError if a slot, a token of KV or a sequence is counted twice or lost."""
        self.scheduler.check()
        asked = [sequence for _, sequence in self.scheduler.remote.values() if sequence is not None]
        running = [s if s.search is None else s.search.leader for s in self.scheduler.running]
        self._requests.check((*running, *self.scheduler.waiting, *asked))
        self.adapters.check_ledger([*self.scheduler.running, *asked], [next(iter(c.values())).request for c in self._requests.values()])

    @property
    def prefills(self) -> Prefills | None:
        """Others who compute its prompts."""
        return self.scheduler.prefills

    def close(self) -> None:
        """Give the device back, once nobody else writes its KV."""
        if self.scheduler.prefills is not None:
            self.scheduler.prefills.close()
        self.constraining.close()
        self.runner.close()

    def _commit(self, plan: Plan, output: StepOutput, now: float) -> list[TokenDelta]:
        made, deltas = advance(plan, output, now, self.host), list[TokenDelta]()
        if self.scheduler.speculation is not None and plan.tag == "verify":
            self.scheduler.speculation.learn(plan, made)
        for work, delta in zip(plan.works, made, strict=True):
            sequence = work.sequence
            if delta is None or (delta.finish_reason == "error" and sequence.search is not None):
                deltas += self._searched(sequence.search, delta, now) if sequence.search is not None else ()
                continue
            if sequence.several and sequence.leader is None and sequence.generated - len(delta.token_ids) <= 1:
                # The prompt's KV exists now: the other choices may share it. (One before: the first may have come from elsewhere.)
                for choice in self._requests.followers(sequence.request.id):
                    self.scheduler.add(choice)
            deltas.append(delta)
            if delta.finish_reason is not None:
                if self.timing is not None:
                    self.timing.ended(sequence.generated)
                self._forget(sequence, now)
                delta.stamps = sequence.stamps
        return deltas

    def _searched(self, search: Search, wrong: TokenDelta | None, now: float) -> list[TokenDelta]:
        """What a step says of a beam search: nothing before its end. `wrong`: of a beam that failed, and all with it."""
        if not self.knows(search.leader.request.id):
            return []  # another beam had failed before
        deltas = search.spread(wrong) if wrong is not None else self.scheduler.forks.advance(search, self.host, now)
        if deltas:
            search.leader.finish_reason = deltas[0].finish_reason
            self._forget(search.leader, now)
        return deltas

    def _end(self, choice: Sequence, reason: FinishReason, error: str | None) -> None:
        if choice.finish_reason is not None:
            return  # with the choice that led it
        choice.finish_reason = reason
        delta = TokenDelta(choice.request.id, choice.index, [], finish_reason=reason, error=error, preemptions=choice.preemptions)
        self._forget(choice, self._clock())
        if choice.loan is not None:
            self.unpin(choice.loan.ticket)
        delta.stamps = choice.stamps
        self._ended += [delta] if choice.search is None else choice.search.spread(delta)

    def _forget(self, choice: Sequence, now: float) -> None:
        choice.stamps.finished = now
        heir = self._requests.close(choice)
        gone = choice.request.id not in self._requests
        if choice.request.id not in self.constraining.coming:  # else nobody of it has been planned yet
            self._unplan(choice, heir)
        if gone:
            self.adapters.closed(choice.request)

    def _unplan(self, choice: Sequence, heir: Sequence | None) -> None:
        if choice.loan is not None and choice.leader is None and choice.settled == choice.prompt_len:
            self.scheduler.lend(choice)
        elif choice.phase == "remote" and heir is not None:
            self.scheduler.inherit(choice, heir)
        else:
            if choice.phase != "follows":
                self.scheduler.remove(choice)
            if heir is not None and heir.loan is not None:  # what was told of its blocks would not hold
                self._end(heir, "error", "the choice that led has failed")
            elif heir is not None:  # the leader went before its prompt was done
                self.scheduler.add(heir)

    def _expire(self, now: float) -> None:
        late, self._deadlines = self._requests.late(now)
        for request_id in late:
            self.abort(request_id, reason="abort", error="the request's deadline passed")
