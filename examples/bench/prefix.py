#!/usr/bin/env python3
"""What a prefix cache saves, and what it costs where it finds nothing: two engines of one model in this process, with and without it.

First token of a long prompt that is new, of which nine tenths are known, and that is known whole, beside a decode step of one row;
prefill and decode rates of prompts nobody has seen, in rounds that alternate; the tokens that 16 new prompts with one beginning cost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import machine
import options
import report
import scheduling
from rates import decode_rate

if TYPE_CHECKING:
    from rayneuron.engine.engine import Engine

AT_ONCE, SHARED, OWN = 16, 1024, 32
KINDS = ("new", "nine tenths known", "known whole")


@dataclass(slots=True)
class Measured:
    """Of every round: seconds to the first token by kind and of a decode step; rates on and off by case. `computed`: prompt tokens."""

    first_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    step_s: list[float] = field(default_factory=list)
    rates: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {c: {"on": [], "off": []} for c in ("prefill", "decode")})
    computed: int = 0


def words(engine: Engine, count: int, seed: str) -> list[int]:
    """Tokens nobody has seen."""
    draw = random.Random(seed)
    return [draw.randrange(engine.vocab // 2) for _ in range(count)]


def run(engine: Engine, prompts: Sequence[list[int]], new: int) -> list[tuple[float, list[int]]]:
    """Serve prompts together: after each step the time since the beginning, and how many tokens each has."""
    from rayneuron.types import Request, SamplingParams

    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    counts, steps, began = [0] * len(prompts), [], time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params))
    while engine.has_work:
        for delta in engine.step():
            counts[int(delta.request_id)] += len(delta.token_ids)
        steps.append((time.perf_counter() - began, counts.copy()))
    engine.check_ledger()
    return steps


def first_s(engine: Engine, prompt: list[int]) -> float:
    """Seconds to the first token."""
    return run(engine, [prompt], 1)[-1][0]


def measure_hits(engine: Engine, length: int, turn: str, into: Measured) -> None:
    """One round of the first part."""
    prompt = words(engine, length, f"{turn}-prompt")
    known = prompt[: length * 9 // 10] + words(engine, length - length * 9 // 10, f"{turn}-end")
    for kind, ids in zip(KINDS, (prompt, known, prompt), strict=True):
        into.first_s[kind].append(first_s(engine, ids))
    stamps = [at for at, _ in run(engine, [prompt], 12)]
    into.step_s.append(statistics.median(b - a for a, b in zip(stamps[1:], stamps[2:], strict=False)))


def measure_misses(engines: dict[str, Engine], prompt: int, turn: int, into: Measured) -> None:
    """One round of the second part; who is first changes."""
    for name in sorted(engines, reverse=turn % 2 == 1):
        engine = engines[name]
        ids = words(engine, 4 * prompt, f"{turn}-{name}")
        into.rates["prefill"][name].append(len(ids) / first_s(engine, ids))
        rows = [words(engine, prompt, f"{turn}-{name}-{row}") for row in range(AT_ONCE)]
        into.rates["decode"][name].append(decode_rate(run(engine, rows, 64)))


def go_round(engine: Engine, length: int) -> None:
    """Use every block once: with a cache a new prompt takes blocks nobody has had yet while there are any, whose pages are then made."""
    while engine.snapshot().blocks_free > engine.capacity.space.width(length):
        first_s(engine, words(engine, length, f"round-{engine.steps}"))


def count_computed(engine: Engine) -> int:
    """Prompt tokens that 16 requests compute which come at once and share their beginning."""
    from rayneuron.types import Request, SamplingParams

    shared, computed = words(engine, SHARED, "shared"), 0
    for i in range(AT_ONCE):
        ids = shared + words(engine, OWN, f"own-{i}")
        engine.add(Request(id=str(i), prompt_ids=ids, params=SamplingParams(max_tokens=1, temperature=0.0)))
    while engine.has_work:
        engine.step()
        computed += engine.info.tokens
    return computed


def show(found: Measured) -> str:
    """Markdown: what was measured, then the bars of issue 14."""
    rows = [[kind, *report.spread(values, 1e3).values()] for kind, values in {**found.first_s, "a decode step": found.step_s}.items()]
    text = report.table(["ms to the first token", "p50", "p90", "p99", "max"], rows)
    rows = [[case, *(statistics.median(by[name]) for name in ("on", "off"))] for case, by in found.rates.items()]
    text += "\n\n" + report.table(["tokens/s, nothing known", "cache on", "cache off"], rows)
    new, some, whole = (found.first_s[kind] for kind in KINDS)
    beyond_ms = [(a - b) * 1e3 for a, b in zip(whole, found.step_s, strict=True)]
    bars = [
        report.bar("first token, nine tenths known / new", report.median_ratio(some, new), 0.15, False),
        report.bar("first token, known whole, beyond a decode step, ms", statistics.median(beyond_ms), 2.0, False),
        *(report.bar(f"{c}, nothing known, on / off", report.median_ratio(by["on"], by["off"]), 0.99) for c, by in found.rates.items()),
        report.bar(f"tokens {AT_ONCE} requests compute / least", found.computed / (SHARED + AT_ONCE * OWN), 1.1, False),
    ]
    return f"{text}\n\n{report.table(['bar', 'measured', 'asked', ''], bars)}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "prefix", 7)
    options.add_dtype(parser)
    parser.add_argument("--long", type=int, default=2048, help="tokens of the prompt that is found again (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of prompts nobody has seen (default %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_args(argv)
    machine.begin(args.urgent)
    said = {"dtype": args.dtype, "threads": args.threads, "max_num_seqs": AT_ONCE, "max_model_len": max(args.long, SHARED + OWN) + 64}
    engines = {name: scheduling.open_engine(args.model, **said, enable_prefix_caching=name == "on") for name in ("on", "off")}
    watch, found = machine.Watch([]), Measured()
    go_round(engines["on"], args.long)
    measure_hits(engines["on"], args.long, "warm", Measured())
    for turn in range(args.rounds):
        measure_hits(engines["on"], args.long, str(turn), found)
        measure_misses(engines, args.prompt, turn, found)
    found.computed = count_computed(engines["on"])
    for engine in engines.values():
        engine.close()
    figures = {name: getattr(found, name) for name in Measured.__slots__}
    report.tell("prefix", watch.facts(), f"{args.model}, {args.long} tokens, {args.rounds} rounds", show(found), figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
