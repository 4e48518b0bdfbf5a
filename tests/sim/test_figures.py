"""What a run says of itself, against what can be worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from rayneuron.policies.cost import Costs
from rayneuron.sim.fleet import Simulation
from rayneuron.sim.setup import Setup
from rayneuron.sim.workload import Arrival
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=2048, chunk=512)
COSTS = Costs(profile(CAPACITY))
HOP_S = 0.002


def run(arrivals: list[Arrival], exact: bool) -> tuple[Simulation, list[tuple[float, float]]]:
    """One engine, and when each answer began and ended."""
    fleet = Simulation(Setup(CAPACITY, COSTS.profile, route="turns", hop_s=HOP_S, exact=exact), arrivals)
    spans: list[tuple[float, float]] = []
    fleet.report.each = lambda a, tokens, ttft_s, tpot_s, whole_s: spans.append((a.at_s, a.at_s + whole_s))
    fleet.run()
    return fleet, spans


@pytest.mark.parametrize("exact", [True, False])
def test_those_who_never_meet_keep_an_engine_busy_for_what_each_takes(exact: bool) -> None:
    """Utilisation is work by time; the first token comes after its prompt and two hops."""
    arrivals = [Arrival(i, 5.0 * i, 100 + 30 * i, 4 + i, parts=((i, 104 + 31 * i),)) for i in range(20)]
    fleet, spans = run(arrivals, exact)
    work_s = 0.0
    for a in arrivals:
        steps = range(a.prompt + 1, a.prompt + a.output)  # positions that are attended to, of every token behind the first
        work_s += (COSTS.prefill(a.prompt, 0)[0] + sum(COSTS.decode_ms(1, length) for length in steps)) / 1e3
    report = fleet.report
    assert report.busy * report.engines * report.seconds == pytest.approx(work_s, rel=1e-6)
    assert report.ttft.total == pytest.approx(sum(COSTS.prefill(a.prompt, 0)[0] for a in arrivals) / 1e3 + 20 * 2 * HOP_S)
    assert report.whole.total == pytest.approx(work_s + 20 * 2 * HOP_S)
    assert all(end < begin for (_, end), (begin, _) in pairwise(spans)) and report.ended_s == pytest.approx(spans[-1][1])


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_at_a_time_waits_as_in_a_queue_with_equal_service(load: float) -> None:
    """Prompts of one whole step and answers of one token, at random times: M/D/1, whose mean wait is known, and Little's law."""
    random, service_s, at_s = Random(7), COSTS.prefill(512, 0)[0] / 1e3, 0.0
    arrivals = []
    for i in range(20_000):
        at_s += random.expovariate(load / service_s)
        arrivals.append(Arrival(i, at_s, 512, 1, parts=((i, 513),), own=513))
    fleet, spans = run(arrivals, exact=False)
    report = fleet.report
    waits_s = report.ttft.mean - service_s - 2 * HOP_S
    assert waits_s == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.06)
    inside = sum(end - begin for begin, end in spans) / report.ended_s
    assert inside == pytest.approx(report.finished / report.ended_s * report.whole.mean, rel=1e-3)
    assert report.busy == pytest.approx(load, rel=0.02)
