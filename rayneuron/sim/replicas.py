"""How many engines a fleet or a pool of it has while it runs: the policy of its autoscaler, its delays, and what starts take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf
from types import SimpleNamespace
from typing import Generic, TypeVar

from rayneuron.policies import scaling
from rayneuron.policies.pool_sizes import PromptTokens
from rayneuron.policies.starts import expected_s, learned
from rayneuron.sim.clock import Clock
from rayneuron.sim.parts import FleetGateway, FleetNode
from rayneuron.sim.setup import Elastic

Node = TypeVar("Node", bound=FleetNode)


class FleetSize(Generic[Node]):
    """`nodes`: those there are, which `opens` and `closes` change. `wants`: how many there should be, by those who stay."""

    def __init__(
        self,
        clock: Clock,
        elastic: Elastic,
        nodes: Mapping[int, Node],
        opens: Callable[[], None],
        closes: Callable[[Node], None],
        wants: Callable[[Elastic, list[Node]], int],
    ) -> None:
        self.clock, self.elastic, self._nodes = clock, elastic, nodes
        self._opens, self._closes, self._wants = opens, closes, wants
        self._parts = dict(elastic.parts)
        self._coming = self._called_off = 0
        self._wished_since_s: float | None = None
        self._more = False

    def look(self) -> float:
        """Bring or dismiss some, if it is time; before when another look does nothing, if nothing happens until then."""
        staying = [node for node in self._nodes.values() if node.host.accepting]
        wanted = max(self.elastic.least, min(self._wants(self.elastic, staying), self.elastic.most)) - len(staying) - self._coming
        now_s, more, due_s = self.clock.now_s, wanted > 0, inf
        if not wanted or (self._wished_since_s is not None and more != self._more):
            self._wished_since_s = None
        if wanted:
            self._more = more
            since_s = self._wished_since_s = now_s if self._wished_since_s is None else self._wished_since_s
            after_s = self.elastic.up_s if more else self.elastic.down_s
            due_s = since_s + ceil(after_s)
            if now_s - since_s >= after_s:
                self._bring(wanted) if more else self._dismiss(staying, -wanted)
                self._wished_since_s, due_s = None, now_s
        for node in [node for node in self._nodes.values() if not node.host.accepting and node.host.idle and not node.under_way]:
            self._closes(node)
            due_s = now_s
        return due_s

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

    def _dismiss(self, staying: list[Node], some: int) -> None:
        """Who has not come yet is called off; then those with the least to do take no more, and go when they are done."""
        off = min(some, self._coming)
        self._coming, self._called_off, some = self._coming - off, self._called_off + off, some - off
        for node in sorted(staying, key=lambda node: (len(node.host.scheduler.running), -node.number))[:some]:
            node.host.accepting = False


def by_load(elastic: Elastic, staying: list[FleetNode], gateways: Iterable[FleetGateway]) -> int:
    """Of engines that do all: as `serve.scaler` of what they say, and of the work that gateways hold back."""
    loads = [node.host.pressure(0) for node in staying]
    used = [1 - load.kv_free / node.host.scheduler.blocks.total_tokens for node, load in zip(staying, loads, strict=True)]
    backlog_ms = [*(load.backlog_ms for load in loads), sum(gateway.desk.queue.waiting_ms for gateway in gateways)]
    return scaling.replicas(backlog_ms, used, elastic.target_ms, elastic.least, elastic.most)


def by_prompts(sizes: PromptTokens, prompts: Mapping[int, tuple[float, float]]) -> int:
    """Of a prefill pool: by each one's tokens of prompts that are not computed yet, and the share of its KV that is kept for others."""
    said = {name: {number: both[at] for number, both in prompts.items()} for at, name in enumerate(("prompt_tokens", "kv_used"))}
    return sizes(SimpleNamespace(aggregated_metrics=said, target_num_replicas=len(prompts)))[0]
