#!/usr/bin/env python3
"""What several ranks on one host cost: a step without work, an all-reduce, and decoding with TP 1, TP 2 and PP 2.

  python examples/bench/group.py [--model demo:random:tiny] [--parts step reduce decode bubble]

Step: one batch out to N - 1 workers, until the last has it (fan-out), and their answers back; no model work: on the board of a host, and by
the unix sockets of before, round by round. With more workers than cores it is what they compute that counts, one behind the other; nobody
spins. Reduce: ranks in step, skew included, sums
checked; gloo over loopback beside it. Decode: tokens/s of one engine, interleaved rounds, one thread a rank. Bubble: how much of a prefill
step the two stages of a real model stand idle, by number of micro-batches.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
from rayneuron.models.kv import KvSpace  # noqa: E402

FAN_OUT_MS = 0.2  # to 8 workers (issue 13)
SPACE = KvSpace(rows=16, limit=256, blocks=64, block=64)
PARTS = ("step", "reduce", "decode", "bubble")
SIZES = (2304, 8192, 65536)
MODES: dict[str, dict[str, Any]] = {"TP 1": {}, "TP 2": {"tensor_parallel": 2}, "PP 2": {"pipeline_parallel": 2}}


def spread(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


class Echoes:
    """Workers without a model: processes with the group's own messages, whose answers say when they had a batch: one clock on one host."""

    def __init__(self, workers: int, board: bool) -> None:
        from rayneuron import wire
        from rayneuron.group import messages
        from rayneuron.group.board import Board

        places: Any = range(workers)
        self.board = Board.open(places, wire.MOST_BYTES) if board else None
        self.channels: list[wire.Channel[messages.FromWorker]] = []
        with wire.listen() as listener:
            to = [wire.address(listener) if self.board is None else json.dumps(msgspec.to_builtins(self.board.spot(p))) for p in places]
            self.children = [subprocess.Popen([sys.executable, __file__, "--echo", each]) for each in to]
            for _ in self.children if self.board is None else ():
                self.channels.append(wire.Channel(listener.accept()[0], messages.FromWorker))
        self.out: list[float] = []
        self.took: list[float] = []

    def step(self, number: int, shape: Any, batch: Any) -> None:
        """One more: milliseconds from packed batch until the last worker has its arrays, and to the last answer."""
        from rayneuron import wire
        from rayneuron.group import arrays, messages

        began = time.perf_counter()
        frame = wire.frame(messages.Step(number, [], [arrays.part(shape, batch)]))
        if self.board is not None:
            self.board.write(frame, 60.0, lambda: None)
            had = max([began, *self.board.collect(number, 60.0, lambda: None)])
        else:
            for channel in self.channels:
                channel.send_frame(frame)
            answers = [channel.receive(60.0) for channel in self.channels]
            had = max([began, *(answer.busy_s for answer in answers if isinstance(answer, messages.Done))])
        self.took.append((time.perf_counter() - began) * 1e3)
        self.out.append((had - began) * 1e3)

    def end(self) -> None:
        """See them off."""
        if self.board is not None:
            self.board.abort()
        for channel in self.channels:
            channel.close()
        for child in self.children:
            child.wait(30)


def step_overhead(workers: int, rounds: int) -> dict[str, tuple[tuple[float, float], tuple[float, float]]]:
    """By way: the fan-out and the whole of a step to `workers` - 1 others, p50 and p99 each."""
    import torch

    from rayneuron.devices.base import LIKELIEST, Shape
    from rayneuron.devices.idle import idle

    torch.set_num_threads(1)
    shape = Shape("decode", 16, 1, 256, LIKELIEST)
    batch = idle(shape, SPACE)
    ways = {"board": Echoes(workers - 1, True), "sockets": Echoes(workers - 1, False)}
    for number in range(1, rounds + 51):
        for echoes in ways.values():
            echoes.step(number, shape, batch)
    for echoes in ways.values():
        echoes.end()
    return {way: (spread(echoes.out[50:]), spread(echoes.took[50:])) for way, echoes in ways.items()}


def echo(to: str) -> None:
    """One of them: unpack the batch, answer when that was."""
    import torch

    from rayneuron import wire
    from rayneuron.group import arrays, messages
    from rayneuron.group.board import BoardReader

    torch.set_num_threads(1)
    batches = arrays.Batches(SPACE)
    board = channel = None
    if to.startswith("unix:"):
        channel = wire.Channel[messages.ToWorker](wire.connect(to, 30.0), messages.ToWorker)
    else:
        board = BoardReader(msgspec.convert(json.loads(to), messages.Spot))
    try:
        while True:
            step = board.receive() if board is not None else channel.receive()  # type: ignore[union-attr]
            assert isinstance(step, messages.Step)
            for place, part in enumerate(step.parts):
                batches.read(place, part)
            if board is not None:
                board.answer(step.number, time.perf_counter())
            else:
                channel.send(messages.Done(step.number, (), time.perf_counter()))  # type: ignore[union-attr]
    except wire.Closed:
        pass


def reduce_cost(rounds: int) -> dict[str, dict[int, tuple[float, float]]]:
    """Microseconds of an all-reduce between two processes by way and size, p50 and p99."""
    from rayneuron.collectives.shared_memory import Segment

    segment = Segment.create(2)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--reduce", f"{segment.address[0]},{segment.address[1]},{port},{rounds}"]
    children = [subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    out = [child.communicate(timeout=600)[0] for child in children][0]
    segment.close()
    return {way: {int(size): tuple(v) for size, v in sizes.items()} for way, sizes in json.loads(out).items()}  # type: ignore[misc]


def reduce_rank(place: str, rank: int) -> None:
    """One of the two."""
    import torch

    from rayneuron.collectives.gloo import join, leave
    from rayneuron.collectives.shared_memory import Segment, SharedMemory

    pid, descriptor, port, rounds = map(int, place.split(","))
    torch.set_num_threads(1)
    segment = Segment.attach((pid, descriptor), 2)
    results: dict[str, dict[int, tuple[float, float]]] = {}
    for way, comm in (("shared memory", SharedMemory(segment, rank, 2)), ("gloo", join(f"tcp://127.0.0.1:{port}", rank, 2))):
        results[way] = {}
        for size in SIZES:
            took = []
            mine, total = torch.full((size // 4,), rank + 1.0), torch.full((size // 4,), 3.0)
            for _ in range(rounds + 50 if way == "shared memory" else min(rounds, 300) + 50):
                began = time.perf_counter()
                out = comm.reduce(mine)  # type: ignore[attr-defined]
                took.append((time.perf_counter() - began) * 1e6)
                assert torch.equal(out, total)
            results[way][size] = spread(took[50:])
    leave()
    if rank == 0:
        print(json.dumps(results))


def decode_rates(model: str, rows: int, new: int, rounds: int) -> dict[str, list[float]]:
    """Tokens/s of each mode by round; all engines stay open, one runs at a time."""
    from rayneuron import LLM, SamplingParams

    options: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": rows, "threads": 1, "buckets": {"batch": [rows]}}
    options["speculative_config"] = False
    engines = {name: LLM(model, **options, **shape) for name, shape in MODES.items()}
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    prompts = [[1 + i, 2, 3, 4] for i in range(rows)]
    rates: dict[str, list[float]] = {name: [] for name in MODES}
    expected = None
    for _ in range(rounds + 1):
        for name, engine in engines.items():
            began = time.perf_counter()
            out = [list(r.outputs[0].token_ids) for r in engine.generate(prompts, params)]
            rates[name].append(rows * new / (time.perf_counter() - began))
            expected = expected or out
            if out != expected:
                print(f"note: {name} gives other tokens (below fp32 the order of sums may decide near ties)")
    for engine in engines.values():
        engine.close()
    return {name: values[1:] for name, values in rates.items()}


def bubbles(model: str, micro_batches: Sequence[int], rounds: int) -> dict[int, list[float]]:
    """By number of micro-batches, of prefill steps of 4 rows on 2 stages: 1 - busy time of both / (2 x time of the steps), a round each.

    A stage is busy while it does anything but wait for the stage before it; every step starts and ends with one stage idle.
    """
    from rayneuron import LLM, SamplingParams
    from rayneuron.group.group import Group

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompts = [[2 + (7 * i + j) % 400 for j in range(128)] for i in range(16)]
    options: dict[str, Any] = {
        "max_model_len": 512, "max_num_seqs": 16, "threads": 1, "pipeline_parallel": 2, "prefill_chunk_tokens": 512,
        "buckets": {"batch": [16], "token_generation": [512], "context_encoding": [128, 512]},
    }  # fmt: skip
    found: dict[int, list[float]] = {count: [] for count in micro_batches}
    for count in micro_batches:
        with LLM(model, **options, micro_batches=count) as engine:
            group = engine.engine.runner
            assert isinstance(group, Group)
            for _ in range(rounds + 1):
                group.step_s = group.busy_s = 0.0
                steps = group.steps
                engine.generate(prompts, params)
                assert group.steps - steps == len(prompts) // 4, "each step takes four prompts"
                found[count].append(group.idle_share)
    return {count: values[1:] for count, values in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--model", default="demo:smollm2")
    parser.add_argument("--bubble-model", default="demo:random:160m")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    parser.add_argument("--reduce", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo:
        return echo(args.echo)
    if args.reduce:
        return reduce_rank(args.reduce, args.rank)
    import machine

    print(json.dumps(machine.facts()), f"load {os.getloadavg()[0]:.1f}", sep="\n")
    if "step" in args.parts:
        for workers in (2, 4, 8):
            ways = step_overhead(workers, args.repeats)
            for way, ((had, late), (middle, tail)) in ways.items():
                answers = f"with answers p50 {middle:.3f} ms, p99 {tail:.3f} ms"
                print(f"step, {workers} workers, {way}: fan-out p50 {had:.3f} ms, p99 {late:.3f} ms; {answers}")
        had = ways["board"][0][0]
        print(f"fan-out to 8 workers: {had:.3f} ms, asked <= {FAN_OUT_MS} ms, {'met' if had <= FAN_OUT_MS else 'MISSED'}")
    if "reduce" in args.parts:
        for way, sizes in reduce_cost(args.repeats).items():
            for size, (middle, tail) in sizes.items():
                print(f"all-reduce of {size} bytes, 2 ranks, {way}: p50 {middle:.1f} us, p99 {tail:.1f} us")
    if "decode" in args.parts:
        rates = decode_rates(args.model, args.rows, args.new, args.rounds)
        for name, values in rates.items():
            ratio = statistics.median(v / base for v, base in zip(values, rates["TP 1"], strict=True))
            print(f"decode {args.rows} rows, {name}: {statistics.median(values):.1f} tokens/s, {ratio:.2f} x TP 1")
    if "bubble" in args.parts:
        for count, shares in bubbles(args.bubble_model, (1, 2, 4), args.rounds).items():
            words = f"median {statistics.median(shares):.1%} idle of {len(shares)} rounds, {1 / (1 + count):.0%} in theory"
            print(f"prefill of 4 x 128 tokens on 2 stages, {count} micro-batches, {args.bubble_model}: {words}")


if __name__ == "__main__":
    main()
