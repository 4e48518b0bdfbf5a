#!/usr/bin/env python3
"""What the gateway costs and gives, each beside its control in the same run: calls through it and to the model's own route, in turns.

`cost`: TTFT at one client, tokens/s and CPU a token outside the engines' compute threads at 16, against the model's own route.
`link`: CPU a step and a token of both ends of a connection between a replica and a gateway, 16 paced streams, beside the timer alone.
`prefix`: TTFT and computed tokens of sessions that share a beginning, over two replicas of a thread each, beside replicas that take turns,
and those that Serve chooses (`plain` only: there a client may name the replica).
`predict`: how far the times to first token that were predicted are from those that came, by the gateway's own histogram.
`kill`: a replica of two is killed with streams on both; every text must be that of the run before, and the longest pause counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import client
import launch
import machine
import options
import report
import sessions
from prompts import Words, body
from server import Server
from sessions import MODEL_NAME

DIRECT, THROUGH = sessions.OWN, ""
STEP_S, STREAMS, STEPS = 0.03, 16, 200


def outside_s(server: Server, threads: int) -> float:
    """CPU seconds so far of all processes of a server, without the engines' compute threads."""
    spent_s = 0.0
    for process in server.processes():
        spent_s += process.cpu_s
        if "EngineServer" in machine.command(process.pid):
            spent_s -= sum(sorted(machine.thread_cpu_s(process.pid), reverse=True)[:threads])
    return spent_s


async def cost(server: Server, words: Words, args: argparse.Namespace) -> list[tuple[str, float, str, str]]:
    """Bars 1 and 2."""
    ttft: dict[str, list[float]] = {DIRECT: [], THROUGH: []}
    rate: dict[str, list[float]] = {DIRECT: [], THROUGH: []}
    cpu: dict[str, list[float]] = {DIRECT: [], THROUGH: []}
    lines = {way: client.Connection(server.url + way) for way in (DIRECT, THROUGH)}
    for turn in range(-1, args.rounds):
        ways = (DIRECT, THROUGH) if turn % 2 else (THROUGH, DIRECT)
        for i in range(40):  # a call each, in turns: a prompt takes 10 ms more or less from one second to the next
            for way in ways:
                text, _ = words.prompt(args.prompt, f"{turn}{way}{i}")
                reply = await client.complete(lines[way], "/v1/completions", body(MODEL_NAME, text, 2))
                assert not reply.error, reply.error
                ttft[way] += [reply.ttft_s] if turn >= 0 else []
        for way in ways:
            bodies = [body(MODEL_NAME, words.prompt(args.prompt, f"{turn}-16-{way}-{i}")[0], args.new) for i in range(48)]
            before = outside_s(server, args.threads)
            load = await client.closed_loop(server.url + way, "/v1/completions", bodies, 16)
            tokens = sum(reply.tokens for reply in load.replies)
            assert not any(reply.error for reply in load.replies), [reply.error for reply in load.replies]
            if turn >= 0:
                rate[way].append(tokens / load.wall_s)
                cpu[way].append((outside_s(server, args.threads) - before) / tokens)
                events = client.summary([load])["events"]
                print(f"{way or 'gateway'}: {rate[way][-1]:.0f} tokens/s, {tokens / events:.2f} an event, {1e6 * cpu[way][-1]:.0f} us each")
    more = 1e3 * (statistics.median(ttft[THROUGH]) - statistics.median(ttft[DIRECT]))
    print(f"TTFT p50 {1e3 * statistics.median(ttft[DIRECT]):.1f} ms direct, {1e3 * statistics.median(ttft[THROUGH]):.1f} ms through")
    spent = [1e6 * statistics.median(cpu[way]) for way in (DIRECT, THROUGH)]
    print(f"CPU outside compute {spent[0]:.0f} us a token direct, {spent[1]:.0f} through")
    return [
        report.bar("TTFT p50 at 1 client, more than direct, ms", more, {"plain": 6.0, "fast": 4.0}[args.profile], False),
        report.bar("tokens/s at 16 clients, share of direct", report.median_ratio(rate[THROUGH], rate[DIRECT]), 0.95),
        report.bar("CPU a token outside compute, times direct", report.median_ratio(cpu[THROUGH], cpu[DIRECT]), 1.15, False),
    ]


async def link() -> list[tuple[str, float, str, str]]:
    """Bar 4."""
    from rayneuron.frames import Card, Gain
    from rayneuron.gateway.link import Link
    from rayneuron.news import Pressure
    from rayneuron.serve.hub import Hub
    from rayneuron.types import TokenDelta

    class Owner:
        def pressure(self, seen: int) -> Pressure:
            return Pressure(seen)

        def news(self, epoch: int, number: int) -> None:
            return None

    class Ears:
        def __init__(self) -> None:
            self.open = asyncio.Event()
            self.tokens = 0

        def opened(self, link: Any, pressure: Any) -> None:
            self.open.set()

        def heard(self, link: Any, tokens: Any) -> None:
            self.tokens += sum(len(piece.delta.token_ids) for piece in tokens.pieces)

        def lost(self, link: Any, why: str, died: bool) -> None:
            print(f"lost: {why}", file=sys.stderr)

    hub = Hub(Owner(), "bench")  # type: ignore[arg-type]
    await hub.listen("127.0.0.1")
    ears = Ears()
    card = Card(
        replica="bench", epoch=hub.epoch, address=hub.address, token=hub.token, args={}, user_config=None, rows=16, length=2048,
        kv_tokens=32768, block=64, vocab=49152, model=None, profile=None, generation={}, chosen={}, adapters={},
    )  # fmt: skip
    line = Link(card, b"gateway!", ears)  # type: ignore[arg-type]
    await line.connect()
    await ears.open.wait()
    (caller,) = hub.callers.values()

    async def run(busy: bool) -> float:
        began = time.process_time()
        for step in range(STEPS):
            for stream in range(STREAMS) if busy else ():
                caller.add(Gain(stream, step, TokenDelta(f"request-{stream:032d}-0", 0, [step])))
            line.tick(time.monotonic(), 0)
            await asyncio.sleep(STEP_S)
        return (time.process_time() - began) / STEPS

    step_us = 1e6 * statistics.median([await run(True) - await run(False) for _ in range(3)])
    assert ears.tokens == 3 * STEPS * STREAMS, f"{ears.tokens} tokens came"
    await hub.close()
    return [
        report.bar("link: CPU of both ends a step of 16 streams, us", step_us, 350, False),
        report.bar("link: CPU of both ends a token, us", step_us / STREAMS, 25, False),
    ]


async def prefix(server: Server, words: Words, args: argparse.Namespace) -> list[tuple[str, float, str, str]]:
    """Bar 5."""
    return await sessions.prefix(server, words, args.rounds, 2)


async def predict(server: Server, words: Words, args: argparse.Namespace) -> list[tuple[str, float, str, str]]:
    """Bar 11."""
    rows, judged = [], "rayneuron:gateway_prediction_error_bucket"
    before = await server.metric_by(judged, "le")
    for turn in range(args.rounds):
        for clients in (1, 2, 4, 8, 16) if turn else (1, 16):
            number = max(6, 2 * clients) if turn else clients
            asked = [words.prompt(args.prompt, f"p{turn}-{clients}-{i}")[0] for i in range(number)]
            bodies = [body(MODEL_NAME, text, min(args.new, 24)) for text in asked]  # those behind the first keep rows busy
            load = await client.closed_loop(server.url, "/v1/completions", bodies, clients)
            assert not any(reply.error for reply in load.replies), [reply.error for reply in load.replies]
            after = await server.metric_by(judged, "le")
            if turn:  # the first is for what is measured of real steps
                shares = {le: after[le] - before[le] for le in after}
                near, nearer, total = shares["0.5"], shares["0.2"], shares["+Inf"]
                print(f"{clients} clients: of {total:.0f} predictions {nearer:.0f} within 20 %, {near:.0f} within 50 %")
                rows.append(shares)
            before = after
    within, all_ = sum(row["0.2"] for row in rows), sum(row["+Inf"] for row in rows)
    return [report.bar("predictions of TTFT within 20 %, share (the median is, from 0.5)", within / all_, 0.5)]


async def kill(server: Server, words: Words, args: argparse.Namespace) -> list[tuple[str, float, str, str]]:
    """Bar 8."""
    bodies = [{**body(MODEL_NAME, words.prompt(64, f"kill-{i}")[0], 120), "seed": i, "temperature": i % 2} for i in range(STREAMS)]
    wanted = await asyncio.gather(*(_stream(server.url, each) for each in bodies))
    pauses, wrong = [], 0
    for _ in range(args.kills):
        while len(_replicas(server)) < 2 or await server.metric("rayneuron:gateway_replicas") < 2:
            await asyncio.sleep(0.2)
        begun = [asyncio.Event() for _ in bodies]
        calls = [asyncio.ensure_future(_stream(server.url, each, event)) for each, event in zip(bodies, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        os.kill(_replicas(server)[0], signal.SIGKILL)
        told = await asyncio.gather(*calls)
        wrong += sum(text != other for (text, _), (other, _) in zip(told, wanted, strict=True))
        pauses.append(max(pause for _, pause in told))
        print(f"kill: longest pause {pauses[-1]:.2f} s", file=sys.stderr, flush=True)
    return [
        report.bar(f"texts of {STREAMS * args.kills} streams that a kill changed", float(wrong), 0, False),
        report.bar("longest pause of a stream, s", max(pauses), 1.0, False),
    ]


def _replicas(server: Server) -> list[int]:
    return [p.pid for p in server.processes() if f"ServeReplica:{MODEL_NAME}:" in machine.command(p.pid)]


async def _stream(url: str, asked: dict[str, Any], begun: asyncio.Event | None = None) -> tuple[str, float]:
    """The text of a stream, and its longest pause behind its first word."""
    connection = client.Connection(url)
    status, pieces = await connection.post("/v1/completions", {**asked, "stream": True})
    assert status == 200, b"".join([piece async for piece in pieces])
    text, last_s, pause_s = "", 0.0, 0.0
    async for now_s, event in client.events(pieces):
        text += "".join(choice.get("text") or "" for choice in event["choices"])
        pause_s, last_s = max(pause_s, now_s - last_s if last_s else 0.0), now_s
        if begun is not None:
            begun.set()
    connection.close()
    return text, pause_s


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "gateway-PROFILE", 3)
    parts = ["cost", "link", "predict", "prefix", "kill"]
    parser.add_argument("parts", nargs="*", default=parts, help=f"{', '.join(parts)} (default: all)")
    parser.add_argument("--profile", choices=["plain", "fast"], default="plain")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    options.add_dtype(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure, print, write."""
    args = parse_args(argv)
    from rayneuron import sources
    from rayneuron.text.text import Text

    path = sources.resolve(args.model).path
    words, rows = Words(Text(path)), []
    if "link" in args.parts:
        rows += asyncio.run(link())
    for part, measure, replicas in (("cost", cost, 1), ("predict", predict, 1), ("prefix", prefix, 2), ("kill", kill, 2)):
        if part not in args.parts:
            continue
        if part == "prefix" and args.profile == "fast":
            print("prefix: left out, since only Serve's own proxy sends a call to the replica that it names\n")
            continue
        deployment: dict[str, Any] = {"model": {"path": str(path), "name": MODEL_NAME}, "max_num_seqs": 16, "max_model_len": 2048}
        deployment |= {"speculative_config": False, "dtype": args.dtype, "threads": args.threads if replicas == 1 else 1}
        deployment |= {"serving": {"num_replicas": replicas, "num_cpus": 0.5, "reset_prefix_cache": True}}
        with ExitStack() as stack:
            server = launch.gateway(deployment, args.profile, args.urgent)
            stack.callback(server.close)
            print(f"{part}: ready after {asyncio.run(server.wait_ready()):.1f} s", file=sys.stderr, flush=True)
            rows += asyncio.run(measure(server, words, args))
    facts = machine.facts()
    print(f"{report.show_facts(facts)}; profile {args.profile}\n\n{report.table(['bar', 'measured', 'asked', ''], rows)}")
    document = {"machine": facts, "profile": args.profile, "bars": [json.loads(json.dumps(row)) for row in rows]}
    print(f"\n{report.save(f'gateway-{args.profile}', document, args.json)}", file=sys.stderr)
    return 0 if all(row[3] == "met" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
