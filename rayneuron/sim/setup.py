"""What a simulated fleet is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from rayneuron.engine.buckets import Capacity
from rayneuron.policies.choice import RING_BLOCKS
from rayneuron.policies.desk_limits import DeskLimits
from rayneuron.policies.fairness import AccountShare
from rayneuron.policies.pool_sizes import PromptTokens
from rayneuron.policies.scaling import TARGET_MS
from rayneuron.sim.workload import Arrival
from rayneuron.types import Profile

Route = Literal["kv", "least", "turns"]  # by cost and prefixes; by cost alone; one after another


@dataclass(frozen=True, slots=True)
class Elastic:
    """How many engines there are: looked at every second, and changed where the same was wished for all of `up_s` or `down_s`.

    `target_ms`: of `policies.scaling.replicas`, where they do not only compute prompts. `parts`: seconds of a start (`policies.starts`),
    none: guessed of `weight_bytes`.
    """

    least: int
    most: int
    target_ms: float = TARGET_MS
    up_s: float = 30.0
    down_s: float = 600.0
    parts: Mapping[str, float] = field(default_factory=dict)
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """Engines that only compute prompts. `local_tokens`: as `policies.pools.choose`; `tail_s`: of the copy of a prompt's last chunk.
    `elastic`: their number changes, as `sizes` has it."""

    nodes: int
    capacity: Capacity
    profile: Profile
    local_tokens: int | None = None
    tail_s: float = 0.002
    elastic: Elastic | None = None
    sizes: PromptTokens = field(default_factory=PromptTokens)


@dataclass(frozen=True)
class Setup:
    """A fleet of equal engines. `hop_s`: from a gateway to an engine or back. An engine says how busy it is, `load_late_s` after it was so,
    to all gateways when an order has come or ended, and with a step if that is `load_s` ago.

    `event_loss`: share of the batches of KV events that get lost. `kills`: (when, so many engines, until they are back); `slows`: (when, so
    many engines, how many times as long their steps take, for so long). Where `exact`, every step is a call of its own.
    `slo_ttft_s`, `slo_tpot_s`: what the first token and those after it should take at most.
    """

    capacity: Capacity
    profile: Profile
    nodes: int = 1
    gateways: int = 1
    route: Route = "kv"
    caching: bool = True
    limits: DeskLimits = field(default_factory=DeskLimits)
    shares: Mapping[str, AccountShare] = field(default_factory=dict)
    hop_s: float = 0.0005
    load_s: float = 0.05
    load_late_s: float = 0.0
    event_loss: float = 0.0
    kills: tuple[tuple[float, int, float], ...] = ()
    slows: tuple[tuple[float, int, float, float], ...] = ()
    exact: bool = False
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    pool: PoolSetup | None = None
    elastic: Elastic | None = None

    @cached_property
    def unasked(self) -> bool:
        """Whether nobody comes back for what was its own: as a sequence does that is preempted, or moves."""
        return self.pool is None and not self.kills and self.capacity.holds_all

    def hashes(self, arrival: Arrival) -> tuple[tuple[bytes, ...], int]:
        """Of the blocks of a request that need names, and how many these are: those that others have too, and one more, so that gateways
        hear of an engine with none but its own. Behind them, of those by which a ring tells prompts. None where no prefix is kept."""
        if not self.caching:
            return (), 0
        block = self.capacity.block
        named = (arrival.prompt + arrival.output - (arrival.own if self.unasked else 0)) // block + 1
        return arrival.hashes(block, named if named > RING_BLOCKS else RING_BLOCKS), named
