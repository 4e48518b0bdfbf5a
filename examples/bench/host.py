#!/usr/bin/env python3
"""What a model that sleeps costs whoever calls it: two models on one core of a gateway's host, woken in turns by streamed calls.

Each round: nobody is awake; the first is called and wakes; while it streams the second, of more priority, is called, so that the first
goes with its last token and the second wakes on its core. Counted: from "ready after" in the replica's own log to the first token at the
client, and how much of it until the gateway's log has the replica connected; how far the time that was expected of a start is from what
it took, once two starts have been seen; from the last token of the model that goes to its core being free, by the node's ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import client
import launch
import machine
import options
import report
from server import Server

FIRST_TOKEN_BAR_S, ETA_BAR, FREE_BAR_S = 0.3, 0.3, 2.0  # gateway_and_host §9, row 9
SEEN = 2  # starts of a model before its expected time counts
MODELS = ("first", "second")
KIND = "cores:1"
POLL_S = 0.005


def host_of(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The gateway's words."""
    one: dict[str, Any] = {"dtype": args.dtype, "threads": args.threads, "max_num_seqs": 4, "max_model_len": 1024}
    one |= {"serving": {"num_cpus": 0.25}}
    listed = [
        {"name": name, "args": {**one, "model": {"path": str(model), "name": name}}, "priority": i, "idle_s": 1.0}
        for i, name in enumerate(MODELS)
    ]
    scaling = {"min_life_s": 0.5, "drain_s": 30.0}
    return {"models": listed, "host": {"instance": KIND}, "scaling": scaling, "serving": {"num_cpus": 0.25}, "explain": True}


def said_at(server: Server, what: str) -> list[float]:
    """When replicas have said something (epoch), in order."""
    line, found = re.compile(rf"(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{{3}}) .*{what}"), []
    for log in (server.log_path.parent / "ray").glob("session_*/logs/serve/replica_*.log"):
        for stamp in line.finditer(log.read_text(errors="replace")):
            found.append(datetime.datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(stamp[2]) / 1000)
    return sorted(found)


async def described(server: Server) -> dict[str, Any]:
    """What the arbiter says."""
    status, body = await client.fetch(server.url, "/debug/hosts")
    return dict(json.loads(body)) if status == 200 else {"seats": [], "models": {}, "nodes": {}}


async def until(server: Server, true: Any, what: str) -> dict[str, Any]:
    """What the arbiter says once it says so."""
    deadline_s = time.monotonic() + 120
    while not true(told := await described(server)):
        server.check()
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not within 120 s: {what}; the host says {json.dumps(told)}")
        await asyncio.sleep(0.1)
    return told


async def call(server: Server, name: str, tokens: int, begun: asyncio.Event) -> tuple[float, float]:
    """When a call's first and last token came (epoch)."""
    connection = client.Connection(server.url)
    body = {"model": name, "prompt": "The sea is", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    status, pieces = await connection.post("/v1/completions", body)
    assert status == 200, b"".join([piece async for piece in pieces])
    stamps = []
    async for _ in client.events(pieces):
        stamps.append(time.time())
        begun.set()
    connection.close()
    return stamps[0], stamps[-1]


async def freed(ledger: Any, pid: int) -> float:
    """When a process holds no core any more (epoch)."""
    while any(holder.pid == pid for holder in ledger.holders()):
        await asyncio.sleep(POLL_S)
    return time.time()


async def measure(server: Server, ledgers: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """All rounds."""
    from rayneuron.placement.instances import instance
    from rayneuron.placement.ledger import Ledger

    out: dict[str, list[float]] = {"connected_s": [], "first_token_s": [], "eta_error": [], "free_s": [], "wake_s": []}
    await until(server, lambda told: told["nodes"], "the keeper has answered")
    for turn in range(args.rounds):
        await until(server, lambda told: not told["seats"] and all(node["free"] for node in told["nodes"].values()), "nobody is awake")
        (ledger,) = (Ledger(folder, instance(KIND)) for folder in ledgers.iterdir())
        calls, began, begun = [], [], [asyncio.Event(), asyncio.Event()]
        for name, there in zip(MODELS, begun, strict=True):
            pids = [holder.pid for holder in ledger.holders()]
            began.append(time.time())
            calls.append(asyncio.create_task(call(server, name, args.new, there)))
            gone = [asyncio.create_task(freed(ledger, pid)) for pid in pids]
            waiting = asyncio.create_task(there.wait())
            await asyncio.wait([calls[-1], waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if gone:
                out["free_s"].append(await gone[0] - (await calls[0])[1])
        for name, at_s, one in zip(MODELS, began, calls, strict=True):
            first_s, _ = await one
            ready_s = said_at(server, rf"\b{name}: ready after")[-1]
            out["connected_s"].append(next(at for at in said_at(server, "replica .* is connected") if at > ready_s) - ready_s)
            out["first_token_s"].append(first_s - ready_s)
            out["wake_s"].append(first_s - at_s)
        told = await described(server)
        if turn >= SEEN:
            out["eta_error"] += [told["models"][name]["eta_error"] for name in MODELS]
        last = ", ".join(f"{key} {values[-1]:.2f}" for key, values in out.items() if values)
        print(f"round {turn}: {last}", file=sys.stderr, flush=True)
    return out


def verdicts(found: dict[str, list[float]]) -> list[tuple[str, float, str, str]]:
    """A row a bar: the median of the first tokens, the worst of the others."""
    return [
        report.bar("asleep to first token, beyond ready, s", statistics.median(found["first_token_s"]), FIRST_TOKEN_BAR_S, at_least=False),
        report.bar("expected time of a start: error", max(found["eta_error"]), ETA_BAR, at_least=False),
        report.bar("last token to free core, s", max(found["free_s"]), FREE_BAR_S, at_least=False),
    ]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "host", SEEN + 3)
    parser.add_argument("--new", type=int, default=96, help="tokens of a call")
    options.add_dtype(parser)
    args = parser.parse_args(argv)
    if args.rounds <= SEEN:
        parser.error(f"--rounds must be more than {SEEN}: expected times count once {SEEN} starts have been seen")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure, print, write."""
    args = parse_args(argv)
    from rayneuron import sources

    path = sources.resolve(args.model).path
    with ExitStack() as stack:
        server, ledgers = launch.host(host_of(path, args), args.urgent)
        stack.callback(server.close)
        print(f"ready after {asyncio.run(server.wait_ready()):.1f} s", file=sys.stderr, flush=True)
        found = asyncio.run(measure(server, ledgers, args))
    rows = verdicts(found)
    facts = machine.facts()
    waits, connected_s = report.spread(found["wake_s"]), statistics.median(found["connected_s"])
    said = f"call to first token, s: {waits}; connected {connected_s:.2f} s after ready"
    print(f"{report.show_facts(facts)}; {said}\n\n{report.table(['bar', 'measured', 'asked', ''], rows)}")
    print(f"\n{report.save('host', {'machine': facts, 'found': found, 'bars': rows}, args.json)}", file=sys.stderr)
    return 0 if all(row[3] == "met" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
