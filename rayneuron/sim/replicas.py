"""How many engines a fleet has while it runs: the policy of a model's autoscaler, its delays, and what starts take."""

from __future__ import annotations

from collections.abc import Callable

from rayneuron.policies import scaling
from rayneuron.policies.starts import expected_s, learned
from rayneuron.sim.clock import Clock
from rayneuron.sim.parts import FleetNode
from rayneuron.sim.setup import Elastic


class FleetSize:
    """`nodes`: those there are, which `opens` and `closes` change. `waits`: ms of work that gateways hold back."""

    def __init__(
        self,
        clock: Clock,
        elastic: Elastic,
        nodes: dict[int, FleetNode],
        opens: Callable[[], None],
        closes: Callable[[FleetNode], None],
        waits: Callable[[], float],
    ) -> None:
        self.clock, self.elastic, self._nodes = clock, elastic, nodes
        self._opens, self._closes, self._waits = opens, closes, waits
        self._parts = dict(elastic.parts)
        self._coming = self._called_off = 0
        self._wished_since_s: float | None = None
        self._more = False

    def look(self) -> None:
        """Bring or dismiss some, if it is time."""
        staying = [node for node in self._nodes.values() if node.host.accepting]
        wanted = self._wanted(staying) - len(staying) - self._coming
        now_s, more = self.clock.now_s, wanted > 0
        if not wanted or (self._wished_since_s is not None and more != self._more):
            self._wished_since_s = None
        if wanted:
            self._more = more
            since_s = self._wished_since_s = now_s if self._wished_since_s is None else self._wished_since_s
            if now_s - since_s >= (self.elastic.up_s if more else self.elastic.down_s):
                self._bring(wanted) if more else self._dismiss(staying, -wanted)
                self._wished_since_s = None
        for node in [node for node in self._nodes.values() if not node.host.accepting and node.host.idle and not node.under_way]:
            self._closes(node)

    def _wanted(self, staying: list[FleetNode]) -> int:
        elastic, loads = self.elastic, [node.host.pressure(0) for node in staying]
        used = [1 - load.kv_free / node.host.scheduler.blocks.total_tokens for node, load in zip(staying, loads, strict=True)]
        backlog_ms = [*(load.backlog_ms for load in loads), self._waits()]
        return scaling.replicas(backlog_ms, used, elastic.target_ms, elastic.least, elastic.most)

    def _bring(self, some: int) -> None:
        took_s = expected_s(self._parts, self.elastic.weight_bytes)
        self._coming += some
        for _ in range(some):
            self.clock.at(self.clock.now_s + took_s, self._started, self._parts or {"guessed": took_s})

    def _started(self, parts: dict[str, float]) -> None:
        if self._called_off:
            self._called_off -= 1
            return
        self._coming -= 1
        self._parts = learned(self._parts, parts)
        self._opens()

    def _dismiss(self, staying: list[FleetNode], some: int) -> None:
        """Who has not come yet is called off; then those with the least to do take no more, and go when they are done."""
        off = min(some, self._coming)
        self._coming, self._called_off, some = self._coming - off, self._called_off + off, some - off
        for node in sorted(staying, key=lambda node: (len(node.host.scheduler.running), -node.number))[:some]:
            node.host.accepting = False
