#!/usr/bin/env python3
"""What Ray Serve and HTTP cost: streamed completions in a closed loop, beside the same engine offline on the same prompts in one run.

The server is `serve run` in processes of its own. At every level of concurrency, rounds of HTTP load and of the offline engine alternate;
the one that is not measured is idle. CPU a token is what the proxy and the replica used beyond what they use when idle, without the
replica's compute threads (the engine's and those of its products); with `--before CHECKOUT` that code serves too, in the same rounds.
Counting step seconds x threads instead is in the JSON: it only means something on a machine nobody else uses. TTFT beyond prefill: the
clients' mean less the replica's own mean prefill time of the same requests (first scheduled to first token). A token's share of its request
(parsed, tokenised, routed, answered) hangs on how many tokens there are: `--longer` has answers of another length, and tells them apart.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import client
import engine
import launch
import machine
import options
import report
from child import Child
from prompts import Words, body
from server import CpuTime, Server

STEP_SECONDS = "rayneuron:step_seconds_sum"
PREFILL_TIME = "vllm:request_prefill_time_seconds"
IDLE_S = 5.0
MODEL_NAME = "bench"


@dataclass(frozen=True, slots=True)
class Bars:
    """What issues 2 and 13 ask of a profile: share of the offline rate at 16 clients, CPU a token outside the step, TTFT beyond prefill."""

    share: float
    cpu_us: float
    ttft_ms: float


BARS = {"plain": Bars(0.80, 1000, 25), "fast": Bars(0.90, 100, 10)}


@dataclass(slots=True)
class Level:
    """Everything measured at one number of clients."""

    clients: int
    new: int  # output tokens
    loads: list[client.Load] = field(default_factory=list)
    offline_tok_s: list[float] = field(default_factory=list)
    step_s: float = 0.0
    prefill: tuple[float, float] = (0.0, 0.0)  # seconds from first scheduling to first token, and of how many requests
    idle: CpuTime = CpuTime(0.0, 0.0, 0.0, 0.0)
    cpu: list[tuple[CpuTime, CpuTime]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def summary(self, threads: int) -> dict[str, Any]:
        """Client side percentiles, the ratio to offline, and CPU a token in microseconds."""
        out = client.summary(self.loads)
        tokens = sum(reply.tokens for load in self.loads for reply in load.replies)
        wall_s = sum(load.wall_s for load in self.loads)
        spent = {
            part: sum(getattr(b, part) - getattr(a, part) for a, b in self.cpu) - wall_s * getattr(self.idle, part)
            for part in CpuTime.__slots__
        }
        served = spent["proxy_s"] + spent["replica_s"]
        return out | {
            "offline_tok_s": self.offline_tok_s,
            "prefill_mean_ms": 1e3 * self.prefill[0] / max(self.prefill[1], 1),
            "ttft_mean_ms": 1e3 * statistics.fmean([r.ttft_s for load in self.loads for r in load.replies if not r.error] or [0.0]),
            "share_of_offline": report.median_ratio(out["output_tok_s"], self.offline_tok_s),
            "proxy_us_per_token": 1e6 * spent["proxy_s"] / max(tokens, 1),
            "replica_us_per_token": 1e6 * (spent["replica_s"] - spent["compute_s"]) / max(tokens, 1),
            "outside_compute_us_per_token": 1e6 * (served - spent["compute_s"]) / max(tokens, 1),
            "outside_step_us_per_token": 1e6 * (served - self.step_s * threads) / max(tokens, 1),
            "rest_us_per_token": 1e6 * spent["rest_s"] / max(tokens, 1),
            "idle_cores": {part: getattr(self.idle, part) for part in CpuTime.__slots__},
            "cores_used_by_others": statistics.fmean(self.others),
        }


async def idle_rate(server: Server, threads: int) -> CpuTime:
    """CPU seconds a second that each part uses while nobody asks anything."""
    before = server.cpu_time(threads)
    await asyncio.sleep(IDLE_S)
    after = server.cpu_time(threads)
    return CpuTime(*((getattr(after, part) - getattr(before, part)) / IDLE_S for part in CpuTime.__slots__))


async def http_round(server: Server, level: Level, prompts: Sequence[tuple[str, list[int]]], args: argparse.Namespace) -> None:
    """One closed loop over HTTP, with the server's own clocks read before and after."""
    before, cpu = await _clocks(server), server.cpu_time(args.threads)
    watch = machine.Watch({p.session for p in server.processes()})
    level.loads.append(
        await client.closed_loop(server.url, "/v1/completions", [body(MODEL_NAME, text, level.new) for text, _ in prompts], level.clients)
    )
    level.others.append(watch.others())
    level.cpu.append((cpu, server.cpu_time(args.threads)))
    step_s, prefill_s, requests = (b - a for a, b in zip(before, await _clocks(server), strict=True))
    level.step_s += step_s
    level.prefill = (level.prefill[0] + prefill_s, level.prefill[1] + requests)


async def _clocks(server: Server) -> list[float]:
    return [await server.metric(name) for name in (STEP_SECONDS, f"{PREFILL_TIME}_sum", f"{PREFILL_TIME}_count")]


def offline_round(child: Child, level: Level, prompts: Sequence[tuple[str, list[int]]]) -> None:
    """The same closed loop in the engine alone."""
    steps = child.ask({"prompts": [ids for _, ids in prompts], "new": level.new, "at_once": level.clients})["steps"]
    child.freeze()
    level.offline_tok_s.append(sum(steps[-1][1]) / steps[-1][0])


async def measure(servers: Sequence[Server], child: Child, words: Words, args: argparse.Namespace) -> list[list[Level]]:
    """`rounds` interleaved rounds of every level of every server, after one that is not counted; whoever is not measured is stopped."""
    found: list[list[Level]] = []
    kinds = [(n, args.new) for n in args.clients] + ([(max(args.clients), args.longer)] if args.longer else [])
    for server in servers:
        alone(server, servers)
        idle = await idle_rate(server, args.threads)
        shares = f"proxy {idle.proxy_s:.3f}, replica {idle.replica_s:.3f}, rest of Ray {idle.rest_s:.3f}"
        print(f"cores used when idle: {shares}", file=sys.stderr, flush=True)
        found.append([Level(*kind, idle=idle) for kind in kinds])
    for turn in range(-1, args.rounds):
        for at, (clients, new) in enumerate(kinds):
            prompts = [words.prompt(args.prompt, f"{turn}-{clients}-{new}-{i}") for i in range(max(clients * args.each, 4))]
            for server, levels in zip(servers, found, strict=True):
                counted = levels[at] if turn >= 0 else Level(clients, new)
                alone(server, servers)
                await http_round(server, counted, prompts, args)
                offline_round(child, counted, prompts)
        print(f"round {turn + 1} of {args.rounds}{' (warm-up)' if turn < 0 else ''}", file=sys.stderr, flush=True)
    return found


def alone(server: Server, servers: Sequence[Server]) -> None:
    """Let one of several run."""
    for each in servers if len(servers) > 1 else ():
        (each.thaw if each is server else each.freeze)()


def show(summaries: dict[int, dict[str, Any]], profile: str, before: dict[int, dict[str, Any]] | None = None) -> str:
    """Two Markdown tables: figures by level, of the code `before` too, and the bars."""
    rows = []
    for clients, s in [*summaries.items(), *((f"{n}, before", s) for n, s in (before or {}).items())]:
        spreads = [" / ".join(f"{s[kind][p]:.1f}" for p in ("p50", "p90", "p99")) for kind in ("ttft_ms", "itl_ms", "tpot_ms")]
        rates = [statistics.median(s["output_tok_s"]), statistics.median(s["offline_tok_s"]), s["share_of_offline"]]
        cpu = [s["proxy_us_per_token"], s["replica_us_per_token"], s["rest_us_per_token"]]
        path = f"{s['ttft_mean_ms']:.1f} - {s['prefill_mean_ms']:.1f}"
        rows.append([clients, *rates, *spreads, path, *cpu, s["tokens"] / max(s["events"], 1), s["failed"], s["cores_used_by_others"]])
    head = ["clients", "tok/s", "offline tok/s", "share", "TTFT ms p50/p90/p99", "ITL ms", "TPOT ms", "mean TTFT - prefill"]
    head += ["proxy µs/token", "replica µs/token", "rest of Ray µs/token", "tokens/event", "failed", "others' cores"]
    return f"{report.table(head, rows)}\n\n{report.table(['bar', 'measured', 'asked', ''], bars(summaries, profile, before))}"


def bars(
    summaries: dict[int, dict[str, Any]], profile: str, before: dict[int, dict[str, Any]] | None = None
) -> list[tuple[str, float, str, str]]:
    """The rows of the issues' tables that this run can decide."""
    wanted, rows = BARS[profile], []
    if 16 in summaries:
        rows.append(report.bar("share of offline tok/s at 16 clients", summaries[16]["share_of_offline"], wanted.share))
        cpu = summaries[16]["outside_compute_us_per_token"]
        rows.append(report.bar("CPU outside the compute threads at 16 clients, µs a token", cpu, wanted.cpu_us, False))
        if before:
            rows.append(report.bar("the same / before", cpu / before[16]["outside_compute_us_per_token"], 1.0, False))
    if 1 in summaries:
        beyond = summaries[1]["ttft_mean_ms"] - summaries[1]["prefill_mean_ms"]
        rows.append(report.bar("mean TTFT beyond the same requests' prefill at 1 client, ms", beyond, wanted.ttft_ms, False))
    return rows


def apart(short: Level, long: Level, threads: int) -> str:
    """What a streamed token and what a request take, of two lengths of answers."""
    took = [level.new * level.summary(threads)["outside_compute_us_per_token"] for level in (short, long)]
    token_us = (took[1] - took[0]) / (long.new - short.new)
    request_ms = (took[0] - short.new * token_us) / 1e3
    return f"CPU outside the compute threads at {short.clients} clients: {token_us:.0f} µs a token and {request_ms:.1f} ms a request"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "serving-PROFILE", 3)
    parser.add_argument("--profile", choices=list(BARS), default="plain")
    options.add_dtype(parser)
    options.add_load(parser, clients=[1, 4, 16], each=3)
    parser.add_argument("--longer", type=int, metavar="TOKENS", help="answers of so many tokens, too, at the most clients")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another checkout, which serves too, in the same rounds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure, print, write."""
    args = parse_args(argv)
    from rayneuron import sources
    from rayneuron.text.text import Text

    path = sources.resolve(args.model).path
    sizes = {"threads": args.threads, "dtype": args.dtype, "speculative_config": False}
    rows, length = max(args.clients), args.prompt + max(args.new, args.longer or 0) + 16
    deployment = {"model": {"path": str(path), "name": MODEL_NAME}, "max_num_seqs": rows, "max_model_len": length, **sizes}
    with ExitStack() as stack:
        servers: list[Server] = []
        for checkout in (launch.CHECKOUT, *filter(None, (args.before,))):
            for other in servers:
                other.freeze()
            servers.append(launch.rayneuron(deployment, args.profile, args.urgent, checkout=checkout.resolve()))
            stack.callback(servers[-1].close)
            ready_s = asyncio.run(servers[-1].wait_ready())
            print(f"ready after {ready_s:.1f} s", file=sys.stderr, flush=True)
        offline = engine.peers(args.threads)["rayneuron"]
        child = engine.start("offline", offline, {"model": str(path), "rows": rows, "length": length, **sizes}, args.threads, args.urgent)
        stack.callback(child.close)
        child.ask({})
        child.freeze()
        found = asyncio.run(measure(servers, child, Words(Text(path)), args))
    summaries, *before = ({level.clients: level.summary(args.threads) for level in levels if level.new == args.new} for levels in found)
    facts = machine.facts()
    print(f"{report.show_facts(facts)}; profile {args.profile}, {args.prompt} tokens in, {args.new} out, {args.rounds} rounds\n")
    print(show(summaries, args.profile, *before))
    for which, levels in zip(("", "before, "), found, strict=False) if args.longer else ():
        print(f"\n{which}{apart(next(level for level in levels if level.clients == rows), levels[-1], args.threads)}")
    document = {"machine": facts, "profile": args.profile, "deployment": deployment, "levels": summaries, "before": before}
    print(f"\n{report.save(f'serving-{args.profile}', document, args.json)}", file=sys.stderr)
    return 1 if any(s["failed"] for s in summaries.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
