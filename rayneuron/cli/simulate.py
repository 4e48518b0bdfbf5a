"""simulate: a fleet of engines on a virtual clock, with the scheduler, gateway and policies that would serve it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rayneuron.cli import deployment


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("simulate", help="run a fleet of such engines on a virtual clock", conflict_handler="resolve")
    deployment.add(command)
    command.add_argument("--profile", metavar="FILE", help="what its steps take: profile.json of a compile cache (measured here)")
    command.add_argument("--trace", metavar="FILE", help="requests: a .csv as Azure's or a .jsonl as Mooncake's (made up)")
    command.add_argument("--scale", type=float, default=1.0, help="how many times as fast they come (1)")
    command.add_argument("--repeat", type=int, default=1, help="how many times over, one after another (1)")
    command.add_argument("--requests", type=int, metavar="N", help="only the first N (all of a trace, 1000 made up)")
    command.add_argument("--rate", type=float, default=1.0, help="made-up requests a second and engine (1)")
    command.add_argument("--prompt-tokens", type=int, default=512, help="of made-up requests, on average (512)")
    command.add_argument("--output-tokens", type=int, default=128, help="of made-up requests, on average (128)")
    command.add_argument("--nodes", type=int, default=1, help="engines (1)")
    command.add_argument("--gateways", type=int, default=1, help="before them (1)")
    command.add_argument("--route", choices=("kv", "least", "turns"), default="kv", help="by cost and prefixes, by cost, or in turn (kv)")
    command.add_argument("--fault", action="append", default=[], metavar="kill:N@S", help="N engines die after S seconds; may be repeated")
    command.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="a first token should take no longer (any)")
    command.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="those after it, on average of an answer (any)")
    command.add_argument("--exact", action="store_true", help="every step by itself, not leaping over those that are alike")
    command.add_argument("--seed", type=int, default=0, help="of all that is random (0)")
    command.add_argument("--json", metavar="FILE", help="write all figures there")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from itertools import islice
    from random import Random

    from rayneuron.errors import ConfigError
    from rayneuron.sim import workload
    from rayneuron.sim.fleet import Simulation
    from rayneuron.sim.setup import Setup

    config = _only(deployment.read(args).deployments)
    capacity, profile = _measured(config) if args.profile is None else _said(config, Path(args.profile))
    setup = Setup(
        capacity, profile, args.nodes, args.gateways, args.route, config.caches_prefixes(capacity.length),
        kills=tuple(_kill(fault) for fault in args.fault), exact=args.exact,
        slo_ttft_s=_seconds("--slo-ttft-ms", args.slo_ttft_ms), slo_tpot_s=_seconds("--slo-tpot-ms", args.slo_tpot_ms),
    )  # fmt: skip
    if args.trace is not None:
        arrivals = workload.read(Path(args.trace), args.scale, args.repeat)
    else:
        stream = workload.Traffic(args.rate * args.nodes * args.scale, args.prompt_tokens, args.output_tokens)
        arrivals = workload.made_up([stream], float("inf"), Random(args.seed), capacity.block, capacity.length)
    most = args.requests or (1000 if args.trace is None else None)
    fleet = Simulation(setup, islice((a for a in arrivals if a.prompt + a.output <= capacity.length), most), args.seed)
    report = fleet.run()
    if not report.arrived:
        raise ConfigError(f"no request of the trace fits max_model_len {capacity.length}; write a larger one")
    print(report.text())
    if args.json is not None:
        Path(args.json).write_text(json.dumps(report.json(), indent=1))


def _only(deployments: Any) -> Any:
    """The one model that is simulated."""
    from rayneuron.errors import ConfigError

    found = list(deployments.values()) if isinstance(deployments, dict) else list(deployments)
    if len(found) != 1:
        raise ConfigError(f"one model is simulated at a time, and the file has {len(found)}: name one with --application")
    return found[0]


def _measured(config: Any) -> Any:
    """Capacity and times of an engine that is started here for it, unless an earlier start has left them in the cache."""
    from rayneuron import loading

    engine = loading.open_engine(config).engine
    try:
        assert engine.timing is not None
        return engine.capacity, engine.timing.fixed
    finally:
        engine.close()


def _said(config: Any, path: Path) -> Any:
    """Capacity of a deployment, and times that were measured of the same."""
    import msgspec

    from rayneuron import sources
    from rayneuron.errors import ConfigError
    from rayneuron.models.config_json import read_config
    from rayneuron.placement.fitting import capacity_of
    from rayneuron.types import Profile

    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except msgspec.MsgspecError as wrong:
        raise ConfigError(f"{path} is no profile ({wrong}): leave --profile out, and one is measured here") from wrong
    capacity = capacity_of(config, read_config(sources.resolve(config.model.source, weights=False).path))
    for name in ("batch", "lengths", "context", "prefix"):
        if getattr(profile, name) != getattr(capacity, name):
            raise ConfigError(
                f"{path} was measured with {name} {list(getattr(profile, name))}, this deployment has {list(getattr(capacity, name))}:"
                " leave --profile out, and one is measured here"
            )
    return capacity, profile


def _seconds(name: str, ms: float | None) -> float | None:
    from rayneuron.errors import ConfigError

    if ms is not None and not ms > 0:
        raise ConfigError(f"{name} {ms:g}: write milliseconds, more than 0")
    return None if ms is None else ms / 1e3


def _kill(said: str) -> tuple[float, int, float]:
    from rayneuron.errors import ConfigError

    what, _, rest = said.partition(":")
    some, _, when_s = rest.partition("@")
    if what != "kill" or not some.isdigit() or not when_s.replace(".", "", 1).isdigit():
        raise ConfigError(f"--fault {said}: write kill:N@S, so many engines after so many seconds: kill:3@60")
    return float(when_s), int(some), 10.0
