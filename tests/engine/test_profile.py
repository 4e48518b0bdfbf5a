"""What steps take: which are measured and how long that lasts, what is estimated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from rayneuron.devices.base import Ended, StepOutput
from rayneuron.engine.buckets import Capacity, capacity, inventory
from rayneuron.engine.profile import BUDGET_S, measure, outdated
from rayneuron.engine.runner import choose, pack
from rayneuron.engine.sequence import Plan
from rayneuron.policies.chunks import fit
from rayneuron.types import Profile

CAPACITIES = {
    "default": capacity(rows=16, length=4096, chunk=512, block=64),
    "one block a row": capacity(rows=4, length=1024, chunk=256),
    "few graphs": capacity(rows=4, length=8192, chunk=512, few=True),
    "prefix buckets": capacity(rows=4, length=4096, chunk=1024, prefix=(512, 1024)),
    "hardly any KV": capacity(rows=16, length=4096, chunk=512, block=16, kv_tokens=48),
    "tiny": capacity(rows=1, length=2, chunk=512, block=64),
    "listed": capacity(rows=6, length=600, chunk=512, block=64, batch=(3,), context=(48, 80), lengths=(300,)),
}


class Slow:
    """A runner whose steps take the time `cost` says, on a clock of its own."""

    overlaps = False

    def __init__(self, held: Capacity, cost: Any) -> None:
        self.capacity, self.cost = held, cost
        self.now = 100.0
        self.plans: list[Plan] = []

    def clock(self) -> float:
        return self.now

    def start(self, plan: Plan) -> Ended:
        self.plans.append(plan)
        self.now += self.cost(plan)
        return Ended(StepOutput())

    def close(self) -> None: ...


def by_tokens(plan: Plan) -> float:
    """A model of 3 ms a step, 0.1 ms a token, and half of that again at 4,096 positions."""
    tokens, longest = sum(w.count for w in plan.works), max(w.start + w.count for w in plan.works)
    return 0.003 + 1e-4 * tokens * (1 + longest / 8192)


def measured(held: Capacity, cost: Any = by_tokens) -> tuple[Profile, Slow]:
    runner = Slow(held, cost)
    return measure(runner, 512, runner.clock), runner


@pytest.mark.parametrize("name", CAPACITIES)
def test_every_step_is_one_that_requests_could_make_and_writes_nothing(name: str) -> None:
    held = CAPACITIES[name]
    profile, runner = measured(held)
    listed = {(shape.tag, shape.rows, shape.tokens, shape.length) for shape in inventory(held)}
    for plan in runner.plans:
        shape = choose(held, plan)
        assert (shape.tag, shape.rows, shape.tokens, shape.length) in listed
        batch = pack(plan.works, shape, held.space)
        assert (batch.slots == held.space.nowhere).all(), "the KV of nobody is touched"
        assert len(set(batch.rows[: len(plan.works)].tolist())) == len(plan.works)
        assert int(batch.tokens.max()) < 512 and int(batch.tokens.min()) >= 0
    assert len(profile.decode) + len(profile.prefill) <= 12
    assert {ms > 0 for *_, ms in (*profile.decode, *profile.prefill)} == {True}


def test_what_is_measured_is_what_it_took() -> None:
    profile, runner = measured(CAPACITIES["default"])
    assert [(b, n) for b, n, _ in profile.decode] == [(1, 128), (4, 128), (16, 128), (1, 4096), (4, 4096), (16, 4096)]
    assert [(r, t, n) for r, t, n, _ in profile.prefill] == [(1, t, n) for n in (512, 4096) for t in (32, 128, 512)]
    for rows, length, ms in profile.decode:
        assert ms == pytest.approx(3 + 0.1 * rows * (1 + length / 8192))
    for _, tokens, length, ms in profile.prefill:
        assert ms == pytest.approx(3 + 0.1 * tokens * (1 + length / 8192))
    assert profile.tokens == tuple(sorted(profile.tokens)) and [n for n, _ in profile.tokens] == [1, 4, 16, 32, 128, 512]
    assert len(runner.plans) == 24 and runner.now - 100 < BUDGET_S


def test_what_drafts_add_is_told_where_it_jumps() -> None:
    """Products take sixteen tokens at once, and a row costs more than a token: what is added to a step is told, not what it takes."""

    def cost(plan: Plan) -> float:
        tokens = sum(w.tokens for w in plan.works)
        return 1e-3 * (3 + 2 * -(-tokens // 16) + 0.2 * len(plan.works) + 0.01 * tokens)

    profile, runner = measured(capacity(rows=16, length=4096, chunk=512, block=64, verify=9), cost)
    tried = {(len(plan.works), sum(w.tokens for w in plan.works)) for plan in runner.plans if plan.tag == "verify"}
    assert tried >= {(1, 2), (1, 9), (16, 17), (16, 32), (16, 144)}
    known = dict(profile.tokens)
    assert [known[n] - known[16] for n in (17, 32, 144)] == pytest.approx([2.01, 2.16, 17.28])
    assert known[2] - known[1] == pytest.approx(0.01) and known[1] == pytest.approx(5.21)


@pytest.mark.parametrize("disturbed", [1, 2])
def test_of_two_runs_the_lesser_counts(disturbed: int) -> None:
    """What disturbs a step only ever adds to it."""
    runs: Counter[tuple[str, int, int, int]] = Counter()

    def cost(plan: Plan) -> float:
        point = (plan.tag, len(plan.works), plan.works[0].count, plan.works[0].start)
        runs[point] += 1
        return 0.2 * by_tokens(plan) * (3 if runs[point] == disturbed else 1)

    assert measured(CAPACITIES["default"], cost)[0] == measured(CAPACITIES["default"], lambda plan: 0.2 * by_tokens(plan))[0]
    assert set(runs.values()) == {2} and len(runs) == 12


def test_one_disturbed_run_does_not_make_all_that_is_estimated_long() -> None:
    """A start is busy: 300 ms for the shortest prefill, once, and what is left of the time is not enough for anything larger."""
    runs: Counter[int] = Counter()

    def cost(plan: Plan) -> float:
        tokens = plan.works[0].count
        runs[tokens] += 1
        return 8 * by_tokens(plan) + 0.3 * (tokens == 32 and runs[32] == 1)

    profile, _ = measured(CAPACITIES["default"], cost)
    short = {t: ms for _, t, n, ms in profile.prefill if n == 512}
    assert short[32] == pytest.approx(8 * (3 + 3.2 * 1.0625)) and short[512] <= 16 * short[32]


@pytest.mark.parametrize("slower", [4, 30, 200])
def test_a_slow_model_is_measured_no_longer(slower: int) -> None:
    """What there was no time for is estimated from the nearest that there was: more tokens in proportion, no context for nothing."""
    profile, runner = measured(CAPACITIES["default"], lambda plan: slower * by_tokens(plan))
    least = slower * sum(by_tokens(plan) for plan in runner.plans[:3])
    assert runner.now - 100 <= max(1.2 * BUDGET_S, least) + 1e-9
    ms = {(t, n): took for _, t, n, took in profile.prefill}
    assert ms[32, 512] == pytest.approx(slower * (3 + 3.2 * 1.0625))
    for tokens, length in ms:
        assert slower * (3 + 0.1 * tokens) <= ms[tokens, length] * 1.01, "nothing is thought to be faster than it is"
        assert ms[tokens, length] >= ms[tokens, 512]
    rows = len(profile.decode) // 2
    assert all(long >= short for (*_, short), (*_, long) in zip(profile.decode[:rows], profile.decode[rows:], strict=True))


@pytest.mark.parametrize("slower", [0.1, 1, 40])
def test_what_a_long_context_costs_is_known_of_any_model(slower: float) -> None:
    """However slow, the fewest tokens over the longest context are measured, and their attention is in the estimate of all others."""

    def cost(plan: Plan) -> float:
        """5 ms for the weights, 0.1 a token, and ten times that again at 32,768 positions."""
        return slower * (0.005 + sum(1e-4 * w.count * (1 + 10 * (w.start + w.count) / 32768) for w in plan.works))

    held = capacity(rows=4, length=32768, chunk=512, block=64)
    profile, _ = measured(held, cost)
    assert (1, held.context[0], 32768) in {(r, t, n) for r, t, n, _ in profile.prefill}
    for _, tokens, length, ms in profile.prefill:
        true = slower * (5 + 0.1 * tokens * (1 + 10 * length / 32768))
        assert 0.99 * true <= ms, "nothing is thought to be faster than it is"
        assert tokens > held.context[0] or ms == pytest.approx(true)
    limit = replace(profile, chunk_ms=40.0 * slower)
    chunks = fit(limit)
    assert chunks is not None
    for done in range(0, 32000, 97):
        most = chunks.most(done)
        assert slower * (5 + 0.1 * most * (1 + 10 * (done + most) / 32768)) <= 40.0 * slower or most == held.context[0]
    assert chunks.most(0) >= 4 * chunks.most(31000) and chunks.most(31000) > held.context[0]


@pytest.mark.parametrize("busy", ["", "decode", "prefill"])
@pytest.mark.parametrize("name", CAPACITIES)
def test_times_taken_on_a_busier_machine_are_out_of_date(name: str, busy: str) -> None:
    profile, _ = measured(CAPACITIES[name], lambda plan: by_tokens(plan) * (1.5 if plan.tag == busy else 1))
    quiet = Slow(CAPACITIES[name], by_tokens)
    assert outdated(profile, quiet, 512, quiet.clock) == bool(busy) and len(quiet.plans) <= 2


def test_points_by_tokens_never_fall() -> None:
    """A noisy measurement must not say that more tokens are for nothing, or give time back."""
    profile, _ = measured(CAPACITIES["default"], lambda plan: 0.01 if plan.tag == "decode" else 0.004)
    assert [ms for _, ms in profile.tokens] == sorted(ms for _, ms in profile.tokens)
    assert max(ms for _, ms in profile.tokens) == pytest.approx(10.0)
