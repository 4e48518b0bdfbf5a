"""The fewest nodes are the fewest: one less misses the goal; and the cheapest is cheaper than the others."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from rayneuron.sim import sizing
from rayneuron.sim.sizing import Goal, NodeChoice
from rayneuron.sim.workload import Arrival, Traffic, made_up
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=2048, chunk=512)
SMALL = NodeChoice("small", 1, 1.0, CAPACITY, profile(CAPACITY))
LARGE = NodeChoice("large", 4, 5.0, CAPACITY, profile(CAPACITY))
FAST = NodeChoice("fast", 1, 30.0, CAPACITY, profile(CAPACITY, speed=4.0))


def requests(candidate: NodeChoice) -> Iterator[Arrival]:
    return made_up([Traffic(rate=12, prompt=300, output=60)], 20.0, Random(1), CAPACITY.block, CAPACITY.length)


def good(candidate: NodeChoice, nodes: int, goal: Goal) -> float:
    report = sizing._run(candidate, nodes, requests(candidate), goal, 0)
    return report.good / report.arrived


def test_the_fewest_and_the_cheapest() -> None:
    goal = Goal(0.4, 0.05, 0.95)
    found = sizing.size([LARGE, FAST, SMALL], requests, goal, 64)
    best = found[0]
    assert best.candidate is SMALL and best.nodes > 1 and best.usd == best.nodes
    assert good(SMALL, best.nodes, goal) >= 0.95 > good(SMALL, best.nodes - 1, goal)
    assert best.report is not None and best.report.usd_per_hour == best.usd
    tokens = best.report.output_tokens
    assert best.report.usd_per_million == pytest.approx(best.usd * best.report.seconds / 3600 / tokens * 1e6)
    assert next(one for one in found if one.candidate is FAST).why == "dearer than another"


def test_a_goal_that_only_one_can_meet_and_one_that_nobody_can() -> None:
    alone = {c.name: sizing.alone(c, requests(c), 0.95) for c in (SMALL, FAST)}
    assert alone["fast"].ttft_s == pytest.approx(alone["small"].ttft_s / 4, rel=0.03)
    found = sizing.size([SMALL, FAST], requests, Goal(alone["small"].ttft_s * 0.6, None, 0.95), 64)
    assert found[0].candidate is FAST and found[1].why.startswith("alone on an engine: first token")
    assert all(one.report is None for one in sizing.size([SMALL, FAST], requests, Goal(0.001, None, 0.95), 64))
    few = sizing.size([SMALL], requests, Goal(alone["small"].ttft_s * 1.02, None, 0.95), 2)
    assert few[0].why == "2 nodes are not enough"
