"""The fewest nodes are the fewest: one less misses the goal; and the cheapest is cheaper than the others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest

from rayneuron.sim.sizing import Goal, NodeChoice, Sizing
from rayneuron.sim.workload import Arrival, Traffic, made_up
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=2048, chunk=512)
SMALL = NodeChoice("small", 1, 1.0, CAPACITY, profile(CAPACITY))
LARGE = NodeChoice("large", 4, 5.0, CAPACITY, profile(CAPACITY))
FAST = NodeChoice("fast", 1, 30.0, CAPACITY, profile(CAPACITY, speed=4.0))


def requests(candidate: NodeChoice) -> Iterator[Arrival]:
    return made_up([Traffic(rate=12, prompt=300, output=60)], 20.0, Random(1), CAPACITY.block, CAPACITY.length)


def good(candidate: NodeChoice, nodes: int, goal: Goal) -> float:
    report = Sizing(requests, goal, 64).run(candidate, nodes)
    return report.good / report.arrived


def test_the_fewest_and_the_cheapest() -> None:
    goal = Goal(0.4, 0.05, 0.95)
    found = Sizing(requests, goal, 64).of([LARGE, FAST, SMALL])
    best = found[0]
    assert best.candidate is SMALL and best.nodes > 1 and best.usd == best.nodes
    assert good(SMALL, best.nodes, goal) >= 0.95 > good(SMALL, best.nodes - 1, goal)
    assert best.report is not None and best.report.usd_per_hour == best.usd
    tokens = best.report.output_tokens
    assert best.report.usd_per_million == pytest.approx(best.usd * best.report.ended_s / 3600 / tokens * 1e6)
    assert next(one for one in found if one.candidate is FAST).why == "dearer than another"


def test_a_goal_that_only_one_can_meet_and_one_that_nobody_can() -> None:
    alone = {c.name: Sizing(requests, Goal(None, None, 0.95), 64).alone(c) for c in (SMALL, FAST)}
    assert alone["fast"].ttft_s == pytest.approx(alone["small"].ttft_s / 4, rel=0.03)
    found = Sizing(requests, Goal(alone["small"].ttft_s * 0.6, None, 0.95), 64).of([SMALL, FAST])
    assert found[0].candidate is FAST and found[1].why.startswith("alone on an engine: first token")
    assert all(one.report is None for one in Sizing(requests, Goal(0.001, None, 0.95), 64).of([SMALL, FAST]))
    few = Sizing(requests, Goal(alone["small"].ttft_s * 1.02, None, 0.95), 2).of([SMALL])
    assert few[0].why.startswith("2 nodes are not enough: ")


def test_alone_is_what_one_gets_who_is_alone() -> None:
    """Nobody is refused for an answer that is long enough to reach another bucket only at its end."""
    one = [Arrival(0, 0.0, 500, 100, parts=((0, 600),))]
    search = Sizing(lambda _: one, Goal(10.0, 10.0, 1.0), 1)
    report, alone = search.run(SMALL, 1), search.alone(SMALL)
    assert report.ttft.mean == pytest.approx(alone.ttft_s, abs=0.0021) and report.tpot.mean == pytest.approx(alone.tpot_s, rel=0.02)


@pytest.mark.parametrize("count", [2, 40])
def test_a_rush_may_take_the_time_that_the_goal_gives_it(count: int) -> None:
    """All come within a millisecond. They need not be done with the last arrival, only by their goals."""
    rush = [Arrival(i, i * 1e-5, 300, 60, parts=((i, 360),)) for i in range(count)]
    found = Sizing(lambda _: rush, Goal(20.0, None, 0.95), 3).of([SMALL])
    assert found[0].nodes == 1 and found[0].report is not None and found[0].report.good == count


@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_is_the_cheapest_of_all_there_are(seed: int) -> None:
    """Every number of nodes of every candidate is tried."""
    random = Random(seed)
    goal = Goal(random.choice([0.1, 0.3, 1.0, None]), random.choice([0.02, 0.05, 0.2]), random.choice([0.8, 0.95, 1.0]))
    traffic = [Traffic(random.uniform(3, 25), random.choice([100, 400]), random.choice([20, 80]), burstiness=random.choice([0.3, 1.0]))]
    choices = [SMALL, LARGE, NodeChoice("fast", 1, random.choice([1.9, 3.0]), CAPACITY, profile(CAPACITY, speed=2.0))]

    def some(_: NodeChoice) -> Iterator[Arrival]:
        return islice(made_up(traffic, float("inf"), Random(seed), CAPACITY.block, CAPACITY.length), 150)

    search = Sizing(some, goal, 6, seed)
    best = search.of(choices)[0]
    every = [(n * c.usd, search.run(c, n)) for c in choices for n in range(1, 7)]
    met = [usd for usd, report in every if report.good >= goal.share * report.arrived]
    assert best.usd == min(met, default=float("inf")), (goal, traffic)
