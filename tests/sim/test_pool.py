"""A prefill pool in a fleet: what is lent is given back, every request has its tokens, and who decodes is not held up."""

from __future__ import annotations

from random import Random

import pytest

from rayneuron.sim.fleet import Simulation
from rayneuron.sim.report import FleetReport
from rayneuron.sim.setup import PoolSetup, Setup
from rayneuron.sim.workload import Traffic, made_up
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=2048, chunk=512)
TIMES = profile(CAPACITY)


def run(traffic: list[Traffic], seconds: float, seed: int, pool: PoolSetup | None, **setup: object) -> FleetReport:
    """A run that balances, in the pool too."""
    fleet = Simulation(Setup(CAPACITY, TIMES, pool=pool, **setup), made_up(traffic, seconds, Random(seed), 64, 2048), seed)  # type: ignore[arg-type]
    report = fleet.run()
    assert report.arrived == report.finished + report.failed + sum(report.refused.values())
    assert report.wrong == 0 and not any(fleet.open.values()), fleet.open
    hosts = [node.host for node in fleet._nodes.values()] + [peer.host for peer in (fleet._pool._peers if fleet._pool is not None else [])]
    for host in hosts:
        host.scheduler.check()
        assert host.scheduler.blocks.used == host.scheduler.blocks.pinned == 0
    assert not setup.get("kills") or report.replays > 0
    assert setup.get("kills") or sum(host.tokens for host in hosts) == report.output_tokens + report.pooled
    return report


@pytest.mark.parametrize("seed", range(6))
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


def test_a_pool_spares_those_who_decode() -> None:
    """Three engines and one that only computes prompts against four that do all: long prompts no longer stand between two tokens."""
    traffic = [Traffic(rate=5, prompt=1200, output=60)]
    alike = run(traffic, 40.0, 2, None, nodes=4, caching=False)
    apart = run(traffic, 40.0, 2, PoolSetup(1, CAPACITY, TIMES, 64), nodes=3, caching=False)
    assert apart.pooled > 0.8 * apart.arrived and apart.tpot.at(0.95) < alike.tpot.at(0.95), (apart.tpot.summary(), alike.tpot.summary())
