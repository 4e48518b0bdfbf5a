"""Prompts that another engine computes: the same tokens as alone, nothing computed twice, nothing lost, whatever goes wrong on the way."""

from __future__ import annotations

import random

import pytest

from rayneuron.engine.remote import Lent, Loan
from rayneuron.types import Request, SamplingParams
from tests.engine.beside import Beside
from tests.engine.test_fuzz import LENGTH, Guard, build, collect, drain, draw, drive, finished
from tests.engine.test_fuzz import solo as solo


def greedy(name: str, prompt: list[int], most: int, **params) -> Request:
    return Request(id=name, prompt_ids=prompt, params=SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, **params))


WAYS = [
    pytest.param(seed, seed % 2 == 1, seed % 3 != 0, 0.5 if seed % 4 == 2 else 0.0, marks=pytest.mark.slow if seed > 6 else ())
    for seed in range(12)
]


@pytest.mark.parametrize(("seed", "ahead", "cached", "faults"), WAYS)
def test_every_request_equals_its_solo_run(tiny, solo, seed, ahead, cached, faults):  # noqa: F811
    """With both engines' caches, several choices, logprobs, edits, aborts, preemption, refusals and failures at every stage."""
    rng = random.Random(100 + seed)
    rows, budget = rng.choice([2, 3, 5]), rng.choice([None, 192, 288])
    engine = build(tiny, rows, budget, 16, chunk=rng.choice([8, 16, 32]), ahead=ahead, cached=cached)
    other = build(tiny, rng.choice([1, 2, 4]), None, 16, chunk=rng.choice([8, 32]), ahead=rng.random() < 0.5, cached=rng.random() < 0.7)
    beside = Beside(engine, other, rng, faults, refuses=0.1)
    families = [[rng.randrange(12, 512) for _ in range(64)] for _ in range(3)] if cached else None
    requests = [draw(rng, i, families) for i in range(40)]
    guard = Guard(engine) if cached else None
    by_id = {r.id: r for r in requests}

    def look() -> None:
        counts(engine)
        if guard is not None:
            guard.look()

    out, aborted = drive(engine, requests, rng, 0.06, after=look)
    for (rid, index), deltas in out.items():
        tokens, reason = finished(deltas)
        wanted, wanted_reason = solo(by_id[rid], index)
        scored = [len(d.prompt_logprobs) for d in deltas if d.prompt_logprobs is not None]
        assert scored in ([], [len(by_id[rid].prompt_ids)]), "once"
        if reason == "abort":
            assert rid in aborted and tokens == wanted[: len(tokens)]
        else:
            assert (tokens, reason) == (wanted, wanted_reason), by_id[rid]
    assert beside.adopted > (3 if faults else 8) and (beside.failed > beside.cancelled) is (faults > 0)
    for one in (engine, other):
        while one.has_work:
            one.step()
        snapshot = one.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.remote, snapshot.kv_tokens_used, snapshot.blocks_pinned) == (0, 0, 0, 0, 0)
        assert snapshot.slots_free == one.capacity.rows


def stepped(engine) -> tuple[int, dict]:
    """How many tokens an engine computes until it has no work, and the deltas."""
    computed, out = 0, {}
    while engine.has_work:
        before = engine.steps
        collect(out, engine.step())
        computed += engine.info.tokens if engine.steps > before else 0
    return computed, out


def counts(engine) -> None:
    """free + cached + limbo + running + remote + ticketed = all blocks, each counted where it is held most firmly."""
    scheduler, blocks = engine.scheduler, engine.scheduler.blocks
    ticketed = set(blocks._pins)
    remote = {block for hold, _ in scheduler.remote.values() for block in hold.blocks} - ticketed
    running = {block for s in scheduler.running for block in s.hold.blocks} - ticketed - remote
    running |= set(blocks._copies.values()) - ticketed - remote
    assert blocks.free + blocks.cached.count + len(blocks.limbo) + len(running) + len(remote) + len(ticketed) == blocks.space.blocks
    assert sum(len(hold.blocks) for hold, _ in scheduler.remote.values()) <= blocks.space.blocks // 2


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("hit", [0, 16])
def test_no_token_of_the_prompt_is_computed_twice(tiny, length, hit):
    rng = random.Random(length)
    prompt = [rng.randrange(12, 512) for _ in range(length)]
    engine, other = (build(tiny, 4, None, 16, cached=True) for _ in range(2))
    if hit and length > hit:
        drain(engine, [greedy("before", prompt[:hit] + [20], 1)])
    beside = Beside(engine, other, rng)
    engine.add(greedy("r", prompt, 5))
    computed, out = stepped(engine)
    whole = bool(hit) and length == hit + 1  # all but the last position is known, which is computed for its logits: nobody is asked
    assert (beside.adopted, computed) == ((0, 5) if whole else (1, 4)), "tokens 1 to 4, each by the KV of the one before"
    alone = build(tiny, 1, chunk=LENGTH)
    assert finished(out["r", 0]) == drain(alone, [greedy("r", prompt, 5)])["r", 0]
    assert out["r", 0][0].cached_tokens == (hit if length > hit else 0)
    stamps = out["r", 0][-1].stamps
    if not whole:
        assert stamps.arrived <= stamps.scheduled <= stamps.prefill_done == stamps.handed_over == stamps.first_token
        assert stamps.first_token <= stamps.adopted <= stamps.finished
    again = greedy("again", prompt, 1)
    assert drain(engine, [again])["again", 0][0] == finished(out["r", 0])[0][:1]
    assert engine.info.tokens == 1, "what has arrived is in the prefix cache"


def test_choices_share_what_has_arrived(tiny):
    """Five choices of a prompt that ends inside a block: one prompt is computed, there, and here nothing but their own tokens."""
    prompt = [random.Random(5).randrange(12, 512) for _ in range(40)]
    params = SamplingParams(n=5, max_tokens=4, temperature=1.0, seed=3, ignore_eos=True)
    engine, other = build(tiny, 5, None, 16), build(tiny, 5, None, 16, chunk=LENGTH)
    beside = Beside(engine, other, random.Random(0))
    there = []
    step = other.step
    other.step = lambda: (before := other.steps, step(), there.append(other.info.tokens if other.steps > before else 0))[1]
    engine.add(Request(id="n", prompt_ids=prompt, params=params))
    computed, out = stepped(engine)
    assert beside.adopted == 1 and computed == 5 * 3 and sum(there) == 40 + 4
    alone = drain(build(tiny, 5, None, 16), [Request(id="n", prompt_ids=prompt, params=params)])
    assert {key: finished(deltas) for key, deltas in out.items()} == alone


def test_a_lent_prompt_stays_until_it_is_given_back(tiny):
    """Without a cache: nobody else gets its blocks, however full the store is, and then all of them can be had again."""
    engine = build(tiny, 2, 96, 16)
    told: list[Lent] = []
    engine.add(greedy("lent", [30] * 40, 20), Loan(b"t", told.append))
    out: dict = {}
    while engine.has_work:
        collect(out, engine.step())
    assert finished(out["lent", 0])[1] == "length" and len(finished(out["lent", 0])[0]) == 1
    assert [lent.settled for lent in told] == [16, 32, 40] and [len(lent.blocks) for lent in told] == [1, 2, 3]
    assert (engine.snapshot().blocks_pinned, engine.snapshot().blocks_free, engine.snapshot().slots_free) == (3, 3, 2)
    held = engine.runner.device.kv_read(told[-1].blocks).clone()
    engine.add(greedy("long", [31] * 60, 20))  # needs four of six
    assert engine.step() == [] and engine.waits and engine.has_work
    engine.add(greedy("short", [32] * 10, 2))
    assert engine.step() == [], "in order of service"
    engine.unpin(b"t")
    engine.unpin(b"t")
    while engine.has_work:
        collect(out, engine.step())
        engine.check_ledger()
    assert finished(out["long", 0])[1] == finished(out["short", 0])[1] == "length"
    assert held.abs().sum() > 0 and engine.snapshot().blocks_free == 6


def test_a_loan_is_never_preempted(tiny):
    """Its watermark must not shrink: others make room, though they came first."""
    engine = build(tiny, 3, 96, 16, chunk=8)
    told: list[Lent] = []
    engine.add(greedy("grows", [40] * 30, 40))
    engine.step()
    engine.add(greedy("lent", [41] * 45, 1), Loan(b"t", told.append))
    out: dict = {}
    while engine.has_work:
        collect(out, engine.step())
        engine.check_ledger()
        if engine.scheduler.waiting and not engine.scheduler.running:
            engine.unpin(b"t")
    assert [lent.settled for lent in told] == sorted(lent.settled for lent in told) and told[-1].settled == 45
    assert engine.snapshot().preemptions > 0 and out["lent", 0][-1].preemptions == 0
    assert finished(out["grows", 0])[0] == drain(build(tiny, 1), [greedy("grows", [40] * 30, 40)])["grows", 0][0]


def test_an_aborted_loan_leaves_nothing(tiny):
    for steps in range(6):
        engine = build(tiny, 2, 96, 16, chunk=16)
        params = SamplingParams(n=2, max_tokens=9, temperature=1.0, seed=1)
        engine.add(Request(id="lent", prompt_ids=[30] * 40, params=params), Loan(b"t", lambda lent: None))
        for _ in range(steps):
            engine.step()
        engine.abort("lent")
        while engine.has_work:
            engine.step()
        engine.unpin(b"t")
        engine.check_ledger()
        assert engine.snapshot().blocks_free == 6, steps


def test_a_deadline_passes_while_another_engine_computes(tiny):
    now = [100.0]
    engine, other = build(tiny, 2, None, 16), build(tiny, 2, None, 16)
    engine._clock = lambda: now[0]
    beside = Beside(engine, other, random.Random(0))
    beside.take = list  # type: ignore[method-assign]
    request = greedy("late", [20] * 40, 40)
    request.deadline_s = 105.0
    engine.add(request)
    assert engine.step() == [] and engine.snapshot().remote == 1 and engine.waits
    now[0] = 106.0
    (delta,) = engine.step()
    assert delta.finish_reason == "abort" and "deadline" in delta.error
    assert engine.snapshot().kv_tokens_used == 48 and engine.has_work, "somebody may still write there"
    del beside.take
    while engine.has_work:
        engine.step()
    assert engine.snapshot().kv_tokens_used == 0 and beside.cancelled == 1
    engine.check_ledger()
