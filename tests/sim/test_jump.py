"""Leaping over steps that are alike gives what stepping gives: each first token and each end at the same time, and the same books."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from rayneuron.engine.buckets import Capacity
from rayneuron.policies.cost import Costs
from rayneuron.sim.clock import Clock
from rayneuron.sim.host import ExactHost, Gained
from rayneuron.sim.jump import JumpHost
from rayneuron.types import Profile
from tests.policies.profiles import engine, profile


def fleet(random: Random) -> tuple[Capacity, Profile, bool]:
    """A small engine: one block a row or small ones, a KV that holds one sequence (preemption without end) to one that holds all."""
    length = random.choice([96, 200, 500])
    block = random.choice([16, 32, length])
    rows = random.randint(1, 6)
    least, most = -(-length // block) * block, rows * (length + block)
    c = engine(rows, length, random.choice([32, 64, 128]), block, kv_tokens=random.randint(least, max(least, most)))
    times = replace(profile(c, random.choice([0.0, 15.0])), padded=random.random() < 0.7)
    return c, times, block < length and random.random() < 0.7


def play(kind: type[ExactHost], seed: int, dies_s: float | None = None) -> tuple[dict[int, tuple[float, float]], ExactHost]:
    random = Random(seed)
    c, times, caching = fleet(random)
    clock = Clock()
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    had: dict[int, int] = {}
    outputs: dict[int, int] = {}

    def listen(host: ExactHost, told: list[Gained]) -> None:
        for progress in told:
            assert progress.at == had.get(progress.key, 0)
            had[progress.key] = progress.at + progress.count
            first.setdefault(progress.key, clock.now_s)
            if progress.ended:
                assert had[progress.key] == outputs[progress.key]
                last[progress.key] = clock.now_s

    host = kind(clock, c, Costs(times), listen, caching)
    at_s = 0.0
    for key in range(random.randint(1, 25)):
        at_s += random.choice([0.0, random.expovariate(5), random.expovariate(0.5)])
        prompt = random.randint(1, c.length - 1)
        outputs[key] = random.randint(1, min(c.length - prompt, 120))
        stream = random.randint(0, 3) if random.random() < 0.5 else 100 + key
        # Equal streams are equal to some depth, and their own behind it: as prompts that begin alike.
        hashes = [
            b"%03d%013d" % (stream if i < 4 else 1000 + key, i) for i in range((prompt + outputs[key]) // c.block)
        ]
        clock.at(at_s, host.submit, key, prompt, outputs[key], hashes)
        if random.random() < 0.1:
            clock.at(at_s + random.expovariate(2), host.cancel, key)
    clock.run(dies_s)
    if dies_s is not None:
        clock.now_s = dies_s
        listen(host, host.kill())
        return {}, host
    assert host.idle
    host.scheduler.check()
    assert host.scheduler.blocks.used == 0
    return {key: (first[key], last.get(key, -1.0)) for key in first}, host


def same(seed: int) -> bool:
    """Whether leaping took fewer calls."""
    stepped, exact = play(ExactHost, seed)
    leapt, jumped = play(JumpHost, seed)
    assert stepped.keys() == leapt.keys(), seed
    for key, (first, last) in stepped.items():
        assert leapt[key] == pytest.approx((first, last), abs=1e-9), (seed, key)
    assert exact.steps == jumped.steps and exact.tokens == jumped.tokens and exact.cached_tokens == jumped.cached_tokens, seed
    assert exact.scheduler.preemptions == jumped.scheduler.preemptions
    assert sorted(exact.scheduler.blocks.hashes()) == sorted(jumped.scheduler.blocks.hashes())
    assert exact.busy_s == pytest.approx(jumped.busy_s, abs=1e-9)
    return exact.clock._made > jumped.clock._made


def test_leaping_is_stepping() -> None:
    assert sum(map(same, range(150))) > 75


def test_who_dies_has_told_what_stepping_tells() -> None:
    """In a leap, and in a step of a prompt beside others."""
    told = [[play(kind, seed, Random(seed).uniform(0.05, 3.0))[1].tokens for kind in (ExactHost, JumpHost)] for seed in range(200)]
    assert sum(exact > 0 for exact, _ in told) > 100
    assert [exact for exact, _ in told] == [leapt for _, leapt in told]


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(10))
def test_leaping_is_stepping_in_ten_thousand_fleets(thousand: int) -> None:
    assert sum(map(same, range(1000 * thousand + 1000, 1000 * thousand + 2000))) > 500
