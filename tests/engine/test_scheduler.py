"""Property tests: no row or block is lost, nobody starves, decode waits at most one chunk, order of service holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.devices.base import StepOutput
from rayneuron.engine import commit
from rayneuron.engine.buckets import capacity
from rayneuron.engine.host_sampling import HostSampling
from rayneuron.engine.runner import choose, pack
from rayneuron.engine.scheduler import Scheduler
from rayneuron.engine.sequence import Sequence
from rayneuron.types import Request, SamplingParams
from tests.drawn import examples


def make(order: int, prompt: int, most: int, priority: int = 0) -> Sequence:
    request = Request(id=str(order), prompt_ids=[1] * prompt, params=SamplingParams(max_tokens=most), priority=priority)
    return Sequence(request, 0, [1] * prompt, 0, most, order, prompt_len=prompt)


def advance(scheduler: Scheduler) -> tuple[str, list[Sequence], list[Sequence]] | None:
    """One step as the engine does it, with a model that always says 1."""
    plan = scheduler.plan()
    if plan is None:
        return None
    rows = [w.sequence.hold.row for w in plan.works]
    assert plan.works and len(set(rows)) == len(rows)
    assert {w.sequence.phase for w in plan.works} == {plan.tag}
    for work in plan.works:
        assert work.start == work.sequence.computed and work.count >= 1 and work.start + work.count <= len(work.sequence.ids)
    scheduler.launch(plan, overlaps=False)
    scheduler.landed(plan)
    deltas = commit.advance(plan, StepOutput(ids=np.ones((len(rows), 1), np.int32)), 1.0, HostSampling())
    assert [d is not None for d in deltas] == [w.last for w in plan.works]
    done = [w.sequence for w, d in zip(plan.works, deltas, strict=True) if d is not None and d.finish_reason is not None]
    for s in done:
        scheduler.remove(s)
    scheduler.check()
    return plan.tag, [w.sequence for w in plan.works], done


@examples(150)
@given(st.data())
def test_everything_finishes_and_the_ledger_returns_to_zero(data):
    rows = data.draw(st.integers(1, 5))
    length = data.draw(st.integers(16, 80))
    block = data.draw(st.sampled_from([16, 32, length]))
    # From a budget that holds one full sequence (constant preemption) to one that holds all.
    budget = data.draw(st.integers(-(-length // block) * block, rows * 160))
    c = capacity(rows=rows, length=length, chunk=data.draw(st.integers(4, 40)), kv_tokens=budget, block=block)
    scheduler = Scheduler(c)
    alive: list[Sequence] = []
    finished = 0
    for order in range(data.draw(st.integers(1, 14))):
        prompt = data.draw(st.integers(1, length - 1))
        s = make(order, prompt, data.draw(st.integers(1, length - prompt)), data.draw(st.sampled_from([0, 0, 0, -1, 1])))
        scheduler.add(s)
        alive.append(s)
        for _ in range(data.draw(st.integers(0, 4))):
            step = advance(scheduler)
            if step is not None:
                finished += len(step[2])
                alive = [s for s in alive if s not in step[2]]
        if alive and data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(alive))
            scheduler.remove(victim)
            alive.remove(victim)
            scheduler.check()
    steps = 0
    while alive:
        step = advance(scheduler)
        assert step is not None, "work is left and nothing was planned"
        alive = [s for s in alive if s not in step[2]]
        steps += 1
        assert steps < 5000, "no progress"
    assert scheduler.plan() is None
    assert scheduler.blocks.used == 0 and scheduler.blocks.free_rows == rows


def test_decode_never_waits_for_two_chunks():
    scheduler = Scheduler(capacity(rows=4, length=4096, chunk=128))
    scheduler.add(make(0, 8, 200))
    advance(scheduler)  # prompt of 0
    for order in range(1, 4):
        scheduler.add(make(order, 2000, 2))
    tags = []
    for _ in range(40):
        tags.append(advance(scheduler)[0])
    assert "prefill" in tags
    assert all(pair != ("prefill", "prefill") for pair in zip(tags, tags[1:], strict=False))


def test_service_in_order_of_priority_then_arrival():
    scheduler = Scheduler(capacity(rows=1, length=64, chunk=32))
    for order, priority in ((0, 0), (1, 0), (2, -5), (3, 0)):
        scheduler.add(make(order, 4, 3, priority))
    served = []
    while (step := advance(scheduler)) is not None:
        served += [s.order for s in step[2]]
    assert served == [2, 0, 1, 3]


def test_an_urgent_request_takes_the_slot_of_the_least_urgent():
    scheduler = Scheduler(capacity(rows=2, length=64, chunk=32))
    late, early = make(0, 4, 30, priority=5), make(1, 4, 30, priority=1)
    scheduler.add(late)
    scheduler.add(early)
    for _ in range(6):
        advance(scheduler)
    urgent = make(2, 4, 2, priority=0)
    scheduler.add(urgent)
    advance(scheduler)
    assert urgent.hold is not None and late.hold is None and late.preemptions == 1 and early.hold is not None


@pytest.mark.parametrize("kv_tokens", [48, 64])
def test_preempted_sequences_keep_their_tokens(kv_tokens):
    scheduler = Scheduler(capacity(rows=3, length=48, chunk=16, kv_tokens=kv_tokens, block=16))
    sequences = [make(i, 10, 30) for i in range(3)]
    for s in sequences:
        scheduler.add(s)
    while advance(scheduler) is not None:
        pass
    assert all(len(s.ids) == 40 for s in sequences)
    assert scheduler.preemptions > 0 and sequences[0].preemptions == 0


def test_a_shared_prompt_is_copied_whatever_the_plan_turns_into():
    """A choice that comes back after preemption shares the whole blocks of its prompt, copies the last one and goes on as a prefill. Where
    growing then preempts all that decode, and the plan is made anew, the copy must not be lost: its block would hold somebody else's KV."""
    scheduler = Scheduler(capacity(rows=3, length=64, chunk=16, kv_tokens=64, block=16))
    leader, other, choice = make(0, 20, 40), make(2, 15, 40), make(1, 20, 40)
    choice.leader = leader
    for s in (leader, other):
        scheduler.add(s)
        while s.computed < s.prompt_len:
            plan = scheduler.plan()
            scheduler.launch(plan, overlaps=False)
            scheduler.landed(plan)
        s.append(1)
        leader.run(len(leader.ids))  # its next token is known to nobody yet
    other.run(16)
    other.append(1)  # one more than its block has room for
    choice.ids += [1, 1]  # two tokens written before it was preempted
    scheduler.add(choice)
    plan = scheduler.plan()
    assert other.hold is None and other.preemptions == 1, "the scene is set: what decoded made room"
    assert plan.tag == "prefill" and [w.sequence for w in plan.works][0] is choice and plan.works[0].start == 20
    assert choice.hold.blocks[0] == leader.hold.blocks[0] and choice.hold.shared == leader.hold.shared == 1
    copy = leader.hold.blocks[1], choice.hold.blocks[1]
    assert plan.copies == [copy]
    scheduler.check()
    assert scheduler.plan().copies == [copy], "a plan that is not run has copied nothing"
    scheduler.remove(leader)  # what is to be copied stays
    assert scheduler.plan().copies == [copy] and copy[0] not in choice.hold.blocks
    scheduler.check()
    scheduler.launch(plan, overlaps=False)
    assert not scheduler.blocks.copies() and copy[0] in scheduler.blocks.limbo
    scheduler.landed(plan)
    assert not scheduler.blocks.limbo
    scheduler.check()


def test_waiting_tokens_are_counted_as_they_change():
    scheduler = Scheduler(capacity(rows=1, length=64, chunk=16))
    for order, prompt in enumerate((9, 5, 7)):
        scheduler.add(make(order, prompt, 9))
    assert scheduler.waiting_tokens == 21
    advance(scheduler)
    assert scheduler.waiting_tokens == 12
    scheduler.add(make(3, 4, 9, priority=-1))  # takes the row: the first one waits again, with the token it wrote
    advance(scheduler)
    assert scheduler.waiting_tokens == 12 + 10
    scheduler.check()


def test_a_step_of_before_registers_nothing_of_after():
    """Preempted while a step is under way, and admitted again before it ends: what that step computed lies in blocks given back, which
    nobody gets until then, and the new ones hold nothing yet."""
    scheduler = Scheduler(capacity(rows=2, length=64, chunk=32, block=16), "model")
    sequence = make(0, 40, 10)
    scheduler.add(sequence)
    first = scheduler.plan()
    scheduler.launch(first, overlaps=True)
    given_back = set(sequence.hold.blocks)
    scheduler._preempt(sequence)
    second = scheduler.plan()
    assert second.works[0].start == 0 and not given_back & set(sequence.hold.blocks) and set(scheduler.blocks.limbo) == given_back
    scheduler.launch(second, overlaps=True)
    scheduler.landed(first)
    assert scheduler.blocks.hashes() == [] and sequence.settled == 0 and not scheduler.blocks.limbo
    scheduler.landed(second)
    assert len(scheduler.blocks.hashes()) == 2 and sequence.hold.shared == 2
    scheduler.check()


def test_a_step_under_way_keeps_its_own_arrays() -> None:
    """What is as in the step before is not made again, and what has changed is made anew: a device may still read the last."""
    held = capacity(rows=2, length=64, chunk=16, block=16)
    scheduler, packed = Scheduler(held), []
    for order in range(2):
        scheduler.add(make(order, 8, 40))
    while (plan := scheduler.plan()) is not None and len(packed) < 30:
        scheduler.launch(plan, overlaps=False)
        if plan.tag == "decode":
            batch = pack(plan.works, choose(held, plan), held.space)
            packed.append((batch.blocks, batch.blocks.clone(), [list(w.sequence.hold.blocks) for w in plan.works]))
        scheduler.landed(plan)
        commit.advance(plan, StepOutput(ids=np.ones((len(plan.works), 1), np.int32)), 1.0, HostSampling())
    assert len({blocks.data_ptr() for blocks, *_ in packed}) < len(packed) == 30, "most are those of the step before"
    for blocks, then, listed in packed:
        assert (blocks == then).all()
        for row, own in zip(blocks.tolist(), listed, strict=True):
            assert row[: len(own)] == own and set(row[len(own) :]) <= {held.space.null}
