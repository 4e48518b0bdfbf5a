"""How many of which instances meet a goal at the least price: fleets of each are simulated, more and more of them until it is met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from rayneuron.engine.buckets import Capacity
from rayneuron.policies.cost import Costs
from rayneuron.policies.desk_limits import DeskLimits
from rayneuron.sim.fleet import Simulation
from rayneuron.sim.report import Distribution, FleetReport
from rayneuron.sim.setup import Setup
from rayneuron.sim.workload import Arrival
from rayneuron.types import Profile

_FULL = 0.98  # of the time of all engines: fewer than it takes to do the work are not tried
DEARER = "dearer than another"


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


class Sizing:
    """A search. `arrivals`: of a candidate, the same in every call. `most`: nodes. `limits`: of the gateway's desk."""

    def __init__(
        self,
        arrivals: Callable[[NodeChoice], Iterable[Arrival]],
        goal: Goal,
        most: int,
        seed: int = 0,
        limits: DeskLimits = DeskLimits(),  # noqa: B008 (frozen)
    ) -> None:
        self._arrivals, self._goal, self._most, self._seed, self._limits = arrivals, goal, most, seed, limits

    def of(self, candidates: Sequence[NodeChoice]) -> list[Sized]:
        """Each candidate's fewest nodes, the cheapest first. Who cannot be cheaper than the cheapest so far is not tried to its end."""
        found: list[Sized] = []
        least = inf
        for candidate in sorted(candidates, key=lambda c: c.usd / c.engines):
            found.append(self._fewest(candidate, least))
            least = min(least, found[-1].usd)
        return sorted(found, key=lambda sized: (sized.usd, sized.candidate.name))

    def run(self, candidate: NodeChoice, nodes: int) -> FleetReport:
        """So many of them, with all requests."""
        setup = Setup(
            candidate.capacity, candidate.profile, nodes * candidate.engines, caching=candidate.caching, limits=self._limits,
            slo_ttft_s=self._goal.ttft_s, slo_tpot_s=self._goal.tpot_s,
        )  # fmt: skip
        report = Simulation(setup, self._arrivals(candidate), self._seed).run()
        report.usd_per_hour = nodes * candidate.usd
        return report

    def alone(self, candidate: NodeChoice) -> Unloaded:
        """Of all that fit its engines."""
        costs, ttft, tpot = Costs(candidate.profile), Distribution(), Distribution()
        for arrival in self._arrivals(candidate):
            ttft.add(costs.prefill(arrival.prompt, 0)[0] / 1e3)
            if arrival.output > 1:
                tpot.add(_decode_s(costs, arrival) / (arrival.output - 1))
        return Unloaded(ttft.at(self._goal.share), tpot.at(self._goal.share))

    def _fewest(self, candidate: NodeChoice, least_usd: float) -> Sized:
        goal, most = self._goal, self._most
        first = self.alone(candidate)
        if not candidate.caching and (first.ttft_s > (goal.ttft_s or inf) or first.tpot_s > (goal.tpot_s or inf)):
            said = f"alone on an engine: first token {1e3 * first.ttft_s:.0f} ms, then {1e3 * first.tpot_s:.1f} ms"
            return Sized(candidate, 0, None, said)
        affordable = min(most, int(least_usd / candidate.usd)) if least_usd < inf else most
        least = 1 if candidate.caching else self._needed(candidate)
        if least > affordable:
            return Sized(candidate, least, None, DEARER if affordable < most else f"{least} nodes or more are needed for the work alone")
        below, nodes = least - 1, least
        met: tuple[int, FleetReport] | None = None
        while met is None:
            report = self.run(candidate, nodes)
            if self._meets(report):
                met = nodes, report
            elif nodes < affordable:
                below, nodes = nodes, min(2 * nodes, affordable)
            else:
                return Sized(candidate, nodes, None, DEARER if affordable < most else _missed(nodes, report))
        while met[0] - below > 1:
            report = self.run(candidate, middle := (below + met[0]) // 2)
            if self._meets(report):
                met = middle, report
            else:
                below = middle
        return Sized(candidate, *met)

    def _needed(self, candidate: NodeChoice) -> int:
        """Nodes without which there is not enough time for the work of those who are to meet the goal, be they the ones with the least: all
        of it is done when the last of them is. What no goal is about may come any time later."""
        costs, goal, works, until_s = Costs(candidate.profile), self._goal, list[float](), 0.0
        for arrival in self._arrivals(candidate):
            tpot_s = inf if goal.tpot_s is None else goal.tpot_s
            until_s = max(until_s, arrival.at_s + (goal.ttft_s or inf) + (tpot_s * (arrival.output - 1) if arrival.output > 1 else 0.0))
            works.append(costs.work_ms(arrival.prompt, 0, arrival.output) / 1e3)
        if until_s == inf:
            return 1
        counted = sorted(works)[: ceil(goal.share * len(works))]
        return max(1, ceil(_FULL * sum(counted) / (until_s * candidate.engines)))

    def _meets(self, report: FleetReport) -> bool:
        return report.good >= self._goal.share * report.arrived


def _decode_s(costs: Costs, arrival: Arrival) -> float:
    """All tokens of an output behind its first, alone."""
    lengths = costs.profile.lengths
    return sum([n * costs.decode_ms(1, lengths[at]) for at, n in costs.stretches(arrival.prompt, arrival.output - 1)]) / 1e3


def _missed(nodes: int, report: FleetReport) -> str:
    ttft, tpot = 1e3 * report.ttft.at(0.95), 1e3 * report.tpot.at(0.95)
    met, refused = report.good / max(1, report.arrived), report.refused.total()
    return f"{nodes} nodes are not enough: {met:.1%} of the requests, p95 {ttft:.0f} ms, then {tpot:.1f} ms, {refused} refused"
