"""Gateways with their desks before engines with their schedulers, and what lies between: requests on their way, and tokens back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from math import ceil, inf
from random import Random

from rayneuron.policies.choice import GatewayAsk
from rayneuron.policies.cost import Costs
from rayneuron.policies.desk import GatewayDesk, Send, TurnedAway
from rayneuron.policies.replay import Again, Fail, PassOn
from rayneuron.sim.clock import Clock
from rayneuron.sim.engines import FleetEngines
from rayneuron.sim.host import Gained
from rayneuron.sim.parts import FleetCall, FleetGateway
from rayneuron.sim.pool import PrefillPool
from rayneuron.sim.replicas import FleetSize, by_load
from rayneuron.sim.report import FleetReport
from rayneuron.sim.setup import Setup
from rayneuron.sim.workload import Arrival, Fitting

_TICK_S, _SAMPLE_S = 0.005, 1.0  # how often a gateway looks again while somebody waits, and the fleet is looked at
_HOLD_S = 0.1  # until a replay is offered anew where there is no replica


class Simulation:
    """Runs arrivals to their ends. All that is random comes of `seed`."""

    def __init__(self, setup: Setup, arrivals: Iterable[Arrival], seed: int = 0) -> None:
        self.setup = setup
        self.clock = Clock()
        self.report = FleetReport(slo_ttft_s=setup.slo_ttft_s, slo_tpot_s=setup.slo_tpot_s)
        if isinstance(arrivals, Fitting):
            self.report.left_out = arrivals.left_out
        self._random = Random(seed)
        self._costs = Costs(setup.profile)
        self._arrivals = iter(arrivals)
        self._gateways = [
            FleetGateway(i, GatewayDesk(setup.limits, Random(self._random.random()), setup.shares)) for i in range(setup.gateways)
        ]
        for gateway in self._gateways:  # and engines reckon with the same: what one has worked out, the others are asked for next
            gateway.desk.costs[setup.profile] = self._costs
        self._keys = count(1)
        self._ids = list(range(setup.capacity.length))  # of every answer, its first ones
        self._calls: dict[int, FleetCall] = {}  # by key
        self._turn, self._next_s = 0, 0.0
        self._pool = PrefillPool(self.clock, setup) if setup.pool is not None else None
        told = (self._take, self._pump, self._mourn)
        self._engines = FleetEngines(self.clock, setup, self._costs, self._gateways, self._random, self._pool, *told)
        self._nodes = self._engines.nodes
        made = (self._nodes, self._engines.open, self._engines.gone, lambda some, staying: by_load(some, staying, self._gateways))
        self._replicas = FleetSize(self.clock, setup.elastic, *made) if setup.elastic is not None else None

    def run(self) -> FleetReport:
        """To the end of the last request."""
        self._arrive_next()
        self.clock.at(_SAMPLE_S, self._sample)
        self.clock.run()
        (report := self.report).seconds = self.report.ended_s or self.clock.now_s  # who comes back later, or looks, is no part of it
        self._engines.tell(report)
        if self._pool is not None:
            self._pool.tell(report)
        return report

    @property
    def open(self) -> dict[str, int]:
        """What is not over: all 0 at the end."""
        left = {"calls": len(self._calls), "sequences": sum(node.host.sequences for node in self._nodes.values())}
        left["prompts"] = self._pool.open if self._pool is not None else 0
        for gateway in self._gateways:
            for name, number in gateway.desk.open.items():
                left[name] = left.get(name, 0) + number
        return left

    # Requests.

    def _arrive_next(self) -> None:
        if (arrival := next(self._arrivals, None)) is not None:
            self.clock.at(arrival.at_s, self._arrive, arrival)
        self._next_s = inf if arrival is None else arrival.at_s

    def _arrive(self, arrival: Arrival) -> None:
        self.report.arrived += 1
        gateway = self._gateways[arrival.number % len(self._gateways)]
        self._offer(FleetCall(arrival, gateway, *self.setup.hashes(arrival)))
        self._arrive_next()

    def _offer(self, call: FleetCall) -> None:
        arrival, setup, done = call.arrival, self.setup, len(call.replay.ids)
        prompt = arrival.prompt + done
        call.key = next(self._keys)
        self._calls[call.key] = call
        if setup.route == "turns":
            self._in_turn(call)
            return
        block, avoid, again = setup.capacity.block, call.lost_on, call.replay.attempt > 0
        known = call.hashes[: prompt // block] if setup.route == "kv" else ()
        most = None if arrival.most is None else arrival.most - done
        session = arrival.session if setup.route == "kv" else ""
        ask = GatewayAsk(call.key, arrival.account, prompt, most, 1, known, block, session, again=again, avoid=avoid)
        verdict = call.gateway.desk.offer(ask, self.clock.now_s)
        if isinstance(verdict, TurnedAway):
            del self._calls[call.key]
            if again:
                self.clock.at(self.clock.now_s + _HOLD_S, self._offer, call)
            else:
                self.report.refused[verdict.reason] += 1
            return
        call.start_s = self.clock.now_s + verdict.start_s
        self._pump(call.gateway)

    def _pump(self, gateway: FleetGateway, ticked: bool = False) -> None:
        now_s = self.clock.now_s
        if ticked:
            gateway.ticking = False
        for send in gateway.desk.next(now_s):
            self._sent(self._calls[send.key], send)
        for worker in gateway.desk.overdue(now_s) if self.setup.kills else ():
            self._mourn(gateway, worker)
        if gateway.desk.queue.waiting and not gateway.ticking:
            gateway.ticking = True
            self.clock.at(now_s + _TICK_S, self._pump, gateway, True)

    def _sent(self, call: FleetCall, send: Send) -> None:
        now_s, waited_s = self.clock.now_s, send.waited_s
        if not call.replay.attempt:
            self.report.waited.add(waited_s)
            call.predicted_s = now_s + send.terms.ttft_ms / 1e3
            if waited_s >= 1.0:
                self.report.start_off.add((call.start_s - (now_s - waited_s)) / waited_s)
        self._place(call, send.worker, send.number)

    def _in_turn(self, call: FleetCall) -> None:
        nodes = [number for number, node in self._nodes.items() if node.host.accepting]
        if not nodes:
            del self._calls[call.key]
            self.clock.at(self.clock.now_s + _HOLD_S, self._offer, call)
            return
        self._turn += 1
        self._place(call, nodes[self._turn % len(nodes)], 0)

    def _place(self, call: FleetCall, worker: int, number: int) -> None:
        call.replay.placed()
        call.worker = worker
        if self.setup.kills:
            call.lost_on |= {worker}
        if worker in self._nodes:
            self._nodes[worker].under_way += 1
        self.clock.at(self.clock.now_s + self.setup.hop_s, self._ordered, call, call.key, worker, number)

    # Engines.

    def _ordered(self, call: FleetCall, key: int, worker: int, number: int) -> None:
        if (node := self._nodes.get(worker)) is None:
            return
        node.under_way -= 1
        if key in self._calls:
            self._engines.order(node, call, number)

    # Tokens.

    def _take(self, progress: Gained) -> None:
        if (call := self._calls.get(progress.key)) is None:
            return
        now_s, replay, arrival = self.clock.now_s, call.replay, call.arrival
        ids = self._ids[progress.at : progress.at + progress.count]
        effect = replay.piece(replay.attempt, progress.at, ids, "length" if progress.ended else None)
        if not isinstance(effect, PassOn):
            return
        report = self.report
        if not call.first_s:
            call.first_s = now_s
            call.gateway.desk.began(call.key, None, now_s)
            report.ttft.add(ttft_s := now_s - arrival.at_s)
            if call.predicted_s:
                report.off.add(abs(call.predicted_s - now_s) / max(ttft_s, 1e-9))
            report.account(arrival.account).ttft.add(ttft_s)
        elif self.setup.exact:
            report.pause.add(now_s - call.last_s)
        call.last_s = now_s
        if effect.ends:
            self._done(call)

    def _done(self, call: FleetCall) -> None:
        arrival, ids, work_ms = call.arrival, call.replay.ids, self._costs.work_ms(call.arrival.prompt, 0, call.arrival.output)
        self.report.answered(arrival, len(ids), ids != self._ids[: arrival.output], call.first_s, self.clock.now_s, work_ms)
        self._forget(call)

    def _forget(self, call: FleetCall) -> None:
        del self._calls[call.key]
        if self.setup.route != "turns":
            call.gateway.desk.ended(call.key, len(call.replay.ids), self.clock.now_s)
            if call.gateway.desk.queue.waiting:
                self._pump(call.gateway)

    # Death.

    def _mourn(self, gateway: FleetGateway, worker: int) -> None:
        keys = gateway.desk.lost(worker, self.clock.now_s)
        if self.setup.route == "turns":  # of which no desk knows
            keys = [key for key, call in self._calls.items() if call.worker == worker and call.gateway is gateway]
        for key in keys:
            call = self._calls.pop(key)
            effect = call.replay.lost(call.replay.attempt, "crash")
            if isinstance(effect, Again):
                self.report.replays += 1
                self._offer(call)
            elif isinstance(effect, Fail):
                self.report.failed += 1
        self._pump(gateway)

    def _sample(self) -> None:
        rows = [node.host.sequences for node in self._nodes.values()]
        if sum(rows) >= len(rows) > 0:
            self.report.crowd.add(max(rows) * len(rows) / sum(rows))
        due_s = min([some.look() for some in (self._replicas, self._pool) if some is not None], default=inf)
        if self._next_s < inf or self._calls:
            idle_s = 0.0 if self._calls else min(due_s, self.clock.next_s) - self.clock.now_s  # until then nothing is seen
            self.clock.at(self.clock.now_s + max(_SAMPLE_S, ceil(idle_s)), self._sample)
