"""simulate: a fleet of engines on a virtual clock, with the scheduler, gateway and policies that would serve it."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rayneuron.cli import deployment, times

_LOAD = "rayneuron.serve.scaler:TokenLoad"


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("simulate", help="run a fleet of such engines on a virtual clock", conflict_handler="resolve")
    deployment.add(command)
    command.add_argument("--profile", metavar="FILE", help="what its steps take: profile.json of a compile cache, or guess (measured here)")
    times.add(command)
    command.add_argument("--requests", type=int, metavar="N", help="only the first N (all of a trace, 1000 made up)")
    command.add_argument("--rate", type=float, default=1.0, help="requests a second and engine, where they have no times (1)")
    command.add_argument("--nodes", type=int, default=1, help="engines (1)")
    command.add_argument("--prefill-nodes", type=int, metavar="N", help="of the prefill pool, at first, if there is one (as it says)")
    command.add_argument("--start-s", type=float, metavar="S", help="what an engine takes to start, where they are scaled (guessed)")
    command.add_argument("--gateways", type=int, default=1, help="before them (1)")
    command.add_argument("--late-ms", type=float, default=0.0, metavar="MS", help="how late they hear how busy an engine is (0)")
    command.add_argument("--route", choices=("kv", "least", "turns"), default="kv", help="by cost and prefixes, by cost, or in turn (kv)")
    command.add_argument("--fault", action="append", default=[], metavar="kill:N@S", help="N engines die after S seconds; may be repeated")
    command.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="a first token should take no longer (any)")
    command.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="those after it, on average of an answer (any)")
    command.add_argument("--exact", action="store_true", help="every step by itself, not leaping over those that are alike")
    command.add_argument("--json", metavar="FILE", help="write all figures there")
    command.add_argument("--plot", metavar="FILE.png", help="draw them (rayneuron[plots])")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron.sim import plots, room
    from rayneuron.sim.fleet import Simulation
    from rayneuron.sim.setup import Setup

    times.check(args)
    if args.plot is not None:
        plots.check()
    config = times.only(deployment.read(args).deployments)
    capacity, profile = _times(args, config)
    setup = Setup(
        capacity, profile, args.nodes, args.gateways, args.route, config.caches_prefixes(capacity.length),
        load_late_s=args.late_ms / 1e3, kills=tuple(_kill(fault) for fault in args.fault), exact=args.exact,
        slo_ttft_s=times.seconds("--slo-ttft-ms", args.slo_ttft_ms), slo_tpot_s=times.seconds("--slo-tpot-ms", args.slo_tpot_ms),
        pool=_pool(args, config), elastic=_elastic(args, config, _LOAD, ("target_ms",))[0],
    )  # fmt: skip
    room.check(setup)
    most = args.requests or (1000 if args.trace is None else None)
    arrivals = times.arrivals(args, args.rate * args.nodes, most, capacity.block, capacity.length)
    report = Simulation(setup, arrivals, args.seed).run()
    if not report.arrived:
        raise times.nothing_fits(capacity.length)
    engines = args.nodes if setup.elastic is None else report.engines
    report.usd_per_hour = _usd(args, config, engines + report.prefill_engines)
    print(report.text())
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report.json(), indent=1))
    if args.plot is not None:
        plots.draw(report, Path(args.plot))


def _times(args: argparse.Namespace, config: Any) -> Any:
    from rayneuron.errors import ConfigError
    from rayneuron.placement import instances

    if args.profile is None:
        return times.measured(config)
    if args.profile != times.GUESS:
        return times.said(config, Path(args.profile))
    if config.instance is None:
        raise ConfigError("--profile guess: say of which instance type with --instance inf2.48xlarge")
    times.warn(config.instance)
    return times.guessed(config, instances.instance(config.instance))


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


def _usd(args: argparse.Namespace, config: Any, engines: float) -> float | None:
    """An hour of the nodes that have so many engines; None where nobody has said of what type they are."""
    from math import ceil

    from rayneuron.placement import instances, prices

    price = prices.priced(args.price).get(config.instance or "")
    if price is None:
        return None
    cores = engines * config.tensor_parallel * config.pipeline_parallel
    return float(price.usd * ceil(cores / instances.instance(config.instance).cores))


def _kill(said: str) -> tuple[float, int, float]:
    from rayneuron.errors import ConfigError

    if (found := re.fullmatch(r"kill:([1-9][0-9]*)@([0-9]+(?:\.[0-9]+)?)", said)) is None:
        raise ConfigError(f"--fault {said}: write kill:N@S, so many engines after so many seconds: kill:3@60")
    return float(found[2]), int(found[1]), 10.0
