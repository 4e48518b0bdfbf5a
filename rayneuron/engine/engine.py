"""The engine core: add, abort, step (plan, run, commit); single-threaded, token ids only."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rayneuron.devices.base import SCORES, Pending, StepOutput
from rayneuron.engine.host_sampling import HostSampling
from rayneuron.engine.logits import EditRules, Edits
from rayneuron.engine.neuron_sampling import NeuronSampling, check_request
from rayneuron.engine.profile import Timing
from rayneuron.engine.runner import RowError, Runs
from rayneuron.engine.scheduler import Scheduler
from rayneuron.engine.sequence import Plan, Sequence, advance, failed
from rayneuron.errors import RequestError
from rayneuron.policies.admission import validate
from rayneuron.policies.chunks import fit
from rayneuron.types import FinishReason, Profile, Request, SamplingParams, Snapshot, TokenDelta


@dataclass(slots=True)
class StepInfo:
    """What the last step did: rows and new tokens, and the seconds of planning, running and committing."""

    tag: str = ""
    rows: int = 0
    tokens: int = 0
    plan_s: float = 0.0
    run_s: float = 0.0
    commit_s: float = 0.0


class Engine:
    """One model instance. Call from one thread; `EngineLoop` gives it its own.

    Every request added ends with exactly one last delta a choice (finish_reason set), whether it finishes, is aborted, or the step fails.
    `rule`: the device samples by NxD's rule, so requests are held to its limits, and what the host samples follows it too.
    `model`: its fingerprint (`hashing`), where the KV of equal prefixes is computed once; None: no prefix is kept. `profile`: what steps
    take, by which prompts are cut; it does not change, so that what was chosen once is chosen again.
    """

    def __init__(
        self,
        runner: Runs,
        *,
        vocab: int,
        eos_ids: Iterable[int] = (),
        rule: NeuronSampling | None = None,
        model: str | None = None,
        profile: Profile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.capacity = runner.capacity
        self.vocab = vocab
        self.eos_ids = frozenset(eos_ids)
        self.scheduler = Scheduler(runner.capacity, model, fit(profile) if profile is not None else None)
        self.timing = Timing(profile) if profile is not None else None
        self.info = StepInfo()
        self.steps = 0
        self._clock = clock
        self.ledger_wrong = 0  # times the books did not balance
        self._rule = rule
        self._host = HostSampling(rule)
        self._order = 0
        self._requests: dict[str, dict[int, Sequence]] = {}  # choices by index
        self._deadlines = False
        self._sound: tuple[SamplingParams, ...] = ()  # the last ones that were found so
        self._rules: deque[EditRules] = deque(maxlen=2)  # the last ones that were laid out
        self._ended: list[TokenDelta] = []
        self._last_step_s = self._step_started_s = 0.0
        self._under_way: tuple[Plan, Pending] | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests or self._ended or self._under_way)

    def validate(self, request: Request) -> None:
        """Raise RequestError if the request could never run here. Safe from any thread."""
        known = any(params is request.params for params in self._sound)  # the prompts of a call share them, and they may list a vocabulary
        validate(request, self.capacity.length, self.scheduler.blocks.total_tokens, self.vocab, None if known else self.eos_ids)
        if request.params.prompt_logprobs is not None and SCORES not in self.capacity.wants:
            said = "this deployment has no graphs for prompt_logprobs; its file must say buckets.scores: true"
            raise RequestError(said, param="prompt_logprobs")
        if known:
            return
        if self._rule is not None:
            check_request(request.params, self._rule)
        self._sound = (request.params, *self._sound[:1])

    def knows(self, request_id: str) -> bool:
        """Whether a live request has this id: deltas are addressed by it. Safe from any thread."""
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError (wrong, or its id is in use)."""
        self.validate(request)
        if self.knows(request.id):
            raise RequestError(f"request id {request.id!r} is in use", param="request_id")
        seed = request.params.seed if request.seed is None else request.seed
        seed = secrets.randbits(62) if seed is None else seed
        prompt = len(request.prompt_ids)
        most = request.params.max_tokens
        eos_ids = frozenset() if request.params.ignore_eos else self.eos_ids
        rules = self._laid_out(request.params)
        choices: dict[int, Sequence] = {}
        for index in range(request.params.n):
            choice = Sequence(
                request,
                index,
                list(request.prompt_ids),
                seed + index,
                self.capacity.length - prompt if most is None else most,
                self._order,
                leader=choices.get(0),
                prompt_len=prompt,
                phase="follows",
                eos_ids=eos_ids,
                stop_ids=eos_ids | frozenset(request.params.stop_token_ids),
            )
            choice.edits = None if rules is None else Edits(choice, rules)
            choice.stamps.arrived = request.arrival_s or self._clock()
            self._order += 1
            choices[index] = choice
        if request.params.prompt_logprobs is not None:
            choices[0].prompt_logprobs = [None]
        self._requests[request.id] = choices
        self._deadlines |= request.deadline_s is not None
        self.scheduler.add(choices[0])

    def _laid_out(self, params: SamplingParams) -> EditRules | None:
        """What the host has to do to this request's logits."""
        if not params.edits_logits:
            return None
        rules = next((rules for rules in self._rules if rules.params is params), None)
        if rules is None:
            rules = EditRules(params)
            self._rules.append(rules)
        return rules

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = "abort", error: str | None = None) -> None:
        """End a request, or one choice of it, now; unknown or finished ids are no error. Its last delta comes with the next step."""
        for choice in list(self._requests.get(request_id, {}).values()):
            if index is None or choice.index == index:
                self._end(choice, reason, error)

    def step(self) -> list[TokenDelta]:
        """Plan, run and commit one step; the deltas of everything that changed since the last call.

        Where steps overlap: begin the next step, then wait for the one before and commit that, while the next one runs.
        """
        started = self._step_started_s = self._clock()
        if self._deadlines:
            self._expire(started)
        deltas, self._ended = self._ended, []
        next_plan = self.scheduler.plan()
        for work in next_plan.works if next_plan is not None else ():
            if not work.sequence.stamps.scheduled:
                work.sequence.stamps.scheduled = started
        planned = self._clock()
        try:
            done = self._advance(next_plan)
        except RowError as wrong:
            return [*deltas, self._skip(wrong.work.sequence, wrong)]
        if done is None:
            return deltas
        plan, output = done
        ran = self._clock()
        deltas += self._commit(plan, output, ran)
        ended = self._last_step_s = self._clock()
        self.steps += 1
        self.info = StepInfo(plan.tag, len(plan.works), sum(w.count for w in plan.works), planned - started, ran - planned, ended - ran)
        if self.timing is not None:  # a step that began before the one before had ended took as long as the whole turn
            host_s = ended - started - (ran - planned)
            self.timing.note(plan, ended - started if self.runner.overlaps else ran - planned, host_s)
        return deltas

    def _skip(self, sequence: Sequence, wrong: RowError) -> TokenDelta:
        """A plan that could not be laid out: the choice at fault ends, the others are planned again in the next step."""
        delta = failed(sequence, wrong)
        self._forget(sequence, self._clock())
        delta.stamps = sequence.stamps
        return delta

    def _advance(self, plan: Plan | None) -> tuple[Plan, StepOutput] | None:
        """Begin a plan, and end it, or the one begun before where steps overlap; what has come to its end."""
        overlaps = self.runner.overlaps
        ending = (plan, self.runner.start(plan)) if plan is not None else None  # may raise; what is under way stays so
        if plan is not None:
            self.scheduler.launch(plan, overlaps)
        if overlaps:
            ending, self._under_way = self._under_way, ending
        if ending is None:
            return None
        output = ending[1].wait()
        self.scheduler.landed(ending[0])
        return ending[0], output

    def fail(self, error: str) -> list[TokenDelta]:
        """End everything with an error: the device is not to be trusted any more."""
        self._under_way = None
        for request_id in list(self._requests):
            self.abort(request_id, reason="error", error=error)
        deltas, self._ended = self._ended, []
        return deltas

    def snapshot(self) -> Snapshot:
        """The load right now; every field is one read, so any thread may call it."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        waiting = scheduler.waiting
        return Snapshot(
            running=len(scheduler.running),
            waiting=len(waiting),
            slots_free=blocks.free_rows,
            slots_total=self.capacity.rows,
            kv_tokens_used=blocks.used * blocks.space.block,
            kv_tokens_total=blocks.total_tokens,
            blocks_free=blocks.free,
            blocks_cached=len(blocks.cached),
            blocks_limbo=len(blocks.limbo),
            blocks_total=blocks.space.blocks,
            prefix_evictions=blocks.evictions,
            ledger_wrong=self.ledger_wrong,
            waiting_tokens=scheduler.waiting_tokens,
            steps=self.steps,
            preemptions=scheduler.preemptions,
            last_step_s=self._last_step_s,
            step_started_s=self._step_started_s,
        )

    def check_ledger(self) -> None:
        """Raise AssertionError if a slot, a token of KV or a sequence is counted twice or lost."""
        self.scheduler.check()
        queued = {id(s) for s in (*self.scheduler.running, *self.scheduler.waiting)}
        known = {id(s) for choices in self._requests.values() for s in choices.values()}
        assert queued <= known, "a sequence runs that no request owns"
        assert all(self._requests.values()), "a request without choices was kept"

    def close(self) -> None:
        """Give the device back."""
        self.runner.close()

    def _commit(self, plan: Plan, output: StepOutput, now: float) -> list[TokenDelta]:
        deltas = []
        for work, delta in zip(plan.works, advance(plan, output, now, self._host), strict=True):
            sequence = work.sequence
            if delta is None:
                continue
            if sequence.request.params.n > 1 and sequence.leader is None and sequence.generated <= 1:
                # The prompt's KV exists now: the other choices may share it.
                for choice in self._requests[sequence.request.id].values():
                    if choice.phase == "follows":
                        self.scheduler.add(choice)
            deltas.append(delta)
            if delta.finish_reason is not None:
                if self.timing is not None:
                    self.timing.ended(sequence.generated)
                self._forget(sequence, now)
                delta.stamps = sequence.stamps
        return deltas

    def _end(self, choice: Sequence, reason: FinishReason, error: str | None) -> None:
        choice.finish_reason = reason
        delta = TokenDelta(choice.request.id, choice.index, [], finish_reason=reason, error=error, preemptions=choice.preemptions)
        self._forget(choice, self._clock())
        delta.stamps = choice.stamps
        self._ended.append(delta)

    def _forget(self, choice: Sequence, now: float) -> None:
        choice.stamps.finished = now
        if choice.phase != "follows":
            self.scheduler.remove(choice)
        choices = self._requests[choice.request.id]
        del choices[choice.index]
        if not choices:
            del self._requests[choice.request.id]
            return
        heir = next(iter(choices.values()))
        if heir.phase == "follows":  # the leader went before its prompt was done: the next choice leads
            for other in choices.values():
                other.leader = None if other is heir else heir
            self.scheduler.add(heir)

    def _expire(self, now: float) -> None:
        asked = [next(iter(choices.values())).request for choices in self._requests.values()]
        timed = [(request.id, request.deadline_s) for request in asked if request.deadline_s is not None]
        for request_id, deadline_s in timed:
            if now > deadline_s:
                self.abort(request_id, reason="abort", error="the request's deadline passed")
        self._deadlines = bool(timed)
