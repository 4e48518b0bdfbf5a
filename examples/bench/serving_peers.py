#!/usr/bin/env python3
"""Our two profiles beside ray.serve.llm and vLLM's own server, over HTTP: the same streamed completions, in interleaved rounds of one run.

All servers are up at once; whoever is not measured is stopped (SIGSTOP), so that nobody pays for another one's idling. A ratio is the
median of each round's ratio. A server is ready when a first token came.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import client
import launch
import machine
import options
import report
from engine import VENVS, peers
from prompts import Words, body
from server import Server

FAST, PLAIN, RAY_LLM, VLLM = "rayneuron fast", "rayneuron plain", "ray.serve.llm", "vllm"
MODEL_NAME = "bench"
BARS = ((16, RAY_LLM, 1.7), (16, VLLM, 1.2), (1, RAY_LLM, 2.2))  # clients, peer, ratio of tokens a second (issue 6)
READY_S = 400.0
SETTLE_S = 0.5  # timers that came due while a server was stopped
Loads = dict[str, dict[int, list[client.Load]]]  # server -> clients -> the load of every round


def servers(model: Path, args: argparse.Namespace) -> dict[str, Callable[[], Server]]:
    """How to start each, by name."""
    rows, length = max(args.clients), args.prompt + args.new + 16
    ours = {"model": {"path": str(model), "name": MODEL_NAME}, "dtype": "bf16", "threads": args.threads}
    ours |= {"max_num_seqs": rows, "max_model_len": length, "speculative_config": False}
    peer = (model, MODEL_NAME, rows, length, args.threads, args.urgent, args.venvs)
    return {
        FAST: lambda: launch.rayneuron(ours, "fast", args.urgent),
        PLAIN: lambda: launch.rayneuron(ours, "plain", args.urgent),
        RAY_LLM: lambda: launch.ray_llm(*peer),
        VLLM: lambda: launch.vllm(*peer),
    }


async def token(server: Server, timeout_s: float = 30.0) -> str:
    """Ask for one token; "" or what went wrong."""
    connection = client.Connection(server.url)
    try:
        reply = await asyncio.wait_for(client.complete(connection, "/v1/completions", body(MODEL_NAME, "Once upon a time", 1)), timeout_s)
        return reply.error
    except asyncio.TimeoutError:
        return "no answer in time"
    finally:
        connection.close()


async def first_token(server: Server) -> float:
    """Seconds from the start until a token came. Raises RuntimeError where none does."""
    while (problem := await token(server)) and time.perf_counter() - server.started_s < READY_S:
        server.check()
        await asyncio.sleep(0.1)
    if problem:
        raise RuntimeError(f"{server.name} gave no token in {READY_S:.0f} s: {problem}; its log ends with:\n{server.log_tail()}")
    return time.perf_counter() - server.started_s


async def one_round(server: Server, clients: int, prompts: Sequence[str], new: int) -> tuple[client.Load, float]:
    """One closed loop, and how many cores other processes used meanwhile."""
    server.thaw()
    await asyncio.sleep(SETTLE_S)
    if problem := await token(server):
        raise RuntimeError(f"{server.name} did not survive being stopped: {problem}; its log ends with:\n{server.log_tail()}")
    before, busy, started = server.cpu_s() + time.process_time(), machine.busy_s(), time.perf_counter()
    load = await client.closed_loop(server.url, "/v1/completions", [body(MODEL_NAME, prompt, new) for prompt in prompts], clients)
    others = (machine.busy_s() - busy) - (server.cpu_s() + time.process_time() - before)
    server.freeze()
    return load, max(0.0, others / (time.perf_counter() - started))


async def measure(running: Mapping[str, Server], words: Words, args: argparse.Namespace) -> tuple[Loads, list[float]]:
    """`rounds` interleaved rounds after one that is not counted; the order rotates."""
    loads: Loads = {name: {n: [] for n in args.clients} for name in running}
    others = []
    names = list(running)
    for turn in range(-1, args.rounds):
        for clients in args.clients:
            count = max(clients * args.each, 4)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                prompts = [words.prompt(args.prompt, f"{turn}-{clients}-{i}")[0] for i in range(count)]
                load, used = await one_round(running[name], clients, prompts, args.new)
                if turn >= 0:
                    loads[name][clients].append(load)
                    others.append(used)
        print(f"round {turn + 1} of {args.rounds}{' (warm-up)' if turn < 0 else ''}", file=sys.stderr, flush=True)
    return loads, others


def show(summaries: dict[str, dict[int, dict[str, Any]]], ready: Mapping[str, float]) -> str:
    """Two Markdown tables: figures by clients and server, and the bars."""
    rows = []
    for clients in next(iter(summaries.values())):
        for name, levels in summaries.items():
            s = levels[clients]
            spreads = [f"{s[kind]['p50']:.1f} ({s[kind]['p99']:.1f})" for kind in ("ttft_ms", "itl_ms", "tpot_ms")]
            rate = statistics.median(s["output_tok_s"])
            rows.append([clients, name, rate, *spreads, s["tokens"] / max(s["events"], 1), s["failed"], ready[name]])
    head = ["clients", "server", "tok/s", "TTFT ms p50 (p99)", "ITL ms", "TPOT ms", "tokens/event", "failed", "first token after s"]
    return f"{report.table(head, rows)}\n\n{report.table(['bar', 'measured', 'asked', ''], bars(summaries))}"


def bars(summaries: dict[str, dict[int, dict[str, Any]]]) -> list[tuple[str, float, str, str]]:
    """The rows of issue 6 that this run can decide."""
    rows = []
    for clients, peer, limit in BARS:
        for ours in (FAST, PLAIN):
            pair = [summaries.get(name, {}).get(clients) for name in (ours, peer)]
            if pair[0] and pair[1]:
                ratio = report.median_ratio(pair[0]["output_tok_s"], pair[1]["output_tok_s"])
                rows.append(report.bar(f"{clients} clients: tok/s of {ours} / {peer}", ratio, limit))
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "serving-peers", 5)
    names = (VLLM, RAY_LLM, PLAIN, FAST)  # the slowest to start first: Ray takes a node that was stopped for minutes for dead
    parser.add_argument("--servers", nargs="+", choices=names, default=names, help="which take part (default: all)")
    options.add_load(parser, clients=[1, 16], each=2)
    parser.add_argument("--venvs", type=Path, default=VENVS, help="folder of the peers' environments (default %(default)s)")
    return parser.parse_args(argv)


def present(args: argparse.Namespace) -> list[str]:
    """The servers that can take part; a message about the others."""
    python = peers(args.threads)["vllm"].python(args.venvs)
    missing = [name for name in args.servers if name in (RAY_LLM, VLLM) and not python.exists()]
    for name in missing:
        print(f"{name} is left out: there is no {python} (README.md says how to make it)", file=sys.stderr)
    return [name for name in args.servers if name not in missing]


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure, print, write."""
    args = parse_args(argv)
    from rayneuron import sources
    from rayneuron.text.text import Text

    path = sources.resolve(args.model).path
    known, running, ready = servers(path, args), {}, {}
    with ExitStack() as stack:
        for name in present(args):
            running[name] = server = known[name]()
            stack.callback(server.close)
            ready[name] = asyncio.run(first_token(server))
            print(f"{name}: first token after {ready[name]:.1f} s", file=sys.stderr, flush=True)
            server.freeze()
        loads, others = asyncio.run(measure(running, Words(Text(path)), args))
    summaries = {name: {n: client.summary(of_rounds) for n, of_rounds in levels.items()} for name, levels in loads.items()}
    facts = machine.facts()
    print(f"{report.show_facts(facts)}; {args.model} bf16, {args.prompt} tokens in, {args.new} out, medians of {args.rounds} rounds;")
    print(f"cores used by others {statistics.fmean(others):.2f}\n")
    print(show(summaries, ready))
    document = {"machine": facts, "first_token_s": ready, "levels": summaries, "others": others}
    print(f"\n{report.save('serving-peers', document, args.json)}", file=sys.stderr)
    return 1 if any(s["failed"] for levels in summaries.values() for s in levels.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
