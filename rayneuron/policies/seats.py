"""What a host is seen as when its models are put to sleep and woken: nodes, seats, wishes; and what is decided. Plain data.

A seat is a run of cores that one replica has, from the moment it is planned until the node's ledger says that the cores are free again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# reserved: its cores are not free yet. moving: ready, to go once another seat of its model stands in for it.
SeatState = Literal["reserved", "starting", "ready", "moving", "draining", "stopping"]
COMING, GOING = ("reserved", "starting"), ("moving", "draining", "stopping")


@dataclass(frozen=True, slots=True)
class Seat:
    """One seat. `age_s`: in this state; `busy_s`: of work it has; `quiet_s`: since it had any."""

    key: str
    node: str
    first: int
    size: int
    state: SeatState
    age_s: float = 0.0
    busy_s: float = 0.0
    quiet_s: float = 0.0

    @property
    def cores(self) -> range:
        """Its cores."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True, slots=True)
class Wish:
    """One model. `size`: cores of a seat; `waiting`: requests that have no seat to go to, the first of them for `oldest_s`; `backlog_s`:
    of work; `rate`: requests a second; `quiet_s`: since the last one; `start_s`: what a start takes; `barred_s`: no start before that."""

    model: str
    size: int
    seats: tuple[Seat, ...] = ()
    min: int = 0
    max: int = 1
    pinned: bool = False
    priority: int = 0
    weight: float = 1.0
    idle_s: float = 300.0
    waiting: int = 0
    oldest_s: float = 0.0
    backlog_s: float = 0.0
    rate: float = 0.0
    quiet_s: float = math.inf
    start_s: float = 60.0
    barred_s: float = 0.0

    @property
    def least(self) -> int:
        """Seats it always has."""
        return max(self.min, 1) if self.pinned else self.min

    @property
    def standing(self) -> tuple[Seat, ...]:
        """Seats that are there to stay, or come."""
        return tuple(seat for seat in self.seats if seat.state not in GOING)


@dataclass(frozen=True, slots=True)
class HostNode:
    """One node. `free`: by its ledger, of the cores that are ours to give; `sizes`: whose runs are kept whole."""

    name: str
    total: int
    free: frozenset[int]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """As `gateway_config.Scaling` says them; `starts_at_once`: on a node."""

    min_life_s: float = 60.0
    cooldown_s: float = 30.0
    horizon_s: float = 600.0
    drain_s: float = 10.0
    target_ttft_s: float = 2.0
    starts_at_once: int = 2


@dataclass(frozen=True, slots=True)
class Bring:
    """A seat to plan. `instead`: of that seat, which goes once this one is ready."""

    model: str
    node: str
    first: int
    size: int
    instead: str | None = None


@dataclass(frozen=True, slots=True)
class Dismissal:
    """A seat that goes, and why: idle, fewer, moved, or for whom."""

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class HostDecision:
    """What is to be done now; for each model that has none when a seat will be ready (inf: nobody can say), and why it waits."""

    bring: tuple[Bring, ...]
    dismiss: tuple[Dismissal, ...]
    eta_s: Mapping[str, float]
    reason: Mapping[str, str]
