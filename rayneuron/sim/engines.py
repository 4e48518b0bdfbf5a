"""The engines of a fleet: what orders come there, what each step of theirs tells the gateways, how they come, die and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from random import Random

from rayneuron.news import KvNews, Pressure
from rayneuron.policies.cost import Costs
from rayneuron.sim.clock import Clock
from rayneuron.sim.host import ExactHost, Gained
from rayneuron.sim.jump import JumpHost
from rayneuron.sim.parts import FleetCall, FleetGateway, FleetNode, within
from rayneuron.sim.pool import Asking, PrefillPool
from rayneuron.sim.report import FleetReport
from rayneuron.sim.setup import Setup

_FOUND_S = 0.01  # until the death of an engine is noticed


class FleetEngines:
    """`takes`: is given what sequences have gained; `pumps`: a gateway that may have something to send; `mourns`: a gateway that finds an
    engine dead."""

    def __init__(
        self,
        clock: Clock,
        setup: Setup,
        costs: Costs,
        gateways: Sequence[FleetGateway],
        random: Random,
        pool: PrefillPool | None,
        takes: Callable[[Gained], None],
        pumps: Callable[[FleetGateway], None],
        mourns: Callable[[FleetGateway, int], None],
    ) -> None:
        self.clock, self.setup, self.nodes = clock, setup, dict[int, FleetNode]()
        self._costs, self._gateways, self._random, self._pool = costs, gateways, random, pool
        self._takes, self._pumps, self._mourns = takes, pumps, mourns
        self._by_host: dict[ExactHost, FleetNode] = {}
        self._numbers = count()
        self._busy_s = 0.0  # of those who have gone
        self._lives: list[tuple[float, float]] = []  # of the same: from when until when they were there
        self._cached_tokens = 0
        for _ in range(setup.nodes):
            self.open()
        for when_s, *kill in setup.kills:
            clock.at(when_s, self._kill, *kill)
        for when_s, *slow in setup.slows:
            clock.at(when_s, self._slow, *slow)

    def open(self) -> None:
        """One more is there."""
        setup, number, now_s = self.setup, next(self._numbers), self.clock.now_s
        host = (ExactHost if setup.exact else JumpHost)(self.clock, setup.capacity, self._costs, self._stepped, setup.caching)
        self.nodes[number] = self._by_host[host] = FleetNode(number, host, now_s)
        if self._pool is not None:
            host.scheduler.prefills = Asking(self._pool, host)
        for gateway in self._gateways:
            tokens, load = host.scheduler.blocks.total_tokens, host.pressure(0)
            gateway.desk.join(number, f"n{number}", setup.profile, tokens, load, now_s, setup.pool is not None)

    def order(self, node: FleetNode, call: FleetCall, number: int) -> None:
        """A gateway's order comes, its `number`-th to this engine."""
        setup, now_s = self.setup, self.clock.now_s
        node.seen[call.gateway.number] = number
        node.host.submit(call.key, call.arrival.prompt, call.arrival.output, call.hashes[: call.named], len(call.replay.ids))
        heard_s = now_s + setup.hop_s + setup.load_late_s
        for i, gateway in enumerate(self._gateways) if setup.route != "turns" else ():
            self.clock.at(heard_s, self._pressed, gateway, node.number, self._pressure(node, i))

    def _stepped(self, host: ExactHost, told: list[Gained]) -> None:
        node, now_s, setup = self._by_host[host], self.clock.now_s, self.setup
        there_s, turns = now_s + setup.hop_s, setup.route == "turns"
        news = host.news() if setup.route == "kv" else None
        ended = any([progress.ended for progress in told]) if told else False
        for i, gateway in enumerate(self._gateways):
            new = news if news is None or not setup.event_loss or self._random.random() >= setup.event_loss else None
            due = not turns and (ended or now_s - node.told.get(i, -1.0) >= setup.load_s)
            load = self._pressure(node, i) if due else None
            if load is not None and setup.load_late_s:
                self.clock.at(there_s + setup.load_late_s, self._pressed, gateway, node.number, load)
                load = None
            first, told = told, []  # the first message is for all calls
            if first or new is not None or load is not None:
                self.clock.at(there_s, self._told, gateway, node.number, first, new, load)

    def _pressure(self, node: FleetNode, i: int) -> Pressure:
        node.told[i] = self.clock.now_s
        return node.host.pressure(node.seen.get(i, 0))

    def _told(self, gateway: FleetGateway, worker: int, told: list[Gained], news: KvNews | None, load: Pressure | None) -> None:
        """What one step gave, in one message."""
        for progress in told:
            self._takes(progress)
        if news is not None and worker in self.nodes and not gateway.desk.events(worker, news):  # it asks for everything
            gateway.desk.events(worker, self.nodes[worker].host.everything())
        if load is not None:
            self._pressed(gateway, worker, load)

    def _pressed(self, gateway: FleetGateway, worker: int, load: Pressure) -> None:
        if worker in self.nodes:
            gateway.desk.heard(worker, load, self.clock.now_s)
            if gateway.desk.queue.waiting:
                self._pumps(gateway)

    def _kill(self, some: int, back_s: float) -> None:
        now_s = self.clock.now_s
        for number in self._some(some):
            node = self.nodes.pop(number)
            self.clock.at(now_s + self.setup.hop_s, self._told, self._gateways[0], number, node.host.kill(), None, None)
            self._count(node)
            for gateway in self._gateways:
                self.clock.at(now_s + _FOUND_S, self._mourns, gateway, number)
            self.clock.at(now_s + back_s, self.open)

    def _slow(self, some: int, times: float, for_s: float) -> None:
        nodes = [self.nodes[number] for number in self._some(some)]
        for factor, after_s in ((times, 0.0), (1.0, for_s)):
            for node in nodes:
                self.clock.at(self.clock.now_s + after_s, node.host.pace, factor)

    def _some(self, some: int) -> list[int]:
        """Which engines a fault hits."""
        return self._random.sample(sorted(self.nodes), min(some, len(self.nodes)))

    def gone(self, node: FleetNode) -> None:
        """An engine that took no more orders has done those it had; where a gateway has not heard so yet, it stays."""
        if any(gateway.desk.chooser.workers.all[node.number].keys for gateway in self._gateways):
            return
        self.nodes.pop(node.number)
        self._count(node)
        for gateway in self._gateways:
            self._mourns(gateway, node.number)

    def _count(self, node: FleetNode) -> None:
        del self._by_host[node.host]
        self._busy_s += node.host.busy_s
        self._lives.append((node.since_s, self.clock.now_s))
        self._cached_tokens += node.host.cached_tokens

    def tell(self, report: FleetReport) -> None:
        """What they have done, those who died included; of those who lived to the end, how much longer one was busy than the others."""
        each = [node.host.busy_s for node in self.nodes.values()]
        report.busiest = max(each) * len(each) / sum(each) if sum(each) else 0.0
        for node in self.nodes.values():
            self._count(node)
        report.cached_tokens += self._cached_tokens
        engine_s = within(self._lives, report.seconds)
        report.busy = self._busy_s / engine_s if engine_s else 0.0
        report.engines = engine_s / report.seconds if report.seconds else 0.0
