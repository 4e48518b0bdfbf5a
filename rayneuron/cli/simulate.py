"""simulate: a fleet of engines on a virtual clock, with the scheduler, gateway and policies that would serve it."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rayneuron.cli import deployment, times, traffic

_LOAD = "rayneuron.serve.scaler:TokenLoad"
FLAP_S = 10.0  # an engine that flaps is away for half of it, and there for half of it


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("simulate", help="run a fleet of such engines on a virtual clock", conflict_handler="resolve")
    deployment.add(command)
    command.add_argument("--profile", metavar="FILE", help="what its steps take: profile.json of a compile cache, or guess (measured here)")
    traffic.add(command)
    times.add_prices(command)
    command.add_argument("--requests", type=int, metavar="N", help="only the first N (all of a trace, 1000 made up)")
    command.add_argument("--rate", type=float, help="requests a second and engine, where they have no times (1)")
    command.add_argument("--nodes", type=int, help="engines (as the file says, or 1)")
    command.add_argument("--prefill-nodes", type=int, metavar="N", help="of the prefill pool, at first, if there is one (as it says)")
    command.add_argument("--start-s", type=float, metavar="S", help="what an engine takes to start, scaled (guessed) or killed (10)")
    command.add_argument("--gateways", type=int, help="before them (as the file says, or 1)")
    command.add_argument("--hop-ms", type=float, default=0.5, metavar="MS", help="from a gateway to an engine, or back (0.5)")
    command.add_argument("--late-ms", type=float, default=0.0, metavar="MS", help="how late they hear how busy an engine is (0)")
    command.add_argument("--loss", type=float, default=0.0, metavar="X", help="share of the news of prefixes that get lost (0)")
    command.add_argument("--route", choices=("kv", "least", "turns"), default="kv", help="by cost and prefixes, by cost, or in turn (kv)")
    fault = "N engines die after S seconds and are back at E (--start-s later); flap:N@S-E: over and over; slow:NxF@S-E: F times as slow"
    command.add_argument("--fault", action="append", default=[], metavar="kill:N@S[-E]", help=f"{fault}; may be repeated")
    command.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="a first token should take no longer (any)")
    command.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="those after it, on average of an answer (any)")
    command.add_argument("--exact", action="store_true", help="every step by itself, not leaping over those that are alike")
    command.add_argument("--json", metavar="FILE", help="write all figures there")
    command.add_argument("--records", metavar="FILE.csv", help="write there what each request was like and took")
    command.add_argument("--plot", metavar="FILE.png", help="draw them (rayneuron[plots])")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron.sim import plots, records, room
    from rayneuron.sim.fleet import Simulation

    times.check(args)
    traffic.check(args)
    if args.plot is not None:
        plots.check()
    file = deployment.read(args)
    config = times.only(file, args.application)
    setup = _setup(args, file, config)
    room.check(setup)
    most = args.requests or (1000 if args.trace is None else None)
    c = setup.capacity
    arrivals = traffic.arrivals(args, (args.rate or 1.0) * setup.nodes, most, c.block, c.length)
    simulation = Simulation(setup, arrivals, args.seed)
    with records.kept(simulation.report, args.records):
        report = simulation.run()
    if not report.arrived:
        raise traffic.nothing(arrivals)
    report.usd_per_hour = _usd(args, config, setup, report)
    report.shares_lost = arrivals.shared and not setup.caching
    print(report.text())
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report.json(), indent=1))
    if args.plot is not None:
        plots.draw(report, Path(args.plot))


def _setup(args: argparse.Namespace, file: Any, config: Any) -> Any:
    from rayneuron.sim.setup import Setup

    capacity, profile = _times(args, config)
    elastic = _elastic(args, config, _LOAD, ("target_ms",))[0]
    nodes = args.nodes or (elastic.least if elastic is not None else config.serving.num_replicas or 1)
    limits, shares, gateways = times.desk(file, args.gateways)
    return Setup(
        capacity, profile, nodes, gateways, args.route, config.caches_prefixes(capacity.length), limits, shares, args.hop_ms / 1e3,
        load_late_s=args.late_ms / 1e3, event_loss=args.loss, exact=args.exact, **_faults(args, nodes, elastic),
        slo_ttft_s=times.seconds("--slo-ttft-ms", args.slo_ttft_ms), slo_tpot_s=times.seconds("--slo-tpot-ms", args.slo_tpot_ms),
        pool=_pool(args, config), elastic=elastic,
    )  # fmt: skip


def _times(args: argparse.Namespace, config: Any) -> Any:
    from rayneuron.errors import ConfigError, DeviceError
    from rayneuron.placement import instances

    if args.profile is None:
        try:
            return times.measured(config)
        except (ConfigError, DeviceError) as wrong:
            if not config.few_graphs:
                raise
            raise ConfigError(f"{wrong}\n{times.HOW}") from wrong
    if args.profile != times.GUESS:
        return times.said(config, Path(args.profile))
    if config.instance is None:
        raise ConfigError("--profile guess: say of which instance type with --instance inf2.48xlarge")
    found = times.guessed(config, instances.instance(config.instance))
    times.warn(config.instance)
    return found


def _pool(args: argparse.Namespace, config: Any) -> Any:
    """The prefill pool of the file; None where it has none."""
    from rayneuron.errors import ConfigError
    from rayneuron.group_config import PREFILL_POLICY, prefill_of
    from rayneuron.policies.pool_sizes import PromptTokens
    from rayneuron.sim.setup import PoolSetup

    if config.pools is None:
        if args.prefill_nodes is not None:
            raise ConfigError("--prefill-nodes: the file has no pools; write pools: {prefill: {}}")
        return None
    pool, local = prefill_of(config), config.pools.local_tokens
    elastic, sizes = _elastic(args, pool, PREFILL_POLICY, ("tokens", "full"))
    first = pool.serving.most_replicas if elastic is None else elastic.least
    nodes = first if args.prefill_nodes is None else args.prefill_nodes
    capacity, profile = _times(args, pool)
    return PoolSetup(nodes, capacity, profile, None if local == "auto" else local, elastic=elastic, sizes=PromptTokens(**sizes))


def _elastic(args: argparse.Namespace, config: Any, function: str, names: tuple[str, ...]) -> tuple[Any, dict[str, float]]:
    """How the file lets the number of engines change, None where it does not; and what it says to the policy, which must be this one."""
    from rayneuron.errors import ConfigError
    from rayneuron.policies.scaling import TARGET_MS
    from rayneuron.sim.setup import Elastic

    how = config.serving.autoscaling
    if how is None:
        return None, {}
    if how.policy.policy_function != function:
        raise ConfigError(f"serving.autoscaling.policy: only {function} is simulated here; write it, or serving.num_replicas")
    said = dict(how.policy.policy_kwargs)
    for name, value in said.items():
        if name not in names or isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"policy_kwargs of {function}, {name}: {value}: write a number above 0 for {' or '.join(names)}")
    parts = {} if args.start_s is None else {"said": args.start_s}
    target_ms = said.get("target_ms", TARGET_MS)
    return Elastic(max(1, how.min_replicas), how.max_replicas, target_ms, how.upscale_delay_s, how.downscale_delay_s, parts), said


def _usd(args: argparse.Namespace, config: Any, setup: Any, report: Any) -> float | None:
    """An hour of the nodes that engines and those of the prefill pool are on; None where nobody has said of what type they are. Where their
    number does not change a node that is not full costs as much; else it is as many as there were on average."""
    from math import ceil

    from rayneuron.group_config import prefill_of
    from rayneuron.placement import instances, prices

    known, usd, kinds = prices.priced(args.price), 0.0, [(setup, report.engines, config)]
    if setup.pool is not None:
        kinds.append((setup.pool, report.prefill_engines, prefill_of(config)))
    for fleet, mean, one in kinds:
        price = known.get(one.instance or "")
        if price is None:
            return None
        each, cores = one.tensor_parallel * one.pipeline_parallel, instances.instance(one.instance).cores
        a_node = cores // each if each <= cores else cores / each
        usd += price.usd * (mean / a_node if fleet.elastic is not None else ceil(fleet.nodes / a_node))
    return usd


def _faults(args: argparse.Namespace, nodes: int, elastic: Any) -> dict[str, Any]:
    """`kills` and `slows` of a `Setup`."""
    from rayneuron.errors import ConfigError

    back_s, kills, slows = 10.0 if args.start_s is None else args.start_s, list[Any](), list[Any]()
    number = r"([0-9]+(?:\.[0-9]+)?)"
    for said in args.fault:
        parts = re.fullmatch(rf"(kill|flap|slow):([1-9][0-9]*)(?:x{number})?@{number}(?:-{number})?", said, re.ASCII)
        if parts is None or (parts[1] == "slow") != (parts[3] is not None) or (parts[1] != "kill" and parts[5] is None):
            what = "write kill:N@S or kill:N@S-E, so many engines from so many seconds on; flap:N@S-E or slow:NxF@S-E"
            raise ConfigError(f"--fault {said}: {what}")
        kind, some, from_s = parts[1], int(parts[2]), float(parts[4])
        to_s = from_s + back_s if parts[5] is None else float(parts[5])
        if to_s <= from_s:
            raise ConfigError(f"--fault {said}: it ends before it begins")
        if some > nodes and elastic is None:
            raise ConfigError(f"--fault {said}: there are {nodes} engines; write fewer, or more --nodes")
        if kind == "kill":
            kills.append((from_s, some, to_s - from_s))
        elif kind == "flap":
            kills += [(from_s + at * FLAP_S, some, FLAP_S / 2) for at in range(max(1, round((to_s - from_s) / FLAP_S)))]
        elif (factor := float(parts[3])) > 0:
            slows.append((from_s, some, factor, to_s - from_s))
        else:
            raise ConfigError(f"--fault {said}: write how many times as long their steps take, more than 0: slow:{some}x3@9-99")
    return {"kills": tuple(kills), "slows": tuple(slows)}
