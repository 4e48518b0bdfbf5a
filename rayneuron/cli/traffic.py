"""What requests come to a simulated fleet: the arguments that say it, of a trace or made up, and the requests."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_PROMPT, _OUTPUT = 512, 128  # tokens of made-up requests, on average
_NUMBERS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(("prompt_tokens", "output_tokens", "prefixes", "shared_tokens", "turns"), int),
    **dict.fromkeys(("share", "think_s", "burstiness"), float),
}
_KEYS = ("account", *_NUMBERS)


def add(command: argparse.ArgumentParser) -> None:
    """The arguments."""
    trace = "requests: a .csv as Azure's or Vidur's, or a .jsonl as Mooncake's, or one of them .gz (made up)"
    command.add_argument("--trace", metavar="FILE", help=trace)
    command.add_argument("--scale", type=float, default=1.0, help="how many times as fast they come (1)")
    command.add_argument("--repeat", type=int, default=1, help="a trace so many times over, one after another (1)")
    command.add_argument("--prompt-tokens", type=int, help=f"of made-up requests, on average ({_PROMPT})")
    command.add_argument("--output-tokens", type=int, help=f"of made-up requests, on average ({_OUTPUT})")
    command.add_argument("--burstiness", type=float, help="of arrivals without times: shape of a Gamma, 1 Poisson, less in bursts (1)")
    several = f"one kind of made-up requests; may be repeated; keys: {', '.join(_KEYS).replace('_', '-')}"
    command.add_argument("--traffic", action="append", default=[], metavar="KEY=VALUE,...", help=several)
    command.add_argument("--seed", type=int, default=0, help="of all that is random (0)")


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for what says nothing of such requests: a trace has lengths of its own, and mostly times."""
    from rayneuron.errors import ConfigError
    from rayneuron.sim import traces

    if args.trace is None:
        if args.repeat != 1:
            raise ConfigError("--repeat: is for a trace; of made-up requests say --requests N")
        _streams(args, 1.0)
        return
    for name in ("prompt_tokens", "output_tokens", "traffic"):
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} says nothing of --trace: its requests have lengths of their own; leave one out")
    if (args.rate is not None or args.burstiness is not None) and traces.timed(Path(args.trace)):
        flag = "--rate" if args.rate is not None else "--burstiness"
        raise ConfigError(f"{flag} says nothing of {args.trace}: its requests have times of their own; for X times as many say --scale X")


def arrivals(args: argparse.Namespace, rate: float, most: int | None, block: int, length: int) -> Any:
    """Those requests that fit a context of `length` (`workload.Fitting`); made up, or of a trace without times: `rate` a second."""
    from random import Random

    from rayneuron.errors import ConfigError
    from rayneuron.sim import traces, workload

    if args.trace is not None:
        gaps = rate * args.scale, args.seed, 1.0 if args.burstiness is None else args.burstiness
        return workload.Fitting(traces.read(Path(args.trace), args.scale, args.repeat, *gaps), length, most)
    streams = _streams(args, rate * args.scale)
    for stream in streams:
        if stream.shared >= length:
            raise ConfigError(f"--traffic shared-tokens={stream.shared}: write less than max_model_len, {length}")
    return workload.Fitting(workload.made_up(streams, float("inf"), Random(args.seed), block, length), length, most, cut=True)


def nothing(found: Any) -> Exception:
    """What is raised where `arrivals` has none."""
    from rayneuron.errors import ConfigError

    out = found.left_out
    if not out.requests:
        return ConfigError("the trace has no request")
    return ConfigError(f"no request of the trace fits max_model_len {out.most}, the longest has {out.longest} tokens; write a larger one")


def _streams(args: argparse.Namespace, rate: float) -> list[Any]:
    """All kinds of made-up requests, `rate` a second together. Raises ConfigError."""
    from rayneuron.sim.workload import Traffic

    kinds = [_kind(said) for said in args.traffic] or [{}]
    whole = sum(kind.get("share", 1.0) for kind in kinds)
    made = []
    for kind in kinds:
        turns = kind.get("turns", 1)
        made.append(
            Traffic(
                rate * kind.get("share", 1.0) / whole / turns, kind.get("prompt_tokens", args.prompt_tokens or _PROMPT),
                kind.get("output_tokens", args.output_tokens or _OUTPUT), kind.get("account", ""), kind.get("prefixes", 0),
                kind.get("shared_tokens", 0), turns, kind.get("think_s", 5.0),
                burstiness=kind.get("burstiness", 1.0 if args.burstiness is None else args.burstiness),
            )
        )  # fmt: skip
    return made


def _kind(said: str) -> dict[str, Any]:
    from rayneuron.errors import ConfigError

    found = dict[str, Any]()
    for part in said.split(","):
        key, sign, value = part.partition("=")
        name = key.strip().replace("-", "_")
        if not sign or name not in _KEYS or name in found:
            raise ConfigError(f"--traffic {said}: {part!r}: write KEY=VALUE, each once, of {', '.join(_KEYS).replace('_', '-')}")
        try:
            found[name] = value if name == "account" else _NUMBERS[name](value)
        except ValueError:
            found[name] = 0
        if name != "account" and not (found[name] > 0 and found[name] < float("inf")):
            raise ConfigError(f"--traffic {said}: {part!r}: write a {'whole ' if _NUMBERS[name] is int else ''}number above 0")
    if ("prefixes" in found) != ("shared_tokens" in found):
        raise ConfigError(f"--traffic {said}: prefixes and shared-tokens go together: so many beginnings of so many tokens each")
    return found
