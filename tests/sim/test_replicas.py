"""A fleet that grows and shrinks: nothing is lost by it, and it costs less than one that is large all the time."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from rayneuron.sim.fleet import Simulation
from rayneuron.sim.replicas import FleetSize
from rayneuron.sim.report import FleetReport
from rayneuron.sim.setup import Elastic, Setup
from rayneuron.sim.workload import Arrival, Traffic, made_up
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=2048, chunk=512)


def waves(seed: int, peak: float) -> list[Arrival]:
    """Quiet for a minute, busy for one, quiet again."""
    few, many = Traffic(rate=0.5, prompt=300, output=40), Traffic(rate=peak, prompt=300, output=40)
    found: list[Arrival] = []
    for i, stream in enumerate((few, many, few)):
        for a in made_up([stream], 60.0, Random(10 * seed + i), 64, 2048):
            found.append(Arrival(len(found), 60.0 * i + a.at_s, a.prompt, a.output, parts=(((1 << 41) + len(found), a.prompt + a.output),)))
    return found


def run(elastic: Elastic | None, nodes: int, seed: int, peak: float = 12.0, **setup: object) -> FleetReport:
    fleet = Simulation(Setup(CAPACITY, profile(CAPACITY), nodes, elastic=elastic, **setup), waves(seed, peak), seed)  # type: ignore[arg-type]
    report = fleet.run()
    assert report.arrived == report.finished + report.failed + sum(report.refused.values())
    assert report.wrong == 0 and not any(fleet.open.values()), fleet.open
    if elastic is not None:
        assert len(fleet._nodes) <= elastic.most + len(setup.get("kills", ()))  # type: ignore[arg-type]
    return report


@pytest.mark.parametrize("seed", range(4))
def test_growing_and_shrinking_loses_nothing(seed: int) -> None:
    random = Random(seed)
    target_ms, up_s, down_s, start_s = (random.choice(some) for some in ([5.0, 20.0], [0.0, 3.0], [0.0, 10.0], [0.5, 8.0]))
    elastic = Elastic(1, 6, target_ms, up_s, down_s, {"spawn": start_s})
    kills, route = (((70.0, 1, 2.0),), "kv") if seed % 2 else ((), "turns")
    report = run(elastic, 1, seed, gateways=random.choice([1, 3]), load_late_s=0.05, exact=seed == 0, kills=kills, route=route)
    assert report.failed == 0 and report.engines < 6.0
    assert kills or (report.engines > 1.0 and report.replays == 0)


def test_an_elastic_fleet_is_cheaper_than_a_large_one_and_faster_than_a_small_one() -> None:
    elastic = Elastic(1, 6, 300.0, up_s=2.0, down_s=15.0, parts={"spawn": 3.0})
    grown, small, large = (run(how, nodes, 5, route="turns") for how, nodes in ((elastic, 1), (None, 1), (None, 6)))
    assert small.engines == pytest.approx(1.0) and large.engines == pytest.approx(6.0)
    assert grown.engines < 0.8 * large.engines
    assert grown.ttft.mean < 0.5 * small.ttft.mean, (grown.ttft.mean, small.ttft.mean)


def test_work_that_gateways_hold_back_makes_a_fleet_grow() -> None:
    """A gateway sends little more to an engine than it can begin at once: by what engines have waiting alone, none would come."""
    elastic = Elastic(1, 6, 1000.0, up_s=2.0, down_s=15.0, parts={"spawn": 3.0})
    grown, small, turns = run(elastic, 1, 5), run(None, 1, 5), run(elastic, 1, 5, route="turns")
    assert grown.engines > 1.2 and grown.engines == pytest.approx(turns.engines, rel=0.25)
    assert grown.ttft.mean < 0.5 * small.ttft.mean, (grown.ttft.mean, small.ttft.mean)


def test_a_slow_start_is_waited_for() -> None:
    """Nobody comes before the parts of a start have passed."""
    after = [Elastic(1, 6, 300.0, up_s=0.0, down_s=1e9, parts={"weights": s, "graphs": s}) for s in (1.0, 20.0)]
    fast, slow = (run(elastic, 1, 6, route="turns") for elastic in after)
    assert fast.ttft.mean < slow.ttft.mean


@pytest.mark.parametrize("kills", [(), ((5000.5, 1, 700.0),)])
def test_a_night_is_skipped_and_changes_nothing(kills: tuple[tuple[float, int, float], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are dismissed in it, one by one, and begin to start where one has died; then nothing is looked at."""
    day = [replace(a, at_s=a.at_s + 20_000.0, number=1000 + a.number) for a in waves(3, 12.0)]
    elastic = Elastic(2, 6, 50.0, up_s=2.5, down_s=300.25, parts={"spawn": 40.0})
    told, calls = [], []
    for every in (False, True):
        if every:
            monkeypatch.setattr(FleetSize, "look", lambda self, look=FleetSize.look: (look(self), self.clock.now_s)[1])
        fleet = Simulation(Setup(CAPACITY, profile(CAPACITY), 4, elastic=elastic, kills=kills), [*waves(2, 12.0), *day], 1)
        told.append(fleet.run().json())
        calls.append(fleet.clock._made)
    assert told[0] == told[1] and 2.0 < told[0]["engines"] < 6.0
    assert calls[0] < calls[1] - 18_000
