"""size: the cheapest of the known instances, and how many, that serve such requests fast enough."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rayneuron.cli import deployment, times, traffic


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("size", help="the cheapest instances that serve such requests fast enough", conflict_handler="resolve")
    deployment.add(command)
    command.add_argument("--profile", metavar="FILE", help="measured on the file's own instance with its tensor_parallel (all guessed)")
    traffic.add(command)
    times.add_prices(command)
    command.add_argument("--requests", type=int, default=2000, metavar="N", help="only the first N (2000)")
    command.add_argument("--rate", type=float, help="requests a second, where they have no times (1)")
    command.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="a first token takes no longer")
    command.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="those after it, on average of an answer")
    command.add_argument("--slo-share", type=float, default=0.95, metavar="X", help="for such a share of all requests (0.95)")
    command.add_argument("--of", action="append", default=[], metavar="TYPE", help="only of this type; may be repeated (all with a price)")
    command.add_argument("--most", type=int, default=64, metavar="N", help="nodes (64)")
    command.add_argument("--json", metavar="FILE", help="write all figures there")
    command.add_argument("--plot", metavar="FILE.png", help="draw those of the cheapest (rayneuron[plots])")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron.errors import ConfigError
    from rayneuron.placement import prices
    from rayneuron.sim import plots, room, sizing
    from rayneuron.sim.setup import Setup

    times.check(args)
    traffic.check(args)
    if args.plot is not None:
        plots.check()
    goal = _goal(args)
    file = deployment.read(args)
    config = times.only(file, args.application)
    if config.pools is not None:
        raise ConfigError("pools: sizes are of engines that do all; leave pools out here, and try numbers of both with rayneuron simulate")
    known = prices.priced(args.price)
    candidates, refused = _candidates(args, config, known)
    if not candidates:
        raise ConfigError("no instance type can hold it:\n" + "\n".join(f"  {name}: {why}" for name, why in refused.items()))

    largest = max(candidates, key=lambda c: c.engines)
    room.check(Setup(largest.capacity, largest.profile, args.most * largest.engines))

    def requests(candidate: Any) -> Any:
        c = candidate.capacity
        return traffic.arrivals(args, args.rate or 1.0, args.requests, c.block, c.length)

    some = requests(candidates[0])
    if next(iter(some), None) is None:
        raise traffic.nothing(some)
    search = sizing.Sizing(requests, goal, args.most, args.seed, times.desk(file, 1)[0])
    sized = search.of(candidates)
    best = sized[0]
    if best.report is None:
        raise ConfigError(_best_reachable(candidates, sized, search, goal))
    print(f"{best.nodes} x {best.candidate.name}: US$ {best.usd:.2f} an hour")
    kind, degree = best.candidate.name.split(" tensor_parallel ")
    engines = best.nodes * best.candidate.engines
    print(f"Keys of the deployment: instance: {kind}, tensor_parallel: {degree}, serving.num_replicas: {engines}")
    print(best.report.text())
    print("\n" + "\n".join(_line(one) for one in sized) + "".join(f"\n{name}: {why}" for name, why in refused.items()))
    print(f"\nPrices: {', '.join(sorted({known[c.name.split()[0]].note for c in candidates}))}; say others with --price TYPE=USD.")
    if not all(c.measured for c in candidates):
        print("Times marked guess are nobody's measurement: they follow from data sheets and AWS's published figures for Llama 3.")
    if args.json is not None:
        Path(args.json).write_text(json.dumps([_json(one) for one in sized], indent=1))
    if args.plot is not None:
        plots.draw(best.report, Path(args.plot))


def _goal(args: argparse.Namespace) -> Any:
    from rayneuron.errors import ConfigError
    from rayneuron.sim.sizing import Goal

    if not 0 < args.slo_share <= 1:
        raise ConfigError(f"--slo-share {args.slo_share:g}: write a share of all requests, at most 1: 0.95")
    if args.slo_ttft_ms is None and args.slo_tpot_ms is None:
        raise ConfigError("a size for what goal? write --slo-ttft-ms MS, --slo-tpot-ms MS or both")
    ttft_s, tpot_s = times.seconds("--slo-ttft-ms", args.slo_ttft_ms), times.seconds("--slo-tpot-ms", args.slo_tpot_ms)
    return Goal(ttft_s, tpot_s, args.slo_share)


def _candidates(args: argparse.Namespace, config: Any, known: Any) -> tuple[list[Any], dict[str, str]]:
    """Every type at every degree that holds the model; and why the others do not, those without a price among them."""
    from rayneuron.errors import RayNeuronError
    from rayneuron.placement import instances
    from rayneuron.sim.sizing import NodeChoice

    found, refused = [], dict[str, str]()
    own = _measured_on(args, config)
    for name in args.of or instances.INSTANCES:
        instance = instances.instance(name)
        if name not in known:
            refused[name] = f"no price is known; write --price {name}=USD"
            continue
        fits = False
        for degree in instance.degrees:
            mine = config.model_copy(update={"tensor_parallel": degree, "device": "neuron", "instance": name})
            measured = name == own and degree == config.tensor_parallel
            try:
                c, profile = times.said(mine, Path(args.profile)) if measured else times.guessed(mine, instance)
            except RayNeuronError as wrong:
                refused[name] = str(wrong) if not fits else refused.get(name, "")
                continue
            fits = True
            engines, usd = instance.cores // degree, known[name].usd
            called = f"{name} tensor_parallel {degree}"
            found.append(NodeChoice(called, engines, usd, c, profile, mine.caches_prefixes(c.length), measured))
        if fits:
            refused.pop(name, None)
    return found, refused


def _measured_on(args: argparse.Namespace, config: Any) -> str | None:
    """The instance type of the profile; None where there is none."""
    from rayneuron.errors import ConfigError
    from rayneuron.placement import instances

    if args.profile in (None, times.GUESS):
        return None
    if config.instance is None:
        raise ConfigError(f"--profile {args.profile}: say where it was measured with --instance inf2.48xlarge")
    own = str(instances.instance(config.instance).name)
    if (args.of and own not in args.of) or config.tensor_parallel not in instances.instance(own).degrees:
        raise ConfigError(f"--profile {args.profile}: {own} with tensor_parallel {config.tensor_parallel} is not looked at; see --of")
    return own


def _best_reachable(candidates: list[Any], sized: list[Any], search: Any, goal: Any) -> str:
    reach = [(search.alone(candidate), candidate) for candidate in candidates]
    ttft, tpot = min(reach, key=lambda r: r[0].ttft_s), min(reach, key=lambda r: r[0].tpot_s)
    told = "\n".join(f"  {one.candidate.name}: {one.why}" for one in sized)
    return (
        f"no instance type meets this goal for {goal.share:.0%} of the requests. The best that can be reached, by a request that is alone: "
        f"first token {1e3 * ttft[0].ttft_s:.0f} ms ({ttft[1].name}), tokens after it {1e3 * tpot[0].tpot_s:.1f} ms ({tpot[1].name}); "
        f"write --slo-ttft-ms and --slo-tpot-ms above these, a smaller --slo-share, or a larger --most\n{told}"
    )


def _line(one: Any) -> str:
    times_are = "measured" if one.candidate.measured else "guess"
    if one.report is None:
        return f"{one.candidate.name} ({times_are}): {one.why}"
    ttft, tpot = one.report.ttft.at(0.95), one.report.tpot.at(0.95)
    return (
        f"{one.candidate.name} ({times_are}): {one.nodes} nodes of {one.candidate.engines} engines, US$ {one.usd:.2f} an hour, "
        f"{one.report.usd_per_million:.2f} a million output tokens; p95 {1e3 * ttft:.0f} ms, then {1e3 * tpot:.1f} ms"
    )


def _json(one: Any) -> dict[str, Any]:
    c = one.candidate
    told = {"name": c.name, "nodes": one.nodes, "engines": c.engines, "measured": c.measured, "why": one.why}
    return told if one.report is None else {**told, "usd_per_hour": one.usd, "report": one.report.json()}
