"""What a simulated fleet keeps of its calls, gateways and engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayneuron.policies.desk import GatewayDesk
from rayneuron.policies.replay import Replay
from rayneuron.sim.host import ExactHost
from rayneuron.sim.workload import Arrival


@dataclass(slots=True, eq=False)
class FleetGateway:
    """A gateway, and whether it will look again by itself."""

    number: int
    desk: GatewayDesk
    ticking: bool = False


@dataclass(slots=True, eq=False)
class FleetCall:
    """A request on its way. `named`: how many of its `hashes` another may have too; `start_s`: predicted; `predicted_s`: when its first
    token was to come."""

    arrival: Arrival
    gateway: FleetGateway
    hashes: tuple[bytes, ...]
    named: int
    replay: Replay = field(default_factory=Replay)
    key: int = 0
    worker: int = -1  # where it is
    first_s: float = 0.0
    last_s: float = 0.0
    start_s: float = 0.0
    predicted_s: float = 0.0
    lost_on: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class FleetNode:
    """An engine, there since some time. `seen`, `told`: by gateway, the last order of it, and when it was told of the load."""

    number: int
    host: ExactHost
    since_s: float = 0.0
    under_way: int = 0  # orders that have not come yet
    seen: dict[int, int] = field(default_factory=dict)
    told: dict[int, float] = field(default_factory=dict)


def within(lives: Iterable[tuple[float, float]], end_s: float) -> float:
    """Seconds that engines were there until a run was over, of when each came and went: some come back when nobody asks any more."""
    return sum([max(0.0, min(until_s, end_s) - since_s) for since_s, until_s in lives])
