#!/usr/bin/env python3
"""Cold start from `serve run`, or `rayneuron serve MODEL`, to the first token, part by part; whether "ready" was true when it was said.

From the first moment /health and /v1/models are asked again and again. As soon as either says 200, one streamed token is asked for: it must
come as fast as later ones do. A server that says ready too early fails here.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import client
import launch
import machine
import options
import report
from server import Server, ServerFailed

START_BAR_S = 10.0  # issue 6, from a warm cache
COMMAND_BAR_S, FRESH_BAR_S = 6.0, 15.0  # issue 13: `rayneuron serve MODEL` from a warm cache, and with nothing but the installed package
READY_PATHS = ("/health", "/v1/models")
PROBE_S = 0.05
WARM_REQUESTS = 5
SLOWER_THAN_WARM = 3.0  # the first token may meet cold caches, never a missing model or graph
MODEL_NAME = "bench"
ROWS = 16

# What ends with the line of the log that holds the text.
PARTS = (
    ("python and Ray imported", "Running config file"),
    ("Ray started", "Started a local Ray instance"),
    ("Serve started", "Started Serve in namespace"),
    ("application checked and built", "Imported and built app"),
    ("replica process up", f"{MODEL_NAME}: starting"),
    ("engine open", f"{MODEL_NAME}: ready after"),
)
COMMAND_PARTS = (  # of `rayneuron serve`, whose lines have no stamps: they count when they are seen
    ("checked, Ray imported", "starting Ray"),
    ("Ray started", "Ray has started"),
    ("Serve started", "Serve has started"),
    ("replica process up", f"{MODEL_NAME}: starting"),
    ("engine open", f"{MODEL_NAME}: ready after"),
    ("said to be ready", f"{MODEL_NAME} is ready"),
)
STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})")
ENGINE_SECONDS = "rayneuron:startup_seconds"


@dataclass(slots=True)
class Start:
    """One cold start. Seconds are counted from the start of `serve run`."""

    parts_s: dict[str, float] = field(default_factory=dict)
    engine_s: dict[str, float] = field(default_factory=dict)
    ready_s: dict[str, float] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    unanswered: dict[str, int] = field(default_factory=dict)
    first_token_s: float = 0.0
    first_ttft_s: float = 0.0
    warm_ttft_s: list[float] = field(default_factory=list)
    cores_used_by_others: float = 0.0

    @property
    def honest(self) -> bool:
        """Whether the token asked for at the first "ready" came as later ones do."""
        return self.first_ttft_s <= SLOWER_THAN_WARM * statistics.median(self.warm_ttft_s)


def log_parts(log: str, started: float) -> dict[str, float]:
    """Seconds after `started` (epoch) at which each part had ended, by the log's time stamps; parts it does not show are left out."""
    found = {}
    for name, text in PARTS:
        line = next((line for line in log.splitlines() if text in line), "")
        if stamp := STAMP.search(line):
            at = datetime.datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(stamp[2]) / 1000
            found[name] = at - started
    return found


async def see_parts(server: Server, into: Start) -> None:
    """Note when each line of COMMAND_PARTS appears in the log, until the last one has; behind HAProxy what replicas say is not there."""
    while COMMAND_PARTS[-1][0] not in into.parts_s:
        said = server.log_path.read_text(errors="replace")
        for name, text in COMMAND_PARTS:
            if text in said:
                into.parts_s.setdefault(name, time.perf_counter() - server.started_s)
        await asyncio.sleep(PROBE_S)


async def until_ready(server: Server, path: str, into: Start) -> None:
    """Ask one path until it says 200; other answers are counted."""
    while True:
        status = await server.status(path)
        if status == 200:
            into.ready_s[path] = time.perf_counter() - server.started_s
            return
        counted = into.refused if status else into.unanswered
        counted[path] = counted.get(path, 0) + 1
        server.check()
        await asyncio.sleep(PROBE_S)


async def one_token(server: Server, number: int) -> client.Reply:
    """One streamed token of a prompt nobody has sent. Raises RuntimeError where there is none."""
    connection = client.Connection(server.url)
    body = {"model": MODEL_NAME, "prompt": f"Number {number}: once upon a time", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    reply = await client.complete(connection, "/v1/completions", body)
    connection.close()
    if reply.error:
        raise RuntimeError(f"ready, but no token: {reply.error}")
    return reply


async def measure(server: Server, parts: bool) -> Start:
    """Watch one server start. `parts`: its log says them without stamps."""
    start = Start()
    seen = asyncio.create_task(see_parts(server, start)) if parts else None
    probes = [asyncio.create_task(until_ready(server, path, start)) for path in READY_PATHS]
    await asyncio.wait(probes, return_when=asyncio.FIRST_COMPLETED)
    server.check()
    reply = await one_token(server, 0)
    start.first_ttft_s = reply.ttft_s
    start.first_token_s = reply.stamps[0] - server.started_s
    await asyncio.gather(*probes)
    start.engine_s = await server.metric_by(ENGINE_SECONDS, "part")
    start.warm_ttft_s = [(await one_token(server, number)).ttft_s for number in range(1, WARM_REQUESTS + 1)]
    if seen is not None:
        await seen
    return start


def observe(deployment: dict[str, Any], args: argparse.Namespace, cache: Path | None) -> Start:
    """One start and its log. `cache`: of the stand-in's compiled graphs, or all of ours."""
    epoch = time.time()
    if args.command:
        words = ["--model-name", MODEL_NAME, "--dtype", args.dtype, "--max-model-len", str(args.length)]
        server = launch.command_line(args.model, words, args.profile, args.urgent, cache)
    else:
        server = launch.rayneuron(deployment, args.profile, args.urgent, cache)
    try:
        watch = machine.Watch({server.session})
        try:
            start = asyncio.run(asyncio.wait_for(measure(server, args.command), args.timeout))
        except asyncio.TimeoutError:
            said = f"{server.name} was not ready, or had not said so, within {args.timeout:g} s; its log ends with:\n{server.log_tail()}"
            raise ServerFailed(said) from None
        # Ray's own processes leave the session they were started from, so they are counted here and not by the watch.
        ours = sum(p.cpu_s for p in server.processes() if p.session != server.session)
        start.cores_used_by_others = max(0.0, watch.others() - ours / (time.time() - epoch))
        log = server.log_path.read_text(errors="replace")
        start.parts_s = start.parts_s or log_parts(log, epoch)
    finally:
        server.close()
    return start


def observe_bare(args: argparse.Namespace) -> float:
    """Seconds from the start of Ray Serve with nothing in it to its first 200."""
    server = launch.bare(args.urgent)
    try:
        return asyncio.run(server.wait_ready(args.timeout))
    finally:
        server.close()


def show(starts: Sequence[Start], bare_s: Sequence[float]) -> str:
    """Markdown tables: the parts in order, the engine's own account, readiness, bars."""
    rows: list[list[object]] = []
    names = [name for name, _ in (*PARTS, *COMMAND_PARTS) if all(name in start.parts_s for start in starts)]
    before = [0.0] * len(starts)
    for name in names:
        at = [start.parts_s[name] for start in starts]
        rows.append([name, statistics.median(b - a for a, b in zip(before, at, strict=True)), statistics.median(at)])
        before = at
    for path in READY_PATHS:
        rows.append([f"{path} says 200", "", statistics.median(start.ready_s[path] for start in starts)])
    rows.append(["first token", "", statistics.median(start.first_token_s for start in starts)])
    text = report.table(["part", "took s", "at s"], rows)
    engine = {name: statistics.median(start.engine_s.get(name, 0.0) for start in starts) for name in starts[0].engine_s}
    text += f"\n\nEngine: {', '.join(f'{name} {seconds:.1f} s' for name, seconds in engine.items())}"
    refused, unanswered = (
        {p: statistics.median(getattr(s, w).get(p, 0) for s in starts) for p in READY_PATHS} for w in ("refused", "unanswered")
    )
    text += f"\nProbes before ready: refused {refused}, unanswered {unanswered}"
    warm = statistics.median(ttft for start in starts for ttft in start.warm_ttft_s)
    first = statistics.median(start.first_ttft_s for start in starts)
    text += f"\nToken asked for at the first 200: {first * 1e3:.0f} ms; later ones {warm * 1e3:.0f} ms"
    if bare_s:
        text += f"\nRay Serve with nothing in it, in the same rounds: first 200 after {statistics.median(bare_s):.1f} s"
    return f"{text}\n\n{report.table(['bar', 'measured', 'asked', ''], bars(starts, bool(bare_s)))}"


def bars(starts: Sequence[Start], command: bool = False) -> list[tuple[str, float, str, str]]:
    """The rows of the issues' tables."""
    slower = max(start.first_ttft_s / statistics.median(start.warm_ttft_s) for start in starts)
    what, limit_s = ("rayneuron serve", COMMAND_BAR_S) if command else ("serve run", START_BAR_S)
    return [
        report.bar(f"{what} to first token, s", statistics.median(start.first_token_s for start in starts), limit_s, False),
        report.bar("first token at ready / warm first token", slower, SLOWER_THAN_WARM, False),
    ]


def one_of_each(length: int) -> dict[str, list[int]]:
    """A bucket list of one size a kind, so that an empty cache is filled within minutes."""
    return {"context_encoding": [min(128, length)], "token_generation": [length], "batch": [ROWS]}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "start-PROFILE", 3)
    parser.add_argument("--profile", choices=["plain", "fast"], default="plain")
    options.add_dtype(parser)
    parser.add_argument("--length", type=int, default=2048, help="max_model_len, as deployments/smollm2.yaml has it (default %(default)s)")
    parser.add_argument(
        "--device", choices=["cpu", "neuron"], default="cpu", help="neuron: over the tests' stand-in, once from an empty cache"
    )
    parser.add_argument(
        "--command", action="store_true", help="rayneuron serve MODEL, once with an empty cache, and beside it Ray Serve with nothing in it"
    )
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a start may take (default %(default)s)")
    return parser.parse_args(argv)


def observe_all(deployment: dict[str, Any], args: argparse.Namespace, bare_s: list[float]) -> tuple[list[Start], list[Start]]:
    """Starts from an empty cache (one, where the device has one of compiled graphs, or as on a fresh machine), and from a warm one."""
    from rayneuron import settings

    starts: list[Start] = []
    with ExitStack() as stack:
        cache = None
        if args.device == "neuron":
            deployment = deployment | {"device": "neuron", "buckets": one_of_each(args.length)}
        if args.device == "neuron" or args.command:
            cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rnb")))
            fetched = settings.cache_dir() / "downloads"
            if fetched.is_dir():
                (cache / "downloads").symlink_to(fetched)  # what an index gives, in whatever time, is not ours
        while len(starts) < args.rounds + (cache is not None):
            if args.command:
                bare_s.append(observe_bare(args))
            starts.append(observe(deployment, args, cache))
            print(f"start {len(starts)}: first token after {starts[-1].first_token_s:.1f} s", file=sys.stderr, flush=True)
    return starts[: len(starts) - args.rounds], starts[len(starts) - args.rounds :]


def main(argv: Sequence[str] | None = None) -> int:
    """Start, watch, print, write. Exit code 1 where ready was said too early."""
    args = parse_args(argv)
    from rayneuron import sources

    model = {"path": str(sources.resolve(args.model).path), "name": MODEL_NAME}
    deployment = {"model": model, "dtype": args.dtype, "threads": args.threads, "max_model_len": args.length, "max_num_seqs": ROWS}
    bare_s: list[float] = []
    empty, starts = observe_all(deployment, args, bare_s)
    facts = machine.facts()
    said = f"profile {args.profile}, device {args.device}, {args.model} {args.dtype}, medians of {args.rounds} starts"
    print(f"{report.show_facts(facts)}; {said}\n")
    print(show(starts, bare_s))
    for start in empty:
        engine = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in start.engine_s.items())
        print(f"\nFrom an empty cache: first token after {start.first_token_s:.1f} s ({engine})")
        if args.command:
            fresh = report.bar("the first on a fresh machine, s", start.first_token_s, FRESH_BAR_S, False)
            print(report.table(["bar", "measured", "asked", ""], [fresh]))
    made = {"empty": empty, "warm": starts}
    fields = {part: [{name: getattr(start, name) for name in Start.__slots__} for start in of_part] for part, of_part in made.items()}
    document = {"machine": facts, "device": args.device, "deployment": deployment, "starts": fields, "bare_s": bare_s}
    print(f"\n{report.save(f'start-{args.profile}', document, args.json)}", file=sys.stderr)
    return 0 if all(start.honest for start in starts) else 1


if __name__ == "__main__":
    sys.exit(main())
