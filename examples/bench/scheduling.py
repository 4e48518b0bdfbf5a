#!/usr/bin/env python3
"""What running streams feel while a long prompt is admitted, and what a step costs beside the model.

Streams: 8 sequences decode; then a 2,000-token prompt arrives. Every gap between two tokens of a running stream, until the newcomer has its
first token, counts. In the same rounds the same without a limit in time (prefill_chunk_ms: 0), as it was before there was one.
Long prompts (`--long` from 8,192 on): one is computed alone; then newcomers come of which all is known but the last WINDOW tokens, at five
depths up to its end. What the whole would take beside the streams is reckoned from the windows' times.
Host: seconds of planning, packing and committing a decode step, with a tiny model, at 16 and 64 rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine
import options
import report

if TYPE_CHECKING:
    from rayneuron.engine.engine import Engine

HOST_BARS_MS = {16: 0.07, 64: 0.20}  # issue 11
STEADY_STEPS = 20
MOST_STEPS = 5.0  # of a gap while 2,000 tokens are admitted, in decode steps (issue 13)
PREFILL_KEPT = 0.95  # of the rate of a prompt without a limit in time (issue 13)
LONG = 8192  # from here on a gap is held against the time of a chunk instead (issue 14), at some depths
WINDOW, DEPTHS = 1024, 4  # tokens that are new, and the equal parts of a prompt at whose ends they lie


@dataclass(slots=True)
class Admission:
    """Seconds of one or more admissions: gaps between tokens of the running streams, their steps before, the newcomer's chunks and TTFT,
    and the TTFT of one like it with nobody else there. `chunk_ms`: the limit."""

    gaps_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    chunk_ms: float = 0.0

    def limit_s(self, chunk_s: float) -> float:
        """3 x the median step plus one chunk (the bar of issue 2)."""
        return 3 * statistics.median(self.steps_s) + chunk_s


def open_engine(model: str, **words: Any) -> Engine:
    """A warm engine; `words` are config.Deployment's keys."""
    from rayneuron import loading
    from rayneuron.config import parse

    return loading.open_engine(parse({"model": {"path": model}, "speculative_config": False, **words})).engine


def drawn(engine: Engine, name: str, count: int) -> list[int]:
    """Random tokens."""
    draw = random.Random(name)
    return [draw.randrange(engine.vocab // 2) for _ in range(count)]


def add(engine: Engine, name: str, prompt: int, new: int, known: Sequence[int] = ()) -> None:
    """Queue a greedy request of random tokens, `known` ones before them, that ends after exactly `new`."""
    from rayneuron.types import Request, SamplingParams

    ids = [*known, *drawn(engine, name, prompt - len(known))]
    engine.add(Request(id=name, prompt_ids=ids, params=SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)))


def admit_while_decoding(engine: Engine, streams: int, prompt: int, seed: str, into: Admission, known: Sequence[int] = ()) -> None:
    """One admission; the engine is empty before and after."""
    for i in range(streams):
        add(engine, f"{seed}-{i}", 128, engine.capacity.length - 128)
    started: set[str] = set()
    while len(started) < streams:
        started |= {delta.request_id for delta in engine.step()}
    steady: list[float] = []
    for _ in range(STEADY_STEPS):
        began = time.perf_counter()
        engine.step()
        steady.append(time.perf_counter() - began)
    into.steps_s += steady
    last = dict.fromkeys(started, time.perf_counter())
    newcomer, arrived, done = f"{seed}-long", time.perf_counter(), False
    add(engine, newcomer, prompt, 2, known)
    while not done:
        began = time.perf_counter()
        deltas = engine.step()
        now = time.perf_counter()
        if engine.info.tag == "prefill":
            into.chunks_s.append(now - began)
        for delta in deltas:
            if delta.request_id == newcomer:
                into.first_token_s.append(now - arrived)
                done = True
            else:
                into.gaps_s.append(now - last[delta.request_id])
                last[delta.request_id] = now
    for name in (*started, newcomer):
        engine.abort(name)
    while engine.has_work:
        engine.step()
    engine.check_ledger()


def admit_alone(engine: Engine, prompt: int, seed: str) -> float:
    """Seconds to the first token of a prompt in an empty engine."""
    add(engine, seed, prompt, 1)
    began = time.perf_counter()
    while not engine.step():
        pass
    return time.perf_counter() - began


def stretched(model: str, length: int, folder: Path) -> str:
    """The model, or where it was not made for so many positions, its weights under a configuration that was: only times are asked for."""
    from rayneuron import sources
    from rayneuron.models.config_json import read_config

    path = sources.resolve(model).path
    raw = read_config(path)
    if raw.get("max_position_embeddings", length) >= length:
        return model
    for file in path.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": length}))
    return str(folder)


def measure_depths(args: argparse.Namespace) -> dict[int, Admission]:
    """By the prompt's tokens: newcomers of which the last WINDOW are new. What they know was computed alone (`alone_s` of the longest)."""
    said = {"dtype": args.dtype, "threads": args.threads, "max_num_seqs": args.streams + 1, "max_model_len": args.long + 128}
    limits = {"prefill_chunk_tokens": args.chunk, "prefill_chunk_ms": args.chunk_ms}
    said |= {name: value for name, value in limits.items() if value is not None}
    found = {WINDOW + (args.long - WINDOW) * i // DEPTHS: Admission() for i in range(DEPTHS + 1)}
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(stretched(args.model, args.long + 128, Path(folder)), **said)
        found[args.long].alone_s.append(admit_alone(engine, args.long, "whole"))
        whole = drawn(engine, "whole", args.long)
        admit_while_decoding(engine, args.streams, WINDOW, "warm", Admission())
        for turn in range(args.rounds):
            for length, into in found.items():
                admit_while_decoding(engine, args.streams, length, f"{turn}-{length}", into, whole[: length - WINDOW])
                into.chunk_ms = engine.timing.fixed.chunk_ms if engine.timing is not None else 0.0
        engine.close()
    return found


def show_depths(found: dict[int, Admission]) -> str:
    """Markdown tables of the windows, and of the bar over all their gaps."""
    rows = []
    for length, at in found.items():
        parts = [*report.spread(at.gaps_s, 1e3).values(), *report.spread(at.chunks_s, 1e3).values()]
        rows.append([f"{length:,}", *parts, len(at.chunks_s), statistics.median(at.steps_s) * 1e3])
    names = [f"{what} {part}" for what in ("gap", "chunk") for part in ("p50", "p90", "p99", "max")]
    text = report.table(["tokens, the last new; ms", *names, "chunks", "decode step before"], rows)
    longest, each = max(found), [statistics.mean(at.first_token_s) for at in found.values()]
    whole_s = statistics.mean((a + b) / 2 for a, b in zip(each, each[1:], strict=False)) * longest / WINDOW
    chunk_ms, alone_s = found[longest].chunk_ms, found[longest].alone_s[0]
    text += f"\n\nA chunk may take {chunk_ms:.1f} ms. First token of {longest:,}: alone {alone_s:.0f} s, beside the streams {whole_s:.0f} s"
    gaps, steps = ([s for at in found.values() for s in getattr(at, name)] for name in ("gaps_s", "steps_s"))
    limit = round(2 * chunk_ms + statistics.median(steps) * 1e3, 1)
    row = report.bar("p99 gap, ms, against two chunks and a step", report.percentile(gaps, 0.99) * 1e3, limit, False)
    return f"{text}\n\n{report.table(['bar', 'measured', 'asked', ''], [row])}"


def measure_admission(args: argparse.Namespace) -> tuple[Admission, Admission]:
    """All rounds, behind one that is not counted: as deployed, and without a limit in time."""
    said = {"dtype": args.dtype, "threads": args.threads, "max_num_seqs": args.streams + 1, "max_model_len": args.long + 128}
    said |= {"prefill_chunk_tokens": args.chunk} if args.chunk else {}
    limit = {} if args.chunk_ms is None else {"prefill_chunk_ms": args.chunk_ms}
    found = Admission(), Admission()
    with tempfile.TemporaryDirectory() as folder:
        model = stretched(args.model, args.long + 128, Path(folder))
        engines = open_engine(model, **said, **limit), open_engine(model, **said, prefill_chunk_ms=0)
        for turn in range(-1, args.rounds):
            for engine, into in zip(engines, found, strict=True):
                into = into if turn >= 0 else Admission()
                admit_while_decoding(engine, args.streams, args.long, str(turn), into)
                into.alone_s.append(admit_alone(engine, args.long, f"{turn}-alone"))
                into.chunk_ms = engine.timing.fixed.chunk_ms if engine.timing is not None else 0.0
        for engine in engines:
            engine.close()
    return found


def host_step(model: str, rows: int, steps: int) -> dict[str, list[float]]:
    """Seconds of plan, pack and commit of each of `steps` decode steps with `rows` sequences."""
    from rayneuron.engine import runner

    engine = open_engine(model, dtype="fp32", max_num_seqs=rows, max_model_len=512, threads=1)
    for i in range(rows):
        add(engine, str(i), 16, 16 + 2 * steps)
    while any(s.remaining > 1 for s in (*engine.scheduler.running, *engine.scheduler.waiting)):
        engine.step()
    packed: list[float] = []
    pack, runner.pack = runner.pack, _timed(runner.pack, packed)
    spent: dict[str, list[float]] = {"plan": [], "pack": packed, "commit": [], "together": []}
    for _ in range(steps):
        engine.step()
        spent["plan"].append(engine.info.plan_s)
        spent["commit"].append(engine.info.commit_s)
        spent["together"].append(engine.info.plan_s + packed[-1] + engine.info.commit_s)
    runner.pack = pack
    engine.close()
    return spent


def _timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments)
        into.append(time.perf_counter() - began)
        return result

    return timed


def show(admission: Admission, before: Admission, hosts: dict[int, dict[str, list[float]]], long: int) -> str:
    """Markdown tables of both parts and the bars."""
    rows = []
    for limit, found in ((f"{admission.chunk_ms:.1f} ms", admission), ("no limit", before)):
        parts = [
            ("gap of a running stream", found.gaps_s),
            ("median step before", found.steps_s),
            ("chunk of the newcomer", found.chunks_s),
        ]
        parts += [("first token of the newcomer", found.first_token_s), ("the same, alone", found.alone_s)]
        rows += [[f"{name}, {limit}", *report.spread(values, 1e3).values(), len(values)] for name, values in parts if values]
    text = report.table(["ms", "p50", "p90", "p99", "max", "count"], rows)
    if admission.chunks_s:
        rates = [long * len(found.first_token_s) / sum(found.chunks_s) for found in (admission, before)]
        text += f"\n\nTokens a second of the newcomer's own steps: {rates[0]:.0f}, without a limit {rates[1]:.0f}"
    rows = [[f"{n} rows, {part}", *report.spread(v, 1e3).values(), len(v)] for n, spent in hosts.items() for part, v in spent.items()]
    text += "\n\n" + report.table(["host ms a step", "p50", "p90", "p99", "max", "steps"], rows)
    return f"{text}\n\n{report.table(['bar', 'measured', 'asked', ''], bars(admission, before, hosts))}"


def bars(admission: Admission, before: Admission, hosts: dict[int, dict[str, list[float]]]) -> list[tuple[str, float, str, str]]:
    """The rows of the issues' tables."""
    rows = []
    for name, choose in (("median", statistics.median), ("longest", max)) if admission.gaps_s else ():
        p99, limit_ms = report.percentile(admission.gaps_s, 0.99) * 1e3, round(admission.limit_s(choose(admission.chunks_s)) * 1e3, 1)
        rows.append(report.bar(f"p99 gap while a long prompt is admitted, ms ({name} chunk)", p99, limit_ms, False))
    if admission.gaps_s:
        p99, step_ms = report.percentile(admission.gaps_s, 0.99) * 1e3, statistics.median(admission.steps_s) * 1e3
        rows.append(report.bar("p99 gap / decode step", p99 / step_ms, MOST_STEPS, False))
        kept = report.median_ratio(before.alone_s, admission.alone_s)
        rows.append(report.bar("prefill rate / without a limit", kept, PREFILL_KEPT))
    for n, spent in hosts.items():
        if n in HOST_BARS_MS:
            together = statistics.median(spent["together"]) * 1e3
            rows.append(report.bar(f"scheduler + pack + commit at {n} rows, ms", together, HOST_BARS_MS[n], False))
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "scheduling", 5)
    options.add_dtype(parser)
    parser.add_argument("--streams", type=int, default=8, help="running sequences (default %(default)s)")
    parser.add_argument("--long", type=int, default=2000, help="prompt tokens of the newcomer (default %(default)s)")
    parser.add_argument("--chunk", type=int, help="prefill_chunk_tokens (default: the deployment's)")
    parser.add_argument("--chunk-ms", type=float, help="prefill_chunk_ms (default: the deployment's)")
    parser.add_argument("--host-model", default="demo:random:tiny")
    parser.add_argument("--host-rows", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--host-steps", type=int, default=100)
    parser.add_argument("--host-only", action="store_true", help="nothing but what a step costs beside the model")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_args(argv)
    machine.begin(args.urgent)
    watch = machine.Watch([])
    if args.long >= LONG and not args.host_only:
        depths = measure_depths(args)
        raw = {length: dataclasses.asdict(at) for length, at in depths.items()}
        about = f"{args.streams} streams, {args.long} tokens, the last {WINDOW} new"
        report.tell("scheduling", watch.facts(), about, show_depths(depths), {"depths": raw}, args.json)
        return 0
    admission, before = (Admission(), Admission()) if args.host_only else measure_admission(args)
    hosts = {rows: host_step(args.host_model, rows, args.host_steps) for rows in args.host_rows}
    about, text = f"{args.streams} streams, {args.long} tokens admitted, {args.rounds} rounds", show(admission, before, hosts, args.long)
    found = {name: dataclasses.asdict(a) for name, a in (("limited", admission), ("unlimited", before))}
    report.tell("scheduling", watch.facts(), about, text, {"admission": found, "host_s": hosts}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
