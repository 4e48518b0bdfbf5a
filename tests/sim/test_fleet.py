"""Fleets: what the desk, its choices and its queue are worth, on the real scheduler and a virtual clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from random import Random

import pytest
from msgspec.structs import replace

from rayneuron.policies.desk_limits import DeskLimits
from rayneuron.policies.fairness import AccountShare
from rayneuron.sim.fleet import Simulation
from rayneuron.sim.report import FleetReport
from rayneuron.sim.setup import Setup
from rayneuron.sim.workload import Arrival, Traffic, made_up
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=2048, chunk=512)
TIMES = profile(CAPACITY)


def simulate(traffic: list[Traffic], seconds: float = 60.0, seed: int = 1, **setup: object) -> FleetReport:
    """A run that balances: every request ends once, as its engine said it, and nothing is left."""
    arrivals = made_up(traffic, seconds, Random(seed), CAPACITY.block, CAPACITY.length)
    fleet = Simulation(Setup(CAPACITY, TIMES, **setup), arrivals, seed)  # type: ignore[arg-type]
    report = fleet.run()
    assert report.arrived == report.finished + report.failed + sum(report.refused.values())
    assert report.wrong == 0 and not any(fleet.open.values()), fleet.open
    assert report.output_tokens <= sum(node.host.tokens for node in fleet._nodes.values()) or setup.get("kills")
    for node in fleet._nodes.values():
        node.host.scheduler.check()
    return report


MIXED = [Traffic(rate=14, prompt=200, output=50, prefixes=60, shared=1024, turns=2)]


@pytest.mark.parametrize("seed", range(4))
def test_everything_balances_through_loss_delay_and_death(seed: int) -> None:
    random = Random(seed)
    report = simulate(
        MIXED, 30.0, seed, nodes=6, gateways=random.choice([1, 2, 3]), event_loss=0.05, load_late_s=random.choice([0.0, 0.2]),
        kills=((5.0, 1, 3.0), (10.0, 1, 4.0), (12.0, 1, 1.0), (20.0, 1, 2.0)), exact=seed % 2 == 0,
    )  # fmt: skip
    assert report.replays > 0 and report.failed == 0 and report.refused.total() == 0


@pytest.mark.parametrize("deaths", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_deaths_lose_nothing(deaths: int) -> None:
    """One engine of eight dies every two seconds, and comes back a second later."""
    kills = tuple((2.0 + 2.0 * i, 1, 1.0) for i in range(deaths))
    report = simulate([Traffic(rate=16, prompt=200, output=60)], 2.0 * deaths + 2, nodes=8, kills=kills)
    assert report.replays > deaths / 2 and report.failed == 0 and report.refused.total() == 0


@pytest.mark.parametrize("gateways", [1, 3])
def test_deaths_lose_nothing_where_engines_take_turns(gateways: int) -> None:
    """No desk knows where anything is then. Some die with orders on the way to them, and once there is no engine at all."""
    kills = ((2.0, 1, 0.5), (6.0, 4, 0.7))
    report = simulate(MIXED, 12.0, nodes=4, route="turns", gateways=gateways, kills=kills)
    assert report.replays > 4 and report.finished == report.arrived


def test_engines_that_are_alike_give_the_same_stepping_or_leaping() -> None:
    reports = [simulate(MIXED, 20.0, 3, nodes=3, route="turns", exact=exact) for exact in (True, False)]
    for name in ("ttft", "tpot", "whole"):
        one, two = (getattr(report, name) for report in reports)
        assert one.total == pytest.approx(two.total, abs=1e-6) and one.count == two.count
    assert reports[0].cached_tokens == reports[1].cached_tokens


def test_an_hour_in_which_nothing_comes_is_one_step() -> None:
    arrivals = [Arrival(i, at_s, 100, 10, parts=((i, 110),)) for i, at_s in enumerate((1.0, 2.0, 1e12))]
    fleet = Simulation(Setup(CAPACITY, TIMES), arrivals)
    assert fleet.run().finished == 3 and fleet.clock._made < 100


def test_prefixes_pay() -> None:
    """Eight sessions that all begin alike, six turns each, before two engines, which one of them would nearly be enough for."""
    traffic = [Traffic(rate=0.5, prompt=100, output=40, prefixes=12, shared=1024, turns=6, think_s=3.0)]
    turns, kv = (simulate(traffic, 120.0, 2, nodes=4, route=route) for route in ("turns", "kv"))
    assert kv.cached_tokens > turns.cached_tokens
    assert kv.ttft.mean <= 0.6 * turns.ttft.mean, (kv.ttft.mean, turns.ttft.mean)


def test_blocks_that_nobody_asks_for_need_no_name() -> None:
    """They take their room as others do, and nothing else becomes of them."""
    traffic = [Traffic(rate=20, prompt=300, output=40, prefixes=40, shared=512)]
    arrivals = list(made_up(traffic, 60.0, Random(4), CAPACITY.block, CAPACITY.length))
    told, entries = [], []
    for some in (arrivals, [replace(arrival, own=0) for arrival in arrivals]):
        fleet = Simulation(Setup(CAPACITY, TIMES, 4), some, 4)
        told.append(fleet.run().json())
        entries.append(len(fleet._gateways[0].desk.chooser.index))
        stores = [node.host.scheduler.blocks for node in fleet._nodes.values()]
        assert all(store.evictions > 100 for store in stores)
        for node in fleet._nodes.values():
            node.host.scheduler.check()
    assert told[0] == told[1] and told[0]["cached_tokens"] > 0 and 2 * entries[0] < entries[1], entries


def test_costs_beat_taking_turns_where_requests_differ() -> None:
    traffic = [Traffic(rate=4, prompt=900, output=10), Traffic(rate=6, prompt=50, output=150)]
    turns, least = (simulate(traffic, 100.0, 2, nodes=6, route=route, caching=False) for route in ("turns", "least"))
    assert least.ttft.mean <= turns.ttft.mean and least.whole.mean < 0.9 * turns.whole.mean, (least.whole.mean, turns.whole.mean)


def test_goals_are_met_by_those_who_met_them() -> None:
    """Against what the distributions of the same run say."""
    traffic = [Traffic(rate=6, prompt=300, output=40)]
    free = simulate(traffic, 30.0, nodes=2)
    assert free.good == free.finished and free.good_tokens == free.output_tokens
    goal_s = free.ttft.at(0.5)
    report = simulate(traffic, 30.0, nodes=2, slo_ttft_s=goal_s)
    assert report.good == pytest.approx(0.5 * report.arrived, rel=0.1) and report.ttft.total == free.ttft.total
    assert report.json()["slo"]["goodput"] == report.good_tokens / report.ended_s < report.output_tokens / report.ended_s
    assert simulate(traffic, 30.0, nodes=2, slo_ttft_s=1e9, slo_tpot_s=free.tpot.at(0.9)).good == pytest.approx(0.9 * free.arrived, rel=0.1)


def test_predictions_are_what_comes() -> None:
    for rate in (1.0, 6.0, 12.0):
        report = simulate([Traffic(rate=rate, prompt=400, output=40, most=200)], 40.0, nodes=2, exact=True)
        assert report.off.at(0.5) <= 0.2, (rate, report.off.summary())


@pytest.mark.parametrize("exact", [True, False])
def test_an_engine_that_is_slower_than_it_was_measured_is_learned_of(exact: bool) -> None:
    """One of three takes three times as long as its profile says: it gets less than its share, and predictions hold all the same."""
    traffic = [Traffic(rate=6, prompt=400, output=40, most=200)]
    arrivals = made_up(traffic, 60.0, Random(1), CAPACITY.block, CAPACITY.length)
    fleet = Simulation(Setup(CAPACITY, TIMES, 3, exact=exact), arrivals, 1)
    fleet._nodes[0].host.slow = 3.0
    report = fleet.run()
    tokens = [node.host.tokens for node in fleet._nodes.values()]
    assert tokens[0] < 0.6 * min(tokens[1:]), tokens
    assert report.off.at(0.5) <= 0.2, report.off.summary()


@pytest.mark.parametrize("exact", [True, False])
def test_steps_are_slow_for_as_long_as_they_are_said_to_be(exact: bool) -> None:
    """One answer of 400 tokens on one engine, whose steps take three times as long for a while."""
    arrivals = [Arrival(0, 0.0, 100, 400, parts=((0, 500),))]
    setups = [Setup(CAPACITY, TIMES, route="turns", exact=exact, slows=slows) for slows in ((), ((0.5, 1, 3.0, 1.2),))]
    plain, slow = (Simulation(setup, arrivals).run() for setup in setups)
    assert slow.whole.mean - plain.whole.mean == pytest.approx(1.2 * 2 / 3, abs=0.02)
    assert slow.busy == pytest.approx(plain.busy, abs=0.01)


def test_an_account_that_wants_everything_leaves_the_others_their_share() -> None:
    """A asks for ten times what there is, B for little of it. B waits for a row, not for A; where both were one account it would."""
    b = Traffic(rate=0.8, prompt=1000, output=40, account="b")
    a = Traffic(rate=150.0, prompt=200, output=40, account="a")
    limits = DeskLimits(max_wait_s=1e9, max_queue_tokens=None)
    shares = {"a": AccountShare(max_waiting=100), "b": AccountShare()}
    alone = simulate([b], 50.0, nodes=2, limits=limits)
    both = simulate([b, a], 50.0, nodes=2, limits=limits, shares=shares)
    late, early = both.accounts["b"].ttft.at(0.95), alone.accounts["b"].ttft.at(0.95)
    assert late <= 2.0 * early and late <= 0.15 * both.accounts["a"].ttft.at(0.95), (late, early)
    assert both.accounts["b"].finished > 25 and both.refused["account"] > 1000


def jain(report: FleetReport, weights: dict[str, float]) -> float:
    given = [report.accounts[name].work_ms / weight for name, weight in weights.items()]
    return sum(given) ** 2 / (len(given) * sum(x * x for x in given))


def test_who_always_wants_more_gets_by_weight_whatever_its_requests_are_like() -> None:
    weights = {"long": 1.0, "short": 1.0, "many": 2.0}
    traffic = [
        Traffic(rate=20, prompt=1200, output=20, account="long"),
        Traffic(rate=80, prompt=100, output=30, account="short"),
        Traffic(rate=80, prompt=300, output=60, account="many"),
    ]
    shares = {name: AccountShare(weight, max_waiting=30) for name, weight in weights.items()}
    limits = DeskLimits(max_wait_s=1e9, max_queue_tokens=None)
    report = simulate(traffic, 30.0, nodes=2, limits=limits, shares=shares)
    assert jain(report, weights) >= 0.95, {name: a.work_ms for name, a in report.accounts.items()}
    assert report.busy >= 0.95


def test_four_times_too_much_is_refused_honestly() -> None:
    report = simulate([Traffic(rate=100, prompt=300, output=60)], 60.0, nodes=3, limits=DeskLimits(max_wait_s=4.0))
    assert set(report.refused) == {"capacity"} and report.refused.total() > 0.4 * report.arrived
    assert report.waited.at(0.9) <= 4.0 * 1.4 and report.ttft.at(0.99) <= 4.0 * 1.6 + 0.5
    assert 0.5 <= report.start_off.at(0.1) and report.start_off.at(0.9) <= 2.0, report.start_off.summary()
    assert report.busy >= 0.95


@cache
def crowded(**setup: float) -> FleetReport:
    return simulate([Traffic(rate=85, prompt=200, output=60, prefixes=200, shared=512)], 6.0, nodes=24, **setup)


@pytest.mark.parametrize(("late_s", "ttft_most", "crowd_most"), [(0.0, 1.05, 1.1), (0.05, 1.25, 1.5), (0.5, 1.6, 1.9)])
def test_eight_gateways_that_know_little_of_each_other_do_not_crowd(late_s: float, ttft_most: float, crowd_most: float) -> None:
    """The control is one gateway that knows everything at once. Engines tell every 50 ms and with each order."""
    one, eight = crowded(), crowded(gateways=8, load_late_s=late_s, event_loss=0.01)
    ttft, crowd = eight.ttft.mean / one.ttft.mean, eight.crowd.mean / one.crowd.mean
    assert ttft <= ttft_most and crowd <= crowd_most, (ttft, crowd)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [150, 250])
def test_sixty_four_engines_of_eight_gateways_are_about_equally_busy(rate: float) -> None:
    traffic = [Traffic(rate=rate, prompt=200, output=60, prefixes=200, shared=512)]
    assert simulate(traffic, 25.0, nodes=64, gateways=8, load_late_s=0.05).busiest <= 1.25


def test_costs_do_not_lose_to_taking_turns_where_nothing_is_shared() -> None:
    """Where few lengths have graphs, one long prompt makes every step of its engine longer: others must not queue elsewhere for that."""
    c = engine(rows=16, length=4096, chunk=512, few=True)
    decode = tuple((b, n, 8 + 0.1 * b + 0.1 * b * n / 1024) for b in c.batch for n in c.lengths)
    prefill = tuple((1, t, n, 8 + 0.05 * t) for t in c.context for n in c.lengths)
    times = replace(profile(c), decode=decode, prefill=prefill)
    for rate in (40.0, 80.0):
        runs = {}
        for route in ("turns", "kv"):
            arrivals = made_up([Traffic(rate=rate, prompt=512, output=128)], 10.0, Random(3), c.block, c.length)
            runs[route] = Simulation(Setup(c, times, 16, route=route), arrivals, 1).run()
        assert runs["kv"].ttft.mean <= 1.1 * runs["turns"].ttft.mean and runs["kv"].whole.mean <= runs["turns"].whole.mean, rate


def lossy() -> str:
    return json.dumps(simulate(MIXED, 10.0, 7, nodes=4, gateways=2, event_loss=0.1, kills=((3.0, 1, 1.0),)).json())


def test_equal_seeds_are_equal_runs_in_any_process() -> None:
    """There strings have other hashes, hence sets another order."""
    script = "from tests.sim.test_fleet import lossy; print(lossy(), end='')"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    assert told == lossy() and json.loads(told)["arrived"] > 100
