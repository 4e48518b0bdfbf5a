"""What the steps of a simulated engine take: measured here, read from a file, or guessed from the data sheet of an instance type."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

GUESS = "guess"
HOW = (
    "Its steps can be measured only where it runs. Without such a machine: --profile guess --instance inf2.48xlarge; "
    "else --profile FILE, the profile.json that `rayneuron compile` or the first start leaves beside the compile cache there"
)


def add_prices(command: argparse.ArgumentParser) -> None:
    """The argument that says what a node costs."""
    command.add_argument("--price", action="append", default=[], metavar="TYPE=USD", help="an hour of an instance type; may be repeated")


_ONE = ("nodes", "gateways", "requests", "repeat", "prompt_tokens", "output_tokens", "most", "prefill_nodes")
_LEAST = {**dict.fromkeys(_ONE, 1), "late_ms": 0, "start_s": 0, "hop_ms": 0, "loss": 0}
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
        if name == "loss" and value >= 1:
            raise ConfigError(f"{flag} {value:g}: write a share below 1")
        if name in ("json", "plot", "records") and value is not None and (Path(value).is_dir() or not Path(value).parent.is_dir()):
            raise ConfigError(f"{flag} {value}: no file can be written there")  # said before hours of simulation, not behind them
        if name in ("rate", "scale", "burstiness") and value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value:g}: write a number above 0")


def only(file: Any, application: str | None) -> Any:
    """The one model of a deployment file that is simulated; those of a gateway's host are among them."""
    from rayneuron.errors import ConfigError

    found = {**file.deployments, **file.hosted}
    if application in found:
        return found[application]
    if len(found) != 1 or application is not None:
        raise ConfigError(f"one model is simulated at a time; name it with --application: {', '.join(found)}")
    return next(iter(found.values()))


def desk(file: Any, gateways: int | None) -> tuple[Any, Any, int]:
    """What the gateway of a deployment file lets its desks do, what accounts are due in each, and how many gateways there are; of a file
    without one, as a gateway has it of which nothing is said."""
    from rayneuron import gateway_config
    from rayneuron.gateway import asking

    said = next(iter(file.gateways.values()), None) or gateway_config.parse({"models": [{"application": "any"}]})
    many = gateways or said.serving.replicas
    said = said.model_copy(update={"serving": said.serving.model_copy(update={"replicas": many})})
    return asking.desk_limits(said), asking.shares_of(said), many


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

    if not path.is_file():
        raise ConfigError(f"{path} is no file. {HOW}")
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
