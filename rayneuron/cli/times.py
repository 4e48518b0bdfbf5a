"""What the steps of a simulated engine take: measured here, read from a file, or guessed from the data sheet of an instance type."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

GUESS = "guess"


def add(command: argparse.ArgumentParser) -> None:
    """The arguments that say what requests come."""
    command.add_argument("--trace", metavar="FILE", help="requests: a .csv as Azure's or Vidur's, or a .jsonl as Mooncake's (made up)")
    command.add_argument("--scale", type=float, default=1.0, help="how many times as fast they come (1)")
    command.add_argument("--repeat", type=int, default=1, help="how many times over, one after another (1)")
    command.add_argument("--prompt-tokens", type=int, default=512, help="of made-up requests, on average (512)")
    command.add_argument("--output-tokens", type=int, default=128, help="of made-up requests, on average (128)")
    command.add_argument("--seed", type=int, default=0, help="of all that is random (0)")
    command.add_argument("--price", action="append", default=[], metavar="TYPE=USD", help="an hour of an instance type; may be repeated")


_ONE = ("nodes", "gateways", "requests", "repeat", "prompt_tokens", "output_tokens", "most", "prefill_nodes")
_LEAST = {**dict.fromkeys(_ONE, 1), "late_ms": 0, "start_s": 0}
_MOST = {"requests": 1_000_000_000, "repeat": 1_000_000}  # days of simulation; what has no room is said by `sim.room`


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for a number of which there can be no run, and where its figures cannot be written."""
    from rayneuron.errors import ConfigError

    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        if name in _LEAST and value is not None and not _LEAST[name] <= value < float("inf"):
            raise ConfigError(f"{flag} {value:g}: write {_LEAST[name]} or more")
        if name in _MOST and value is not None and value > _MOST[name]:
            raise ConfigError(f"{flag} {value}: write {_MOST[name]} or less, which already takes days")
        if name in ("json", "plot") and value is not None and (Path(value).is_dir() or not Path(value).parent.is_dir()):
            raise ConfigError(f"{flag} {value}: no file can be written there")  # said before hours of simulation, not behind them
        if name in ("rate", "scale") and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value:g}: write a number above 0")


def arrivals(args: argparse.Namespace, rate: float, most: int | None, block: int, length: int) -> Any:
    """Those requests that fit a context of `length` (`workload.Fitting`); made up, or of a trace without times: `rate` a second."""
    from random import Random

    from rayneuron.sim import workload

    if args.trace is not None:
        found = workload.read(Path(args.trace), args.scale, args.repeat, rate * args.scale, args.seed)
    else:
        stream = workload.Traffic(rate * args.scale, args.prompt_tokens, args.output_tokens)
        found = workload.made_up([stream], float("inf"), Random(args.seed), block, length)
    return workload.Fitting(found, length, most)


def nothing_fits(length: int) -> Exception:
    """What is raised where `arrivals` has none."""
    from rayneuron.errors import ConfigError

    return ConfigError(f"no request of the trace fits max_model_len {length}; write a larger one")


def only(deployments: Any) -> Any:
    """The one model that is simulated."""
    from rayneuron.errors import ConfigError

    found = list(deployments.values()) if isinstance(deployments, dict) else list(deployments)
    if len(found) != 1:
        raise ConfigError(f"one model is simulated at a time, and the file has {len(found)}: name one with --application")
    return found[0]


def measured(config: Any) -> Any:
    """Capacity and times of an engine that is started here for it, unless an earlier start has left them in the cache."""
    from rayneuron import loading

    engine = loading.open_engine(config).engine
    try:
        assert engine.timing is not None
        return engine.capacity, engine.timing.fixed
    finally:
        engine.close()


def said(config: Any, path: Path) -> Any:
    """Capacity of a deployment, and times that were measured of the same."""
    import msgspec

    from rayneuron.errors import ConfigError
    from rayneuron.placement.fitting import capacity_of
    from rayneuron.types import Profile

    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except msgspec.MsgspecError as wrong:
        raise ConfigError(f"{path} is no profile ({wrong}): leave --profile out, and one is measured here") from wrong
    capacity = capacity_of(config, words(config))
    for name in ("batch", "lengths", "context", "prefix"):
        if getattr(profile, name) != getattr(capacity, name):
            raise ConfigError(
                f"{path} was measured with {name} {list(getattr(profile, name))}, this deployment has {list(getattr(capacity, name))}:"
                " leave --profile out, and one is measured here"
            )
    return capacity, profile


def guessed(config: Any, instance: Any) -> Any:
    """Capacity of a deployment, and times by the data sheet of an instance type. Raises ConfigError where it does not fit there."""
    from rayneuron.errors import ConfigError
    from rayneuron.placement import fitting, speeds
    from rayneuron.policies.chunks import limited

    raw, each = words(config), config.tensor_parallel * config.pipeline_parallel
    if config.pipeline_parallel > 1:
        raise ConfigError("the steps of a pipeline can only be measured: write pipeline_parallel: 1, or --profile FILE")
    if each > instance.cores:
        raise ConfigError(f"{instance.name} has {instance.cores} cores; write tensor_parallel: {instance.degrees[-1]} or less")
    instance.check_degree(config.tensor_parallel)
    capacity = fitting.capacity_of(config, raw)
    held = fitting.stage_memory(fitting.Wanted(config, raw), capacity, config.tensor_parallel, 1)[0]
    if held.total > instance.core_memory_bytes:
        has = fitting.gib(instance.core_memory_bytes)
        raise ConfigError(f"{fitting.gib(held.total)} GiB a core, {instance.name} has {has}; write a larger tensor_parallel")
    whole = held.weights * each
    if instance.host_memory_bytes < whole + fitting.WORKER_BYTES + fitting.NODE_BYTES:
        has = fitting.gib(instance.host_memory_bytes)
        raise ConfigError(f"{fitting.gib(whole)} GiB of weights do not pass through the {has} GiB of a node's own memory")
    return capacity, limited(speeds.guessed(config, raw, capacity, instance), config.prefill_chunk_ms)


def words(config: Any) -> Any:
    """The model's config.json."""
    from rayneuron import sources
    from rayneuron.models.config_json import read_config

    return read_config(sources.resolve(config.model.source, weights=False).path)


def warn(name: str) -> None:
    """Say that nobody has measured it."""
    print(
        f"note: the times of {name} are a guess from its data sheet and AWS's published figures, not measured; measure there with "
        "`rayneuron compile` or `rayneuron simulate` without --profile, and say --profile FILE",
        file=sys.stderr,
    )


def seconds(name: str, ms: float | None) -> float | None:
    """An argument in milliseconds."""
    from rayneuron.errors import ConfigError

    if ms is not None and not ms > 0:
        raise ConfigError(f"{name} {ms:g}: write milliseconds, more than 0")
    return None if ms is None else ms / 1e3
