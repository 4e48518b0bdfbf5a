#!/usr/bin/env python3
"""What a hand-off costs and what it saves: a prefill and a decode replica of one thread each, on a core each, without Serve.

How fast KV comes by every way beside memcpy in the same rounds; the first token beyond the same prefill, also over a slow link; the gap
behind it; gaps of 8 running streams while long prompts come one after another, beside one replica of two threads; a replica that is killed
or frozen with 20 prompts out. Both pools share two cores and their memory: this cannot show more tokens a second, only who waits for whom.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine
import options
import report

if TYPE_CHECKING:
    from rayneuron.engine.loop import EngineLoop
    from rayneuron.transfer.pulls import Pulls
    from rayneuron.types import TokenDelta

HERE = Path(__file__).resolve().parent
SHAPE = (30, 32, 3, 2 * 64 * 64 * 2)  # 2,048 tokens of SmolLM2 in bf16: 47 MB
PIECE = 256 << 10
STREAMS, OUT, STALL_S, SLOW_BYTES_S = 8, 20, 1.0, 5e6
UNBOUNDED: dict[str, Any] = {"prefill_chunk_ms": 0}  # without the default's time budget of a chunk


def child(said: dict[str, Any], stack: ExitStack) -> tuple[subprocess.Popen[str], list[str]]:
    """A process of `peers/prefill_replica.py` and its addresses."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    made = subprocess.Popen(
        [sys.executable, str(HERE / "peers" / "prefill_replica.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    stack.callback(made.kill)
    assert made.stdin is not None and made.stdout is not None
    made.stdin.write(json.dumps(said) + "\n")
    made.stdin.flush()
    addresses: list[str] = json.loads(made.stdout.readline())
    return made, addresses


def transports(cores: list[int], rounds: int) -> dict[str, list[float]]:
    """Bytes a second of memcpy and of every way, round by round."""
    import numpy as np

    from rayneuron.devices.base import KvMemory
    from rayneuron.devices.cpu import carry, packing
    from rayneuron.devices.cpu.library import library
    from rayneuron.transfer.base import Pull
    from rayneuron.transfer.layout import Reading, Run
    from rayneuron.transfer.shared import Shared
    from rayneuron.transfer.sockets import Sockets

    layers, blocks, heads, unit = SHAPE
    size, token, found = layers * blocks * heads * unit, secrets.token_bytes(32), dict[str, list[float]]()
    with ExitStack() as stack:
        _, (unix, tcp) = child({"shape": SHAPE, "token": token.hex(), "cores": cores[-1:]}, stack)
        os.sched_setaffinity(0, cores[:1])
        ours, other = packing.shared(size)[0].numpy().reshape(SHAPE), np.ones(size, np.uint8)  # as the device keeps it
        into = KvMemory(list(ours), "rows", carry=carry.by(library()))
        pull = Pull(1, bytes(16), bytes(16), 0, blocks, Reading(0, 0, 0, layers, (Run(0, 0, heads),)), tuple(range(blocks)))
        ways = {
            "shared": Shared(unix, token, 1, 5.0),
            "unix": Sockets([unix], token, 5.0, streams=1),
            "TCP": Sockets([tcp], token, 5.0, streams=1),
        }
        flat = ours.reshape(-1)
        for turn in range(rounds + 1):
            for name, way in (("memcpy", None), *ways.items()):
                began = time.perf_counter()
                if way is None:
                    for at in range(0, size, PIECE):
                        np.copyto(flat[at : at + PIECE], other[at : at + PIECE])
                else:
                    way.pull(pull, into, threading.Event())
                if turn:  # the first touches pages
                    found.setdefault(name, []).append(size / (time.perf_counter() - began))
        os.sched_setaffinity(0, cores)
    return found


class Throttled:
    """A listener in front of another that lets so many bytes a second through."""

    def __init__(self, to: str, bytes_s: float) -> None:
        from rayneuron import wire

        self._listener, self._to, self._bytes_s = wire.listen("127.0.0.1"), to, bytes_s
        self.address = wire.address(self._listener)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        from rayneuron import wire

        while True:
            near, _ = self._listener.accept()
            far = wire.connect(self._to, 2)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 14):
            target.sendall(data)
            time.sleep(len(data) / self._bytes_s)


@dataclass
class Decoding:
    """An engine on its thread, and when each token of each request came."""

    loop: EngineLoop = field(init=False)
    pulls: Pulls | None = None
    at: dict[str, list[float]] = field(default_factory=dict)
    stamps: dict[str, Any] = field(default_factory=dict)
    first_prefill: list[float] = field(default_factory=list)
    news: threading.Condition = field(default_factory=threading.Condition)

    def heard(self, deltas: list[TokenDelta]) -> None:
        now = time.perf_counter()
        with self.news:
            for delta in deltas:
                self.at.setdefault(delta.request_id, []).extend([now] * len(delta.token_ids))
                if delta.stamps is not None:
                    self.stamps[delta.request_id] = delta.stamps
            self.news.notify_all()

    def stepped(self, info: Any) -> None:
        if info.tag == "prefill":
            self.first_prefill.append(time.perf_counter() - info.run_s)

    def submit(self, name: str, prompt: int, new: int) -> None:
        from rayneuron.types import Request, SamplingParams

        draw = random.Random(name)
        ids = [draw.randrange(self.loop.engine.vocab // 2) for _ in range(prompt)]
        self.loop.submit(Request(id=name, prompt_ids=ids, params=SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)))

    def wait(self, true: Callable[[], bool], within_s: float = 300) -> None:
        with self.news:
            if not self.news.wait_for(true, within_s):
                raise TimeoutError("the engine has not answered")

    def run(self, name: str, prompt: int, new: int) -> list[float]:
        self.submit(name, prompt, new)
        self.wait(lambda: name in self.stamps)
        return self.at[name]


def decoding(words: dict[str, Any], stack: ExitStack, token: bytes = b"", addresses: Sequence[str] = ()) -> Decoding:
    """An engine, which lets the replica at `addresses` compute its prompts if there is one."""
    from rayneuron import loading
    from rayneuron.config import parse
    from rayneuron.engine.loop import EngineLoop
    from rayneuron.serve import pools

    config, made = parse(words), Decoding()
    opened = loading.open_engine(config)
    if addresses:
        made.pulls = pools.borrow(config, opened, token)
        made.pulls.meet({"p": addresses})
    made.loop = EngineLoop(opened.engine, made.heard, made.stepped)
    stack.callback(made.loop.close)
    while made.pulls is not None and not made.pulls.ready:
        time.sleep(0.01)
    return made


def watch_first(pulls: Pulls) -> dict[str, tuple[float, float]]:
    """By request: when the prefill replica was asked, and how long the prefill took there, by its own stamps (one clock a host)."""
    found: dict[str, tuple[float, float]] = {}
    take = pulls.take

    def taken() -> list[Any]:
        news = take()
        for one in news:
            if hasattr(one, "deltas") and (stamps := one.deltas[0].stamps) is not None:
                found[one.key.split("/")[0]] = (stamps.arrived, stamps.prefill_done - stamps.arrived)
        return news

    pulls.take = taken  # type: ignore[method-assign]
    return found


def first_tokens(made: Decoding, prompt: int, rounds: int, name: str) -> tuple[list[float], list[float]]:
    """Seconds from request to token 0 beyond the prefill there; and from token 0 to 1 beyond a step."""
    assert made.pulls is not None
    there, beyond, gaps = watch_first(made.pulls), [], []
    for turn in range(rounds):
        at = made.run(f"{name}-{turn}", prompt, 16)
        stamps = made.stamps[f"{name}-{turn}"]
        beyond.append(stamps.first_token - stamps.arrived - there[f"{name}-{turn}"][1])
        steps = [b - a for a, b in zip(at[2:], at[3:], strict=False)]
        gaps.append(at[1] - at[0] - statistics.median(steps))
    return beyond, gaps


def disturbed(made: Decoding, prompt: int, count: int, name: str) -> dict[str, Any]:
    """Gaps of running streams: alone, and while `count` prompts come one after another; prompt tokens a second meanwhile."""
    names = [f"{name}-stream-{i}" for i in range(STREAMS)]
    for one in names:
        made.submit(one, 64, made.loop.engine.capacity.length - 64)
    made.wait(lambda: all(len(made.at.get(one, ())) > 2 for one in names))
    quiet_from = time.perf_counter()
    made.wait(lambda: all(sum(t > quiet_from for t in made.at[one]) > 40 for one in names))
    began = time.perf_counter()
    for i in range(count):
        made.run(f"{name}-prompt-{i}", prompt, 2)
    ended = time.perf_counter()
    for one in names:
        made.loop.abort(one)

    def gaps(start: float, end: float) -> list[float]:
        return [b - a for one in names for a, b in zip(made.at[one], made.at[one][1:], strict=False) if start < b < end]

    return {"alone": gaps(quiet_from, began), "beside": gaps(began, ended), "tokens_s": count * prompt / (ended - began)}


def lose(made: Decoding, process: subprocess.Popen[str], how: signal.Signals, prompt: int) -> float:
    """Seconds from the loss of the prefill replica with prompts out to the first chunk that is computed here; all of them end."""
    names = [f"{how.name}-{i}" for i in range(OUT)]
    for one in names:
        made.submit(one, prompt, 4)
    time.sleep(0.2)
    made.first_prefill.clear()
    process.send_signal(how)
    lost = time.perf_counter()
    made.wait(lambda: all(one in made.stamps for one in names))
    process.send_signal(signal.SIGCONT)
    return min(made.first_prefill) - lost


def measure(args: argparse.Namespace, cores: list[int]) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {"rates": transports(cores, args.rounds)}
    token, pools = secrets.token_bytes(32), {"local_tokens": 100, "stall_s": STALL_S}
    words = {"model": {"path": args.model}, "dtype": args.dtype, "max_num_seqs": 24, "max_model_len": args.prompt + 96}
    words["speculative_config"] = False
    with ExitStack() as stack:
        one = {**words, "threads": 1, "pools": pools}
        process, addresses = child({"config": one, "token": token.hex(), "cores": cores[-1:]}, stack)
        os.sched_setaffinity(0, cores[:1])
        made = decoding(one, stack, token, addresses)
        made.run("warm", args.prompt, 2)
        found["beyond"], found["gap"] = first_tokens(made, args.prompt, args.rounds, "near")
        found["pools"] = disturbed(made, args.prompt, args.prompts, "pools")
        assert made.pulls is not None
        found["slow"] = slow_link(made, args.prompt, token, stack)
        found["frozen"] = lose(made, process, signal.SIGSTOP, 300)
        while not made.pulls.ready:
            made.pulls.meet({"p": addresses})
            time.sleep(0.1)
        found["killed"] = lose(made, process, signal.SIGKILL, 300)
        os.sched_setaffinity(0, cores)
    for name, more in (("aggregated 512", {"prefill_chunk_tokens": 512, **UNBOUNDED}), ("aggregated", {})):
        with ExitStack() as stack:
            made = decoding({**words, "threads": len(cores), **more}, stack)
            made.run("warm", args.prompt, 2)
            found[name] = disturbed(made, args.prompt, args.prompts, name)
    return found


def slow_link(made: Decoding, prompt: int, token: bytes, stack: ExitStack) -> list[float]:
    """As `first_tokens`, where KV comes at 5 MB/s."""
    from msgspec.structs import replace

    from rayneuron.transfer.pulling import Errand, Puller

    assert made.pulls is not None
    pulls: Any = made.pulls
    near: Puller = pulls._pullers[0]
    way, near._way = near._way, "sockets"
    began, throttled = near.begin, dict[str, Throttled]()

    def begin(errand: Errand, *rest: Any) -> None:
        to = errand.peer.data[0][-1]
        made_of = throttled.setdefault(to, Throttled(to, SLOW_BYTES_S))
        peer = replace(errand.peer, data=((made_of.address,),), epoch=errand.peer.epoch)
        began(Errand(peer, errand.ticket, errand.first, errand.end, errand.blocks), *rest)

    near.begin = begin  # type: ignore[method-assign]
    near.forget(pulls._roster.get("p").welcome.epoch)
    try:
        return first_tokens(made, prompt, 2, "slow")[0]
    finally:
        near.begin, near._way = began, way  # type: ignore[method-assign]
        near.forget(pulls._roster.get("p").welcome.epoch)


def show(found: dict[str, Any]) -> str:
    """Markdown: what was measured, then the bars of issue 15."""
    rates, rows = found["rates"], []
    for name, values in rates.items():
        ratio = 1.0 if name == "memcpy" else report.median_ratio(values, rates["memcpy"])
        rows.append([name, statistics.median(values) / 1e9, ratio])
    text = report.table(["47 MB of KV by", "GB/s", "of memcpy"], rows)
    kinds = ("pools", "aggregated 512", "aggregated")
    rows = [[kind, *report.spread(found[kind][when], 1e3).values(), when] for kind in kinds for when in ("alone", "beside")]
    text += "\n\n" + report.table([f"ms between tokens of {STREAMS} streams", "p50", "p90", "p99", "max", "prompts"], rows)
    text += "\n\n" + report.table(["prompt tokens/s meanwhile", ""], [[kind, found[kind]["tokens_s"]] for kind in kinds])
    last_ms = SHAPE[0] * 8 * SHAPE[2] * SHAPE[3] / statistics.median(rates["shared"]) * 1e3  # a chunk of 512 tokens
    p99 = {kind: report.percentile(found[kind]["beside"], 0.99) for kind in kinds}
    near_ms, slow_ms = (statistics.median(found[name]) * 1e3 for name in ("beyond", "slow"))
    bars = [
        report.bar("shared / memcpy", rows_ratio(rates, "shared"), 0.75),
        report.bar("unix / memcpy", rows_ratio(rates, "unix"), 0.55),
        report.bar("TCP / memcpy", rows_ratio(rates, "TCP"), 0.35),
        report.bar("first token beyond the prefill there, ms", near_ms, 5.0, False),
        report.bar("the same at 5 MB/s, ms more", slow_ms - near_ms, 5.0, False),
        report.bar("token 0 to 1 beyond a step and a chunk's copy, ms", statistics.median(found["gap"]) * 1e3 - last_ms, 10.0, False),
        report.bar("p99 between tokens beside prompts / p50 alone", p99["pools"] / statistics.median(found["pools"]["alone"]), 1.6, False),
        report.bar("p99, pools / one replica, chunks of 512", p99["pools"] / p99["aggregated 512"], 0.2, False),
        report.bar("p99, pools / one replica as it comes", p99["pools"] / p99["aggregated"], 1.0, False),
        report.bar("prompt tokens/s, pools / half of one replica's", found["pools"]["tokens_s"] / found["aggregated"]["tokens_s"] * 2, 0.9),
        report.bar("killed: ms to the first chunk here", found["killed"] * 1e3, 50.0, False),
        report.bar("frozen: ms to the first chunk here", found["frozen"] * 1e3, STALL_S * 1e3 + 50, False),
    ]
    return f"{text}\n\n{report.table(['bar', 'measured', 'asked', ''], bars)}"


def rows_ratio(rates: dict[str, list[float]], name: str) -> float:
    """A way beside memcpy, round by round."""
    return report.median_ratio(rates[name], rates["memcpy"])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "pools", 7)
    options.add_dtype(parser)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a long prompt (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="long prompts beside the streams (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_args(argv)
    machine.begin(args.urgent)
    machine.settle()
    watch, cores = machine.Watch([]), sorted(os.sched_getaffinity(0))
    found = measure(args, cores)
    report.tell("pools", watch.facts(), f"{args.model}, {args.prompt} tokens, {args.rounds} rounds", show(found), found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
