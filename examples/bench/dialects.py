#!/usr/bin/env python3
"""What a dialect costs: the same streams in each of them, by 16 clients of one server, as tokens a second against OpenAI's.

Those that put a prompt into the chat template are held against chat. TGI and LMI take a prompt as it is, and tell the probability of every
token whether it is asked for or not: their clients' types demand it. So they are held against completions that ask for the same, and what
asking costs stands beside completions that do not. Chat takes two turns a round, and what the second is of the first is how far chance
alone goes: a ratio says no more than that. In each round all take their turns in another order. Prompts are as long and new each time, and
clients only count bytes, so that a dialect is not charged for what it takes to read its events. Every stream has the same number of
tokens, by the server's count: a run in which one ends early is refused. CPU a token is that of everything the server started.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import client
import launch
import machine
import options
import report
from prompts import Words
from server import Server

MODEL_NAME = "bench"
CHAT, AGAIN, COMPLETIONS, LIKELY = "chat", "chat again", "completions", "completions with logprobs"
AGAINST = {COMPLETIONS: COMPLETIONS, LIKELY: COMPLETIONS, "TGI": LIKELY, "LMI": LIKELY}  # the others against chat
CONTROLS = (CHAT, AGAIN, COMPLETIONS, LIKELY)
GREEDY = {"ignore_eos": True, "temperature": 0}


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _parameters(new: int) -> dict[str, Any]:
    return {"max_new_tokens": new, "do_sample": False, "details": False, "ignore_eos": True}


WAYS: dict[str, tuple[str, Callable[[str, int], dict[str, Any]]]] = {
    CHAT: ("/v1/chat/completions", lambda text, new: {"messages": _messages(text), "max_tokens": new, **GREEDY}),
    COMPLETIONS: ("/v1/completions", lambda text, new: {"prompt": text, "max_tokens": new, **GREEDY}),
    LIKELY: ("/v1/completions", lambda text, new: {"prompt": text, "max_tokens": new, "logprobs": 0, **GREEDY}),
    "Responses": ("/v1/responses", lambda text, new: {"input": text, "max_output_tokens": new, **GREEDY}),
    "Anthropic": ("/v1/messages", lambda text, new: {"messages": _messages(text), "max_tokens": new, **GREEDY}),
    "TGI": ("/generate_stream", lambda text, new: {"inputs": text, "parameters": _parameters(new)}),
    "LMI": ("/invocations", lambda text, new: {"inputs": text, "parameters": _parameters(new)}),
}
WAYS[AGAIN] = WAYS[CHAT]


async def load(url: str, path: str, bodies: Sequence[dict[str, Any]], clients: int) -> float:
    """Seconds of a closed loop in which every reply is read to its end. Raises RuntimeError for one that is no stream of tokens."""
    queue = iter(bodies)

    async def one() -> None:
        connection = client.Connection(url)
        for body in queue:
            status, pieces = await connection.post(path, body)
            parts = [piece async for piece in pieces]
            if status != 200 or len(parts) < 2:
                raise RuntimeError(f"{path}: {status} {b''.join(parts)[:300]!r}")
        connection.close()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return time.perf_counter() - began


async def measure(server: Server, words: Words, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Tokens a second and CPU microseconds a token of every dialect, by round; one round is not counted."""
    found: dict[str, dict[str, list[float]]] = {name: {"tok_s": [], "cpu_us": []} for name in WAYS}
    clients = args.clients[0]
    for turn in range(-1, args.rounds):
        for name in random.Random(turn).sample([*WAYS], len(WAYS)):
            path, made = WAYS[name]
            texts = [words.prompt(args.prompt, f"{turn}-{name}-{i}")[0] for i in range(clients * args.each)]
            bodies = [made(text, args.new) | {"model": MODEL_NAME, "stream": True} for text in texts]
            before, cpu_s = await server.metric("vllm:generation_tokens_total"), server.cpu_s()
            took_s = await load(server.url, path, bodies, clients)
            tokens = await server.metric("vllm:generation_tokens_total") - before
            if tokens != len(bodies) * args.new:
                raise RuntimeError(f"{name}: {tokens} tokens of {len(bodies)} streams of {args.new}")
            if turn >= 0:
                found[name]["tok_s"].append(tokens / took_s)
                found[name]["cpu_us"].append(1e6 * (server.cpu_s() - cpu_s) / tokens)
        print(f"round {turn + 1} of {args.rounds}{' (warm-up)' if turn < 0 else ''}", file=sys.stderr, flush=True)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> str:
    """Two Markdown tables: figures of each dialect, and the bar of issue 19."""
    rows, bars = [], []
    for name, figures in found.items():
        against = AGAINST.get(name, CHAT)
        ratio = report.median_ratio(figures["tok_s"], found[against]["tok_s"])
        rows.append([name, statistics.median(figures["tok_s"]), ratio, statistics.median(figures["cpu_us"])])
        if name not in CONTROLS:
            bars.append(report.bar(f"{name} / {against}, tokens/s", ratio, 0.97))
    head = ["dialect", "tok/s", "of its control", "CPU µs/token"]
    return f"{report.table(head, rows)}\n\n{report.table(['bar', 'measured', 'asked', ''], bars)}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "dialects", 5)
    parser.add_argument("--profile", choices=["plain", "fast"], default="fast")
    options.add_dtype(parser)
    options.add_load(parser, clients=[16], each=4)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure, print, write."""
    args = parse_args(argv)
    machine.begin(args.urgent)
    from rayneuron import sources
    from rayneuron.text.text import Text

    path = sources.resolve(args.model).path
    length = args.prompt + args.new + 64
    deployment = {
        "model": {"path": str(path), "name": MODEL_NAME}, "max_num_seqs": args.clients[0], "max_model_len": length, "threads": args.threads,
        "dtype": args.dtype,
    }  # fmt: skip
    server = launch.rayneuron(deployment, args.profile)
    try:
        asyncio.run(server.wait_ready())
        found = asyncio.run(measure(server, Words(Text(path)), args))
    finally:
        server.close()
    about = f"{args.model}, {args.profile}, {args.clients[0]} clients, {args.rounds} rounds"
    report.tell("dialects", machine.facts(), about, show(found), {"figures": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
