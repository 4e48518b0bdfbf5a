"""Beams, choices and plain requests over few blocks: nobody waits for ever, and each is what it is alone. The model reads its KV as ids."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.constraints import Beams
from rayneuron.devices.base import FOLLOWS, Batch, StepOutput
from rayneuron.engine.buckets import Capacity, capacity
from rayneuron.engine.engine import Engine
from rayneuron.engine.runner import choose, pack
from rayneuron.engine.sequence import Plan
from rayneuron.errors import RequestError
from rayneuron.types import Request, SamplingParams
from tests.drawn import examples

VOCAB, EOS, BLOCK, LENGTH = 24, 7, 4, 24


@dataclass
class Recall:
    """A runner whose KV is the ids themselves, and whose logits depend on every one that a row's table leads to. Where steps overlap, one
    is not run before it is waited for, or the next one is: what is written too early, or read too late, shows."""

    capacity: Capacity
    overlaps: bool
    shelf = None

    def __post_init__(self) -> None:
        space = self.capacity.space
        self._kv = np.full((space.total, space.block), -1)
        self._last = np.zeros(space.rows + 1, int)
        self._queue: deque[Step] = deque()

    def start(self, plan: Plan) -> Step:
        step = Step(self, plan.copies, pack(plan.works, choose(self.capacity, plan), self.capacity.space), len(plan.works))
        self._queue.append(step)
        if not self.overlaps:
            step.wait()
        return step

    def run(self, until: Step) -> None:
        while until.output is None:
            step = self._queue.popleft()
            step.output = self._run(step)

    def _run(self, step: Step) -> StepOutput:
        batch, block = step.batch, self.capacity.block
        self._kv[[to for _, to in step.copies]] = self._kv[[source for source, _ in step.copies]]
        logits = []
        for i in range(step.rows):
            row, at = int(batch.rows[i]), batch.positions[i].numpy()
            true = at < self.capacity.space.limit
            ids = np.where(batch.tokens[i].numpy() == FOLLOWS, self._last[row], batch.tokens[i].numpy())
            self._kv.reshape(-1)[batch.slots[i].numpy()[true]] = ids[true]
            length = at[true].max() + 1
            known = self._kv[batch.blocks[i].numpy()[: -(-length // block)]].reshape(-1)[:length]
            logits.append(np.random.default_rng(zlib.crc32(known.tobytes())).normal(size=VOCAB).astype(np.float32))
            self._last[row] = logits[-1].argmax()
        told = torch.from_numpy(np.stack(logits))
        return StepOutput(ids=told.argmax(-1, keepdim=True).int(), complete=batch.temperature[: step.rows] == 0, logits=told)

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Step:
    runner: Recall
    copies: list[tuple[int, int]]
    batch: Batch
    rows: int
    output: StepOutput | None = None

    def wait(self) -> StepOutput:
        self.runner.run(self)
        assert self.output is not None
        return self.output


def engine(rows: int, blocks: int, *, ahead: bool = False, cached: bool = False) -> Engine:
    sizes = replace(capacity(rows=rows, length=LENGTH, chunk=8, smallest=8, smallest_context=4, block=16), blocks=blocks, block=BLOCK)
    return Engine(Recall(sizes, ahead), vocab=VOCAB, eos_ids=(EOS,), model="recall" if cached else None)


def alone(request: Request) -> dict[int, list[int]]:
    made = engine(4, 4 * LENGTH // BLOCK)
    made.add(Request(id="alone", prompt_ids=request.prompt_ids, params=request.params))
    found: dict[int, list[int]] = {}
    while made.has_work:
        for delta in made.step():
            found.setdefault(delta.index, []).extend(delta.token_ids)
    return found


def drawn(random: Random, order: int, tried: Engine) -> Request:
    """One that fits there alone."""
    prompt = random.choices((8, 9, 10), k=random.randint(1, LENGTH - 2))  # few words: prefixes are met again
    kind, width = random.choice(["beams", "beams", "plain", "choices"]), random.randint(1, 4)
    beams = Beams(width=width, early_stopping=random.choice([True, False]), rule=random.choice(["vllm", "transformers"]))
    params = SamplingParams(
        n=1 if kind == "plain" else width, max_tokens=random.randint(1, LENGTH - len(prompt)), seed=order,
        temperature=1.0 if kind == "choices" else 0.0, logprobs=random.choice([None, 1]), beams=beams if kind == "beams" else None,
    )  # fmt: skip
    request = Request(id=str(order), prompt_ids=prompt, params=params, priority=random.randint(0, 1))
    try:
        tried.validate(request)
    except RequestError:
        return drawn(random, order, tried)
    return request


@examples(40)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_who_is_first_goes_on_and_each_is_what_it_is_alone(seed, ahead, cached):
    random = Random(seed)
    rows, blocks = random.randint(4, 6), random.randint(LENGTH // BLOCK, 12)
    tried = engine(rows, blocks, ahead=ahead, cached=cached)
    coming = asked = [drawn(random, order, tried) for order in range(random.randint(2, 10))]
    found: dict[tuple[str, int], list[int]] = {}
    doomed: set[str] = set()
    still, before = 0, None
    while tried.has_work or coming:
        now = random.randint(0, 3)
        for request in coming[:now]:
            tried.add(request)
        coming = coming[now:]
        if not random.randint(0, 30):
            tried.abort(name := random.choice(asked).id)
            doomed.add(name)
        for delta in tried.step():
            assert delta.error is None
            found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        tried.check_ledger()
        first = [(s.order, s.computed, len(s.ids)) for s in tried.scheduler.running[:1]]
        still, before = (still + 1 if first and first == before else 0), first
        assert still <= 2 * rows, "the first in order of service does not go on"
    tried.scheduler.blocks.reset()
    assert tried.scheduler.blocks.used == 0 and tried.scheduler.blocks.free_rows == rows and not tried.scheduler.forks.pending
    for request in asked:
        if request.id not in doomed:
            assert {index: ids for (name, index), ids in found.items() if name == request.id} == alone(request)


def test_who_was_preempted_for_room_that_comes_free_with_a_step_does_not_take_it():
    """Two plain requests, of which the second has what the first needs next."""
    tried = engine(2, 6, ahead=True)
    for name, prompt, most in (("0", [8] * 2, 22), ("1", [9] * 8, 16)):
        tried.add(Request(id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)))
    steps = 0
    while tried.has_work:
        tried.step()
        steps += 1
        assert steps < 60
    assert tried.scheduler.preemptions == 1


def test_a_search_that_was_preempted_waits_for_as_much_room_as_it_had():
    tried = engine(4, 7)
    plain = SamplingParams(max_tokens=22, temperature=0.0, ignore_eos=True)
    tried.add(Request(id="plain", prompt_ids=[8] * 2, params=plain))
    tried.add(Request(id="beams", prompt_ids=[9] * 7, params=SamplingParams(max_tokens=5, ignore_eos=True, beams=Beams(width=3))))
    while tried.has_work:
        tried.step()
    assert tried.scheduler.preemptions == 1
