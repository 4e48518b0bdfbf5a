#!/usr/bin/env python3
"""Offline engine speed beside its peers, in interleaved rounds of one run: decode tokens/s at several batch sizes, and prefill.

Every engine is a child process that stays loaded; one runs at a time, the others are frozen. The rate of a case is the median over rounds,
a ratio the median of each round's ratio. What memory and the cores can do at most is measured in the same rounds. transformers runs in this
environment; other peers need one of their own (README.md) and are left out with a message where it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import options
import report
import verdicts
from child import Child, ChildFailed
from rates import decode_rate, prefill_rate

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
VENVS = Path(os.environ.get("RAYNEURON_BENCH_VENVS", CHECKOUT.parent / "venvs"))
PEERS = ("openvino", "vllm", "llamacpp")  # a bare --peers
BEFORE = f"{verdicts.OURS}-before"
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Peer:
    """How to start one engine. `venv` None: this environment."""

    script: str
    venv: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bf16", "fp32", "int8")

    def python(self, venvs: Path = VENVS) -> Path:
        """The interpreter, whether or not it exists."""
        return Path(sys.executable) if self.venv is None else venvs / self.venv / "bin" / "python"


def peers(threads: int, against: Path | None = None) -> dict[str, Peer]:
    """Everybody who can take part, by name. against: another checkout of this project."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    vllm = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    return {
        "rayneuron": Peer("peer_rayneuron.py", env={"PYTHONPATH": str(CHECKOUT)}),
        "transformers": Peer("peer_transformers.py", dtypes=("bf16", "fp32")),
        "openvino": Peer("peer_openvino.py", "openvino"),
        "vllm": Peer("peer_vllm.py", "vllm", vllm, ("bf16", "fp32")),
        "llamacpp": Peer("peer_llamacpp.py", "llamacpp"),
        **({BEFORE: Peer("peer_rayneuron.py", env={"PYTHONPATH": str(against)})} if against else {}),
    }


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure: `rows` prompts of `prompt` tokens, `new` tokens each; new 1 measures prefill."""

    name: str
    rows: int
    prompt: int
    new: int

    def rate(self, steps: Sequence[Any]) -> float:
        """Tokens a second of this case."""
        return prefill_rate(self.prompt, steps) if self.new == 1 else decode_rate(steps)


def cases(args: argparse.Namespace) -> list[Case]:
    """Prefill first, then decode by batch size."""
    made = [Case(f"prefill {n}", 1, n, 1) for n in args.prefill]
    return made + [Case(f"decode {n}", n, args.prompt, args.new) for n in args.batch]


def prompts(case: Case, seed: str, vocab: int) -> list[list[int]]:
    """Random token ids nobody has seen before, so that no cache helps. The ends of a vocabulary hold special tokens and bytes: left out."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab // 100, vocab * 4 // 5) for _ in range(case.prompt)] for _ in range(case.rows)]


def start(name: str, peer: Peer, settings: dict[str, Any], threads: int, urgent: bool, venvs: Path = VENVS) -> Child:
    """Start one engine."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **peer.env}
    return Child(name, [str(peer.python(venvs)), str(HERE / "peers" / peer.script), json.dumps(settings)], env, urgent)


@dataclass(slots=True)
class Measured:
    """Of every round: the rates by case and engine, what the machine could do at most, at its start and beside our own rate of a case, and
    the cores others kept busy by case. `lost`: who died on the way, and how; their rates are not kept."""

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    machine: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)
    others: dict[str, list[float]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def add(self, case: str, engine: str, rate: float, others: float) -> None:
        """One measurement."""
        self.rates.setdefault(case, {}).setdefault(engine, []).append(rate)
        self.others.setdefault(case, []).append(others)

    def lose(self, engine: str, problem: ChildFailed) -> None:
        """Leave a peer that died out: its rates too, since rounds it did not see would be compared with rounds it did."""
        if engine.startswith(verdicts.OURS):
            raise problem
        print(f"{engine} is left out from here on: {problem}", file=sys.stderr, flush=True)
        self.lost[engine] = str(problem).split(";")[0]
        for rates in self.rates.values():
            rates.pop(engine, None)


def at_most(roofline: Child, case: Case) -> float:
    """What bounds this case on this machine just now: the bytes a second a decode step is made of, the operations of a prompt."""
    only = verdicts.PRODUCTS if case.new == 1 else verdicts.READ
    rate = float(roofline.ask({"only": only, "new": 0})[only])
    roofline.freeze()
    return rate


def measure(measured: Measured, children: dict[str, Child], roofline: Child, wanted: list[Case], rounds: int, vocab: int) -> None:
    """`rounds` interleaved rounds after a short one that is not counted; the order of engines rotates, so that none is always first."""
    names = list(children)
    for turn in range(-1, rounds):
        for name, rate in roofline.ask({"new": 0}).items():
            measured.machine.setdefault(name, []).extend([rate] * (turn >= 0))
        roofline.freeze()
        for case in wanted:
            order = names[turn % len(names) :] + names[: turn % len(names)]
            new = case.new if turn >= 0 else min(case.new, WARM_UP_TOKENS)
            for name in order:
                child = children[name]
                if name in measured.lost:
                    continue
                # A host changes its pace within seconds: what the machine can do is measured right before and right after us.
                bounds = [at_most(roofline, case)] if name == verdicts.OURS else []
                watch = machine.Watch([child.session])
                try:
                    steps = child.ask({"prompts": prompts(case, f"{turn}-{case.name}", vocab), "new": new})["steps"]
                except ChildFailed as problem:
                    measured.lose(name, problem)
                    continue
                child.freeze()
                others = watch.others()
                if turn < 0:
                    continue
                measured.add(case.name, name, case.rate(steps), others)
                if bounds:
                    measured.beside.setdefault(case.name, []).append(statistics.fmean([*bounds, at_most(roofline, case)]))
        print(f"round {turn + 1} of {rounds}{' (warm-up)' if turn < 0 else ''}", file=sys.stderr, flush=True)


def show(measured: Measured, names: Sequence[str], loads: dict[str, float], model: verdicts.Model) -> str:
    """The Markdown report: rates, then bars."""
    rows = []
    for case, rates in measured.rates.items():
        best = verdicts.best_peer(rates) if names[0] == verdicts.OURS else None
        ahead = f"{report.median_ratio(rates[names[0]], rates[best]):.2f} ({best})" if best else "-"
        figures = [statistics.median(rates[n]) if n in rates else "died" for n in names]
        rows.append([case, *figures, ahead, statistics.fmean(measured.others[case])])
    text = report.table(["tok/s", *names, "ours / best peer in bf16", "cores used by others"], rows)
    text += f"\n\n{verdicts.show_machine(measured.machine)}\n"
    if judged := verdicts.judge(measured.rates, measured.beside, model):
        text += f"\n{report.table(['bar', 'measured', 'asked', ''], judged)}\n"
    for ours in (verdicts.OURS, verdicts.OURS_INT8):
        before = ours.replace(verdicts.OURS, BEFORE)
        compared = [[case, report.median_ratio(r[ours], r[before])] for case, r in measured.rates.items() if ours in r and before in r]
        text += f"\n{report.table(['', f'{ours} / {before}'], compared)}\n" if compared else ""
    text += "".join(f"\nLeft out: {problem}\n" for problem in measured.lost.values())
    return f"{text}\nLoaded and warm after: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in loads.items())}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "engine", 5)
    parser.add_argument("--dtype", nargs="+", choices=["bf16", "fp32", "int8"], default=["bf16", "int8"], help="int8: Q8_0 for llama.cpp")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 16], help="decode batch sizes (default 1 8 16)")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048], help="prompt lengths for prefill (default 512 2048)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of the decode cases (default %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="new tokens of the decode cases (default %(default)s)")
    parser.add_argument("--peers", nargs="?", const=",".join(PEERS), default="", help="more peers, comma-separated (bare: all of them)")
    parser.add_argument("--venvs", type=Path, default=VENVS, help="folder of the peers' environments (default %(default)s)")
    parser.add_argument("--against", type=Path, help="another checkout of this project, measured beside this one")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    args = parser.parse_args(argv)
    known = peers(args.threads, args.against)
    others = [*([BEFORE] if args.against else []), *([] if args.alone else ["transformers"]), *filter(None, args.peers.split(","))]
    args.names = [verdicts.OURS, *others]
    unknown = set(args.names) - set(known)
    if unknown:
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if args.against and not (args.against / "rayneuron").is_dir():
        parser.error(f"--against {args.against}: there is no rayneuron/ in it; name the folder of a checkout")
    return args


def present(names: Sequence[str], known: dict[str, Peer], venvs: Path = VENVS) -> list[str]:
    """Those whose environment exists; a message about the others."""
    kept = []
    for name in names:
        if known[name].python(venvs).exists():
            kept.append(name)
        else:
            print(f"{name} is left out: there is no {known[name].python(venvs)} (README.md says how to make it)", file=sys.stderr)
    return kept


def load(args: argparse.Namespace, path: Path, stack: ExitStack, measured: Measured) -> tuple[dict[str, Child], dict[str, float]]:
    """Every engine in every dtype it has, loaded and frozen, with the seconds that took. Others than the first dtype are named by it."""
    known = peers(args.threads, args.against)
    settings = {"model": str(path), "threads": args.threads, "rows": max(args.batch, default=1)}
    settings["length"] = max([*args.prefill, args.prompt + args.new]) + 16
    children, loads = {}, {}
    for dtype in args.dtype:
        for engine in present(args.names, known, args.venvs):
            if dtype not in known[engine].dtypes:
                continue
            name = engine if dtype == "bf16" else f"{engine} {dtype}"
            child = start(name, known[engine], {**settings, "dtype": dtype}, args.threads, args.urgent, args.venvs)
            stack.callback(child.close)
            children[name] = child
            try:
                loads[name] = child.ask({})["load_s"]
            except ChildFailed as problem:
                measured.lose(name, problem)
                continue
            child.freeze()
            print(f"{name} is loaded", file=sys.stderr, flush=True)
    return children, loads


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_args(argv)
    from rayneuron import sources
    from rayneuron.models import hub

    path = sources.resolve(args.model).path
    config = hub.read_config(path)
    with ExitStack() as stack:
        measured = Measured()
        children, loads = load(args, path, stack, measured)
        roofline = start("roofline", Peer("roofline.py"), {"threads": args.threads}, args.threads, args.urgent)
        stack.callback(roofline.close)
        measure(measured, children, roofline, cases(args), args.rounds, config["vocab_size"])
    facts = machine.facts()
    print(f"{report.show_facts(facts)}; model {args.model}, {args.threads} threads, medians of {args.rounds} rounds\n")
    print(show(measured, list(children), loads, verdicts.Model.read(config)))
    document = {"machine": facts, "model": args.model, "load_s": loads, "rates": measured.rates, "roofline": measured.machine}
    document |= {"roofline_beside": measured.beside, "others": measured.others, "lost": measured.lost}
    print(f"\n{report.save('engine', document, args.json)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
