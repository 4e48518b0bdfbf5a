#!/usr/bin/env python3
"""What the simulator says of a replica, or several behind a gateway, beside them: the same requests at the same times, from one profile.

A server has requests over HTTP and says what its steps take: as refined by them, its host time included (what it tells a gateway, and
/load). Then the simulator has the same requests, every step by itself, with that profile, and with the one that was measured when an
engine was opened (what `rayneuron simulate` would use). What lies between a client and the engine is measured before each round, by short
calls one by one: their first token, less what its prompt takes by the profile, half each way. Bars are on the refined one, as ratios
within rounds; how far the other is off tells what the measuring at the start does not see. The engine has one thread, so that HTTP and
this client do not take its core. Several replicas may still take each other's: how much longer a token of each takes while all have a
stream is told beside the bars. The simulator knows nothing of that: its engines have their cores to themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import client
import launch
import machine
import options
import report
from client import Connection, Reply
from prompts import Words, body
from server import Server

if TYPE_CHECKING:
    from rayneuron.engine.buckets import Capacity
    from rayneuron.engine.engine import Engine
    from rayneuron.sim.report import Distribution
    from rayneuron.sim.workload import Arrival
    from rayneuron.types import Profile

NAME = "bench"
SHORT, NEW = 8, 8  # tokens of a short call, and of its answer
TIMES = {"ttft": "first token, ms", "itl": "from token to token, ms", "whole": "whole answer, ms"}
SAID = {**TIMES, **{f"{name}_mean": f"{said}, mean" for name, said in TIMES.items()}, "rate": "tokens/s"}


def arrivals(capacity: Capacity, rate: float, count: int, prompt: int, new: int, seed: int) -> list[Arrival]:
    """Requests at random times; prompts and outputs of about so many tokens each, which nobody else shares."""
    from itertools import islice

    from rayneuron.sim.workload import Traffic, made_up

    return list(islice(made_up([Traffic(rate, prompt, new)], float("inf"), Random(seed), capacity.block, capacity.length), count))


async def run_server(url: str, requests: Sequence[Arrival], texts: Sequence[str]) -> list[Reply]:
    """Send them over HTTP, each at its time and on a connection of its own."""
    began = time.perf_counter()

    async def send(one: Arrival, text: str) -> Reply:
        await asyncio.sleep(max(0.0, began + one.at_s - time.perf_counter()))
        with closing(Connection(url)) as connection:
            return await client.complete(connection, "/v1/completions", body(NAME, text, one.output))

    return await asyncio.gather(*(send(one, text) for one, text in zip(requests, texts, strict=True)))


async def get(url: str, path: str) -> bytes:
    """What a server says there, on a connection of its own."""
    with closing(Connection(url)) as connection:
        status, pieces = await connection.request("GET", path)
        said = b"".join([piece async for piece in pieces])
    assert status == 200, said
    return said


def alone(url: str, texts: Sequence[str], together: int) -> tuple[float, float]:
    """Of short calls one by one, seconds to the first token; and how many times as long a token takes where so many are under way at once.
    Medians."""
    from rayneuron.sim.workload import Arrival

    def ask(some: Sequence[str]) -> list[Reply]:
        replies = asyncio.run(run_server(url, [Arrival(i, 0.0, SHORT, NEW) for i in range(len(some))], some))
        assert not any(reply.error for reply in replies), replies
        return replies

    one = [ask([text])[0] for text in texts]
    several = [reply for i in range(0, len(texts), together) for reply in ask(texts[i : i + together])]
    beside = statistics.median([r.tpot_s for r in several]) / statistics.median([r.tpot_s for r in one])
    return statistics.median([r.ttft_s for r in one]), beside


def actual(replies: Sequence[Reply]) -> dict[str, float]:
    """Milliseconds, and output tokens a second from the first request to the last token."""
    gaps = [b - a for reply in replies for a, b in zip(reply.stamps, reply.stamps[1:], strict=False)]
    seconds = max(reply.ended_s for reply in replies) - min(reply.sent_s for reply in replies)
    found = {"ttft": [r.ttft_s for r in replies], "itl": gaps, "whole": [r.ended_s - r.sent_s for r in replies]}
    return told({name: spread(values) for name, values in found.items()}) | {"rate": sum(r.tokens for r in replies) / seconds}


def spread(values: Iterable[float]) -> Distribution:
    """As the simulator keeps its own: of few requests, the number in the middle hangs on who says which that is."""
    from rayneuron.sim.report import Distribution

    made = Distribution()
    for value in values:
        made.add(value)
    return made


def told(times: dict[str, Distribution]) -> dict[str, float]:
    """Median and mean of each, in milliseconds."""
    found = {name: 1e3 * values.at(0.5) for name, values in times.items()}
    return found | {f"{name}_mean": 1e3 * values.mean for name, values in times.items()}


def simulated(
    capacity: Capacity, profile: Profile, caching: bool, hop_s: float, requests: Sequence[Arrival], replicas: int = 1
) -> dict[str, float]:
    """The same of a simulated replica, or of several behind a gateway, `hop_s` away."""
    from rayneuron import gateway_config
    from rayneuron.gateway import asking
    from rayneuron.sim.fleet import Simulation
    from rayneuron.sim.setup import Route, Setup

    route: Route = "kv" if replicas > 1 else "turns"
    limits = asking.desk_limits(gateway_config.parse({"models": [{"application": NAME}]}))
    setup = Setup(capacity, profile, replicas, route=route, caching=caching, limits=limits, hop_s=hop_s, exact=True)
    run = Simulation(setup, requests).run()
    assert run.finished == len(requests) and not run.wrong
    found = {"ttft": run.ttft, "itl": run.pause, "whole": run.whole}
    return told(found) | {"rate": run.output_tokens / (run.seconds - requests[0].at_s)}


def show(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    """Markdown: medians of rounds, then the bars."""
    rows, bars = [], []
    for name, said in SAID.items():
        by = {kind: [one[kind][name] for one in rounds] for kind in rounds[0]}
        rows.append((said, *map(statistics.median, by.values())))
        bars.append(report.bar(f"{said}: off by", abs(report.median_ratio(by["simulated"], by["server"]) - 1), 0.1, False))
    text = report.table(["median", "server", "simulated", "by times at the start"], rows)
    return f"{text}\n\n{report.table(['bar', 'measured', 'asked', ''], bars)}"


def one_round(
    number: int, engine: Engine, server: Server, replicas: int, words: Words, requests: Sequence[Arrival]
) -> tuple[dict[str, dict[str, float]], list[str], float]:
    """What the server and the simulator make of the same requests; the errors of those that failed; how much longer a token takes while all
    replicas have one."""
    from msgspec import convert

    from rayneuron.policies.cost import Costs
    from rayneuron.types import Profile

    assert engine.timing is not None
    texts = [words.prompt(one.prompt, f"{number}-{one.number}")[0] for one in requests]
    first_s, beside = alone(server.url, [words.prompt(SHORT, f"{number}-alone-{i}")[0] for i in range(10)], replicas)
    replies = asyncio.run(run_server(server.url, requests, texts))
    refined = convert(json.loads(asyncio.run(get(server.url, f"/m/{NAME}/load" if replicas > 1 else "/load")))["profile"], Profile)
    found, wrong = {"server": actual(replies)}, [reply.error for reply in replies if reply.error]
    hop_s = max(0.0, first_s - Costs(refined).prefill(SHORT, 0)[0] / 1e3) / 2
    for name, profile in (("simulated", refined), ("opened", engine.timing.fixed)):
        found[name] = simulated(engine.capacity, profile, engine.scheduler.caching, hop_s, requests, replicas)
    return found, wrong, beside


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "simulated", 3)
    parser.set_defaults(threads=1)
    options.add_dtype(parser)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens, about (default %(default)s)")
    parser.add_argument("--new", type=int, default=48, help="output tokens, about (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round (default %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="more than one: behind a gateway (default %(default)s)")
    parser.add_argument("--busy", type=float, default=0.5, help="requests for this share of what the replicas can do (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_args(argv)
    machine.begin(args.urgent)
    from rayneuron import loading, sources
    from rayneuron.config import parse
    from rayneuron.policies.cost import Costs
    from rayneuron.text.text import Text

    path = Path(sources.resolve(args.model).path)
    said: dict[str, Any] = {"model": {"path": str(path), "name": NAME}, "max_num_seqs": 16, "max_model_len": 1024, "dtype": args.dtype}
    said |= {"threads": args.threads, "speculative_config": False}
    engine, words, rounds, together = loading.open_engine(parse(said)).engine, Words(Text(path)), [], []
    several = {"serving": {"num_replicas": args.replicas, "num_cpus": 0.5}}
    starts = launch.rayneuron(said, urgent=args.urgent) if args.replicas == 1 else launch.gateway(said | several, urgent=args.urgent)
    with closing(engine), closing(starts) as server:
        assert engine.timing is not None
        asyncio.run(server.wait_ready())
        rate = args.replicas * args.busy * 1e3 / Costs(engine.timing.fixed).work_ms(args.prompt, 0, args.new)
        count, watch = max(4, int(rate * args.seconds)), machine.Watch([])
        for number in range(args.rounds + 1):
            some = arrivals(engine.capacity, rate, count if number else 4, args.prompt, args.new, number)
            found, wrong, beside = one_round(number, engine, server, args.replicas, words, some)
            if wrong:
                print(f"{len(wrong)} requests failed: {wrong[0]}", file=sys.stderr)
                return 1
            rounds.append(found)
            together.append(beside)
    rounds, together = rounds[1:], together[1:]  # the first one warms both
    about = f"{args.model}, {count} requests a round, {rate:.2f} a second, {args.rounds} rounds"
    if args.replicas > 1:
        about += f"; while all replicas have a stream, a token of each takes {statistics.median(together):.2f} times as long as alone"
    report.tell("simulated", watch.facts(), about, show(rounds), {"rounds": rounds, "together": together}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
