"""What real steps change of a profile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from rayneuron.engine.profile import measure
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.engine.timing import MOST_OFF, StepInfo, Timing
from rayneuron.policies.chunks import fit, limited
from rayneuron.policies.cost import HALF_LIFE, Costs
from rayneuron.types import Request, SamplingParams
from tests.engine.test_profile import CAPACITIES, Slow, by_tokens, measured


def plan_of(tag: Any, *rows: tuple[int, int], scores: bool = False) -> Plan:
    """`rows`: (start, count)."""
    request = Request(id="a", prompt_ids=[], params=SamplingParams(temperature=0.0))
    works = []
    for start, count in rows:
        sequence = Sequence(request, 0, [1] * (start + count), 0, 9, 0, prompt_len=start + count)
        sequence.prompt_logprobs = [] if scores else None
        works.append(Work.of(sequence, start, count))
    return Plan(tag, works)


def took(run_s: float, host_s: float = 0.0) -> StepInfo:
    return StepInfo(plan_s=host_s / 2, run_s=run_s, commit_s=host_s / 2)


@pytest.fixture
def timing() -> Iterator[Timing]:
    profile, _ = measured(CAPACITIES["default"])
    yield Timing(profile)


def test_half_of_what_is_known_is_newer_after_its_half_life(timing: Timing) -> None:
    known = {(b, n): ms for b, n, ms in timing.fixed.decode}
    for _ in range(HALF_LIFE):
        timing.note(plan_of("decode", *[(90, 1)] * 4), took(2e-3 * known[4, 128], 5e-4), False)
    now = {(b, n): ms for b, n, ms in timing.profile().decode}
    assert now.pop((4, 128)) == pytest.approx(math.sqrt(2) * known.pop((4, 128)))
    assert now == known and timing.profile().prefill == timing.fixed.prefill
    assert timing.profile().host_ms == pytest.approx(0.5)
    assert timing.fixed.host_ms == 0


def test_how_long_chunks_may_be_stays_what_it_was_at_the_start() -> None:
    """The scheduler does not follow what prefill steps take since; who reads the profile cuts prompts as it does."""
    timing = Timing(limited(measured(CAPACITIES["default"])[0], None))
    began = fit(timing.fixed)
    assert began is not None and len({*began.fitting}) > 1
    for _ in range(3 * HALF_LIFE):
        for _, tokens, length, ms in timing.fixed.prefill:
            timing.note(plan_of("prefill", (length - tokens, tokens)), took(4e-3 * ms), False)
    now = timing.profile()
    assert fit(replace(now, fitting=())) != began == fit(now)
    costs = Costs(now)
    assert costs.prefill(now.chunk, 0, True)[1] == Costs(timing.fixed).prefill(now.chunk, 0, True)[1] > 1


def test_a_step_that_overlaps_takes_as_long_as_its_turn(timing: Timing) -> None:
    """Its end is waited for only in what is left of it when the host has done its own part."""
    (rows, length, ms), *_ = timing.fixed.decode
    for _ in range(HALF_LIFE):
        timing.note(plan_of("decode", (90, 1)), took(1e-3 * ms / 4, 3e-3 * ms / 4), overlaps=True)
    assert timing.profile().decode[0] == (rows, length, pytest.approx(ms))


def test_between_two_points_both_move(timing: Timing) -> None:
    for _ in range(HALF_LIFE):
        timing.note(plan_of("prefill", (1984, 64)), took(1.0), False)
    moved = [(t, n) for (_, t, n, ms), (*_, was) in zip(timing.profile().prefill, timing.fixed.prefill, strict=True) if ms > was * 1.01]
    assert moved == [(32, 512), (128, 512), (32, 4096), (128, 4096)]


def test_a_disturbed_step_counts_for_no_more_than_others(timing: Timing) -> None:
    timing.note(plan_of("decode", (90, 1)), took(60.0), False)
    (*_, was), (*_, now) = timing.fixed.decode[0], timing.profile().decode[0]
    assert was < now <= was * MOST_OFF ** (1.01 / HALF_LIFE)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of("prefill", (0, 70)),
        plan_of("prefill", (0, 128), scores=True),
        plan_of("decode", *[(90, 1)] * 9),
        plan_of("prefill", (0, 128), (0, 9)),
    ],
    ids=["half a bucket", "scores", "half the rows", "rows of very different lengths"],
)
def test_steps_that_say_nothing_of_their_bucket_are_left_out(plan: Plan, timing: Timing) -> None:
    timing.note(plan, took(60.0), False)
    assert (timing.profile().decode, timing.profile().prefill) == (timing.fixed.decode, timing.fixed.prefill)


def test_where_nothing_is_padded_every_step_tells_of_its_true_tokens() -> None:
    """A prompt of 20 tokens, and 70 beside 9, take the time of so many, and of no bucket; of what they take the nearest points hear."""
    held = CAPACITIES["default"]
    runner = Slow(held, by_tokens)
    fixed = measure(runner, 512, runner.clock, padded=False)
    timing, costs = Timing(fixed), Costs(fixed)
    for new, done in ((1, 0), (20, 0), (70, 300), (300, 3796)):
        assert costs.step_ms(new, done) == pytest.approx(3 + 0.1 * new * (1 + max(done + new, 512) / 8192), rel=0.01)
    assert costs.decode_ms(3, 100) == pytest.approx(3 + 0.3 * (1 + 128 / 8192))
    for _ in range(12 * HALF_LIFE):
        timing.note(plan_of("prefill", (0, 70), (0, 9)), took(2e-3 * costs.step_ms(79, 0)), False)
        timing.note(plan_of("decode", *[(90, 1)] * 3), took(3e-3 * costs.decode_ms(3, 100)), False)
    now = Costs(timing.profile())
    assert now.step_ms(79, 0) == pytest.approx(2 * costs.step_ms(79, 0), rel=0.05)
    assert now.decode_ms(3, 100) == pytest.approx(3 * costs.decode_ms(3, 100), rel=0.05)
    assert now.step_ms(512, 0) == pytest.approx(costs.step_ms(512, 0))


def test_what_requests_generate_is_learnt(timing: Timing) -> None:
    assert timing.profile().output_tokens == 0
    for _ in range(HALF_LIFE):
        timing.ended(100)
    for _ in range(HALF_LIFE):
        timing.ended(200)
    assert timing.profile().output_tokens == pytest.approx(150)
