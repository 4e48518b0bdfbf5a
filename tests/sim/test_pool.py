"""A prefill pool in a fleet: what is lent is given back, every request has its tokens, and who decodes is not held up."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from rayneuron.policies.pool_sizes import PromptTokens
from rayneuron.sim.fleet import Simulation
from rayneuron.sim.pool import PrefillPool
from rayneuron.sim.report import FleetReport
from rayneuron.sim.setup import Elastic, PoolSetup, Setup
from rayneuron.sim.workload import Arrival, Traffic, made_up
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=2048, chunk=512)
TIMES = profile(CAPACITY)


def run(traffic: list[Traffic], seconds: float, seed: int, pool: PoolSetup | None, **setup: object) -> FleetReport:
    """A run that balances, in the pool too."""
    return balanced(made_up(traffic, seconds, Random(seed), 64, 2048), seed, pool, **setup)


def balanced(arrivals: Iterable[Arrival], seed: int, pool: PoolSetup | None, **setup: object) -> FleetReport:
    fleet = Simulation(Setup(CAPACITY, TIMES, pool=pool, **setup), arrivals, seed)  # type: ignore[arg-type]
    report = fleet.run()
    assert report.arrived == report.finished + report.failed + sum(report.refused.values())
    assert report.wrong == 0 and not any(fleet.open.values()), fleet.open
    pool_nodes = [] if fleet._pool is None else list(fleet._pool.peers.values())
    hosts = [node.host for node in [*fleet._nodes.values(), *pool_nodes]]
    for host in hosts:
        host.scheduler.check()
        assert host.scheduler.blocks.used == host.scheduler.blocks.pinned == 0
    assert not setup.get("kills") or report.replays > 0
    elastic = pool is not None and pool.elastic is not None
    assert setup.get("kills") or elastic or sum(host.tokens for host in hosts) == report.output_tokens + report.pooled
    assert not elastic or pool.elastic.least <= len(pool_nodes) <= pool.elastic.most  # type: ignore[union-attr]
    return report


def seeds(quick: int, all_: int) -> list[Any]:
    """The first few in each run, the others in slow ones."""
    return [pytest.param(seed, marks=() if seed < quick else pytest.mark.slow) for seed in range(all_)]


@pytest.mark.parametrize("seed", seeds(4, 6))
def test_everything_balances_with_a_pool(seed: int) -> None:
    random = Random(seed)
    traffic = [Traffic(rate=14, prompt=300, output=30, prefixes=20, shared=512, turns=2), Traffic(rate=2, prompt=900, output=2)]
    pool = PoolSetup(random.randint(1, 2), CAPACITY, TIMES, random.choice([None, 0, 200]), random.choice([0.0, 0.05]))
    report = run(
        traffic, 12.0, seed, pool, nodes=4, gateways=random.choice([1, 2]), caching=random.random() < 0.7, exact=seed % 2 == 0,
        kills=((3.0, 1, 2.0), (6.0, 1, 1.0)) if seed % 3 == 0 else (),
    )  # fmt: skip
    assert report.pooled > 0 and report.failed == 0


def test_leaping_gives_what_stepping_gives_with_a_pool() -> None:
    traffic = [Traffic(rate=12, prompt=300, output=40, prefixes=20, shared=512)]
    pool = PoolSetup(1, CAPACITY, TIMES, 100, tail_s=0.00213571)  # no step is as long: of two things at once either may be first
    exact, leapt = (run(traffic, 10.0, 3, pool, nodes=3, route="turns", hop_s=0.00053719, exact=exact) for exact in (True, False))
    assert exact.pooled == leapt.pooled > 20
    for name in ("ttft", "tpot", "whole"):
        assert getattr(exact, name).total == pytest.approx(getattr(leapt, name).total, abs=1e-6), name


@pytest.mark.parametrize("seed", seeds(1, 3))
def test_a_pool_spares_those_who_decode(seed: int) -> None:
    """Three engines and one that only computes prompts against four that do all: long prompts no longer stand between two tokens."""
    traffic = [Traffic(rate=5, prompt=1200, output=60)]
    alike = run(traffic, 40.0, seed, None, nodes=4, caching=False, exact=True)
    apart = run(traffic, 40.0, seed, PoolSetup(1, CAPACITY, TIMES, 64), nodes=3, caching=False, exact=True)
    assert apart.pooled > 0.8 * apart.arrived and apart.pause.at(0.999) < 0.5 * alike.pause.at(0.999)


def shifts(seed: int) -> list[Arrival]:
    """A minute of short prompts and long answers, one of long prompts and short answers, and the first again."""
    talk, read = Traffic(rate=3, prompt=80, output=60), Traffic(rate=12, prompt=1000, output=12)
    found: list[Arrival] = []
    for i, stream in enumerate((talk, read, talk)):
        for a in made_up([stream], 60.0, Random(10 * seed + i), 64, 2048):
            own = a.prompt + a.output
            found.append(Arrival(len(found), 60.0 * i + a.at_s, a.prompt, a.output, parts=(((1 << 41) + len(found), own),), own=own))
    return found


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_a_pool_that_grows_and_shrinks_loses_nothing(seed: int) -> None:
    random = Random(seed)
    start_s, down_s, tail_s = random.choice([0.5, 8.0]), random.choice([0.0, 10.0]), random.choice([0.0, 0.05])
    elastic = Elastic(1, 5, up_s=random.choice([0.0, 2.0]), down_s=down_s, parts={"spawn": start_s})
    pool = PoolSetup(1, CAPACITY, TIMES, 64, tail_s, elastic, PromptTokens(tokens=random.choice([500, 2000])))
    report = balanced(
        shifts(seed), seed, pool, nodes=3, gateways=random.choice([1, 2]), exact=seed == 0,
        kills=((70.0, 1, 2.0), (80.0, 1, 2.0), (90.0, 1, 2.0)) if seed % 2 else (),
    )  # fmt: skip
    assert report.failed == 0 and report.pooled > 100 and 1.0 < report.prefill_engines < 5.0


def test_a_pool_follows_what_prompts_there_are() -> None:
    """As fast as a large one where prompts become long, for less; one that stays small is not."""
    elastic = Elastic(1, 5, up_s=1.0, down_s=10.0, parts={"spawn": 1.0})
    few, grown, many = (
        balanced(shifts(5), 5, PoolSetup(nodes, CAPACITY, TIMES, 64, elastic=how, sizes=PromptTokens(tokens=1000)), nodes=3)
        for nodes, how in ((1, None), (1, elastic), (5, None))
    )
    assert few.prefill_engines == pytest.approx(1.0) and many.prefill_engines == pytest.approx(5.0)
    assert 1.2 < grown.prefill_engines < 0.7 * many.prefill_engines
    assert grown.ttft.mean < 0.5 * few.ttft.mean, (few.ttft.mean, grown.ttft.mean, many.ttft.mean)


def test_a_night_of_a_pool_is_skipped_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    elastic = Elastic(1, 5, up_s=1.0, down_s=20.5, parts={"spawn": 1.0})
    pool = PoolSetup(5, CAPACITY, TIMES, 64, 0.05, elastic, PromptTokens(tokens=1000))
    arrivals = shifts(5)
    arrivals += [replace(a, at_s=a.at_s + 10_000.0, number=a.number + len(arrivals)) for a in arrivals]
    told, calls = [], []
    for every in (False, True):
        if every:
            monkeypatch.setattr(PrefillPool, "look", lambda self, look=PrefillPool.look: (look(self), self.clock.now_s)[1])
        fleet = Simulation(Setup(CAPACITY, TIMES, 3, pool=pool), arrivals, 5)
        told.append(fleet.run().json())
        calls.append(fleet.clock._made)
    assert told[0] == told[1] and told[0]["pooled"] > 100 and calls[0] < calls[1] - 9_000
