"""How many of which instances meet a goal at the least price: fleets of each are simulated, more and more of them until it is met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from rayneuron.engine.buckets import Capacity
from rayneuron.policies.cost import Costs
from rayneuron.sim.fleet import Simulation
from rayneuron.sim.report import Distribution, FleetReport
from rayneuron.sim.setup import Setup
from rayneuron.sim.workload import Arrival
from rayneuron.types import Profile

_FULL = 0.98  # of the time of all engines: fewer than it takes to do the work are not tried


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """A node of some type: `engines` on it, what one can hold and what its steps take, and US dollars an hour of the node."""

    name: str
    engines: int
    usd: float
    capacity: Capacity
    profile: Profile
    caching: bool = False
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """A first token and those after it in such a time, for such a share of all requests (None: any time)."""

    ttft_s: float | None
    tpot_s: float | None
    share: float


@dataclass(frozen=True, slots=True)
class Sized:
    """The fewest nodes of a candidate that meet the goal, and how they did; without a report, why there are none."""

    candidate: NodeChoice
    nodes: int
    report: FleetReport | None
    why: str = ""

    @property
    def usd(self) -> float:
        """An hour of all nodes."""
        return self.nodes * self.candidate.usd if self.report is not None else inf


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What a request takes that is alone on an engine, for the share of them that a goal is about: nothing is faster."""

    ttft_s: float
    tpot_s: float


def size(
    candidates: Sequence[NodeChoice], arrivals: Callable[[NodeChoice], Iterable[Arrival]], goal: Goal, most: int, seed: int = 0
) -> list[Sized]:
    """Each candidate's fewest nodes, the cheapest first. `arrivals`: of a candidate, the same in every call. `most`: nodes.

    Who cannot be cheaper than the cheapest so far is not tried to its end.
    """
    found: list[Sized] = []
    least = inf
    for candidate in sorted(candidates, key=lambda c: c.usd / c.engines):
        found.append(_fewest(candidate, arrivals, goal, most, least, seed))
        least = min(least, found[-1].usd)
    return sorted(found, key=lambda sized: (sized.usd, sized.candidate.name))


def alone(candidate: NodeChoice, arrivals: Iterable[Arrival], share: float) -> Unloaded:
    """Of all that fit its engines."""
    costs, ttft, tpot = Costs(candidate.profile), Distribution(), Distribution()
    for arrival in arrivals:
        ttft.add(costs.prefill(arrival.prompt, 0)[0] / 1e3)
        tpot.add(costs.decode_ms(1, arrival.prompt + arrival.output) / 1e3)
    return Unloaded(ttft.at(share), tpot.at(share))


def _fewest(
    candidate: NodeChoice, arrivals: Callable[[NodeChoice], Iterable[Arrival]], goal: Goal, most: int, least_usd: float, seed: int
) -> Sized:
    first = alone(candidate, arrivals(candidate), goal.share)
    if not candidate.caching and (first.ttft_s > (goal.ttft_s or inf) or first.tpot_s > (goal.tpot_s or inf)):
        return Sized(candidate, 0, None, f"alone on an engine: first token {1e3 * first.ttft_s:.0f} ms, then {1e3 * first.tpot_s:.1f} ms")
    affordable = min(most, int(least_usd / candidate.usd)) if least_usd < inf else most
    below, nodes = 0, 1 if candidate.caching else _needed(candidate, arrivals(candidate))
    met: tuple[int, FleetReport] | None = None
    while met is None:
        if nodes > affordable:
            dear = affordable < most
            return Sized(candidate, nodes, None, "dearer than another" if dear else f"{most} nodes are not enough")
        report = _run(candidate, nodes, arrivals(candidate), goal, seed)
        if _meets(report, goal):
            met = nodes, report
        else:
            below, nodes = nodes, min(2 * nodes, affordable) if nodes < affordable else affordable + 1
    while met[0] - below > 1:
        report = _run(candidate, middle := (below + met[0]) // 2, arrivals(candidate), goal, seed)
        if _meets(report, goal):
            met = middle, report
        else:
            below = middle
    return Sized(candidate, *met)


def _needed(candidate: NodeChoice, arrivals: Iterable[Arrival]) -> int:
    """Nodes without which there is not enough time for the work."""
    costs, work_ms, last_s = Costs(candidate.profile), 0.0, 0.0
    for arrival in arrivals:
        work_ms += costs.work_ms(arrival.prompt, 0, arrival.output)
        last_s = arrival.at_s
    return max(1, ceil(_FULL * work_ms / (1e3 * last_s * candidate.engines))) if last_s else 1


def _run(candidate: NodeChoice, nodes: int, arrivals: Iterable[Arrival], goal: Goal, seed: int) -> FleetReport:
    setup = Setup(
        candidate.capacity, candidate.profile, nodes * candidate.engines, caching=candidate.caching, slo_ttft_s=goal.ttft_s,
        slo_tpot_s=goal.tpot_s,
    )  # fmt: skip
    report = Simulation(setup, arrivals, seed).run()
    report.usd_per_hour = nodes * candidate.usd
    return report


def _meets(report: FleetReport, goal: Goal) -> bool:
    return report.good >= goal.share * report.arrived
