#!/usr/bin/env python3
"""What drafts gain or cost: engines of one model in this process, without drafts, with as many as pay, with fixed numbers of them, and with
an int8 copy of the model itself as its draft model.

Six kinds of prompts, from one that is repeated word for word to a chat in which nothing comes twice. The engines' steps take turns, so that
what disturbs one disturbs all; all give the same tokens, which is asserted, so a ratio of rates is one of times. In parts, of 100 s each:
`ngram`, as many as pay against none; `pace-1`, `pace-4` and `pace-16`, that against the best of 0, 2, 4 and 8 always, by rows; `int8`.
`pace-16` takes 100 s for one round of some kinds of prompts: what `--seconds` leaves out is named, and measured by `--prompts`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import machine
import options
import report

if TYPE_CHECKING:
    from rayneuron.loading import Opened

PASSAGE = (
    "In the spring of {year} the council of {town} voted to build a second bridge across the river. The old one, made of stone, had stood "
    "for two hundred years, but carts of grain blocked it on market days.\n\nThe mason {name} asked for forty workers and three summers. "
    "He was given thirty and two, and finished in time. On the first evening {count} people crossed, "
    "each with a lantern, and the water shone."
)
CODE = (
    "def total_price(items, rate):\n    x = 0\n    for item in items:\n        if item.count > {count}:\n"
    "            x = x + item.price * item.count\n        else:\n            x = x + item.price\n"
    "    x = x + x * rate\n    return round(x, 2)\n"
)
FAMILIES = {
    "quote": "Repeat the following text word for word, without any change:\n\n" + PASSAGE,
    "extract": "Copy the second paragraph of this text exactly:\n\n" + PASSAGE,
    "summary": "Summarise this text in three sentences:\n\n" + PASSAGE,
    "code edit": "Rename the variable x to total in this Python function and write out the whole function:\n\n```python\n" + CODE + "```",
    "code talk": "Explain what this Python function does, step by step:\n\n```python\n" + CODE + "```",
    "chat": "My name is {name} and I live in {town}. I am {count} years old and want to learn to cook. Where should I begin?",
}
TOWNS = ("Ashford", "Bremen", "Coimbra", "Delft", "Evora", "Faro", "Ghent", "Haarlem")
NAMES = ("Anna", "Boris", "Chloe", "David", "Elena", "Farid", "Greta", "Hugo", "Irene", "Jonas")
BARS = {("quote", 1): 4.0, ("extract", 1): 4.0, ("code edit", 1): 1.4, ("chat", 1): 0.98, ("quote", 16): 1.5, ("chat", 16): 0.98}
BARS_INT8 = {"fp32": 1.5, "bf16": 1.1}  # of a chat alone, by what the model computes in
DRAFTING = ("adaptive", "int8")
_INT8 = {"method": "draft_model", "quantization": "int8", "num_speculative_tokens": 4}
KINDS: dict[str, Any] = {"off": False, "adaptive": {}, "int8": _INT8}
KINDS |= {str(k): {"num_speculative_tokens": k, "adaptive": False} for k in (2, 4, 8)}
_ALL, _FIXED = list(FAMILIES), ("off", "adaptive", "2", "4", "8")
PARTS: dict[str, tuple[list[str], list[int], tuple[str, ...]]] = {  # prompts, rows, engines
    "ngram": (["quote", "extract", "code edit", "chat"], [1, 16], ("off", "adaptive")),
    "int8": (["chat"], [1], ("off", "int8")),
    **{f"pace-{rows}": (_ALL, [rows], _FIXED) for rows in (1, 4, 16)},
}


@dataclass(slots=True)
class Run:
    """Prompts served together: the tokens of each, and of the steps after the prompts how many there were, their seconds and the host's."""

    tokens: list[list[int]]
    steps: int = 0
    seconds: float = 0.0
    host_s: float = 0.0
    tried: int = 0
    accepted: int = 0

    @property
    def generated(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.tokens))


@dataclass(slots=True)
class Measured:
    """The runs of every round by family, rows and engine."""

    runs: dict[tuple[str, int], dict[str, list[Run]]] = field(default_factory=dict)

    def ratio(self, family: str, rows: int, name: str, other: str = "off") -> float:
        """How many times as fast one engine is, in the same rounds."""
        by = self.runs[family, rows]
        return statistics.median(b.seconds / a.seconds for a, b in zip(by[name], by[other], strict=True))


def prompts(opened: Opened, family: str, rows: int, turn: int) -> list[list[int]]:
    """Token ids of prompts of one family that differ."""
    made = []
    for i in range(rows):
        n = turn * rows + i
        words = {"year": 1700 + n, "town": TOWNS[n % len(TOWNS)], "name": NAMES[n % len(NAMES)], "count": 20 + n % 60}
        made.append(opened.text.chat([{"role": "user", "content": FAMILIES[family].format(**words)}]))
    return made


def serve(engines: dict[str, Opened], ids: Sequence[list[int]], new: int) -> dict[str, Run]:
    """Serve prompts together, greedily, each to its own end, by every engine, whose steps take turns."""
    from rayneuron.types import Request, SamplingParams

    runs = {name: Run([[] for _ in ids]) for name in engines}
    for opened in engines.values():
        for i, prompt in enumerate(ids):
            opened.engine.add(Request(id=str(i), prompt_ids=prompt, params=SamplingParams(max_tokens=new, temperature=0.0)))
    order = list(engines)
    while any(opened.engine.has_work for opened in engines.values()):
        for name in order:
            if engines[name].engine.has_work:
                _step(engines[name], runs[name])
        order.reverse()
    return runs


def _step(opened: Opened, run: Run) -> None:
    engine, began = opened.engine, time.perf_counter()
    for delta in engine.step():
        run.tokens[int(delta.request_id)] += delta.token_ids
    info = engine.info
    if info.tag != "prefill":
        run.steps += 1
        run.seconds += time.perf_counter() - began
        run.host_s += info.plan_s + info.commit_s
        run.tried += sum(n for n, _ in info.drafts)
        run.accepted += sum(n for _, n in info.drafts)


def measure(engines: dict[str, Opened], args: argparse.Namespace, turn: int, into: Measured, until_s: float) -> None:
    """One round, or as far as there is time; some prompts in any case."""
    for family in args.prompts:
        for count in args.rows:
            if into.runs and time.monotonic() > until_s:
                return
            runs = serve(engines, prompts(next(iter(engines.values())), family, count, turn), args.new)
            first = next(iter(runs.values()))
            for name, run in runs.items():
                assert run.tokens == first.tokens, f"drafts changed tokens: {family}, {count} rows, {name}"
                into.runs.setdefault((family, count), {}).setdefault(name, []).append(run)


def line(found: Measured, key: tuple[str, int], name: str) -> list[Any]:
    """What one engine did with one family of prompts."""
    (family, rows), by = key, found.runs[key]
    steps, tried = max(1, sum(r.steps for r in by[name])), sum(r.tried for r in by[name])
    host_ms = [1e3 * sum(r.host_s for r in by[each]) / max(1, sum(r.steps for r in by[each])) for each in ("off", name)]
    came = sum(r.accepted for r in by[name]) / max(1, tried)
    fewer = sum(r.steps for r in by["off"]) / steps
    given = sum(r.generated for r in by[name]) / steps / rows
    return [family, rows, name, found.ratio(family, rows, name), fewer, given, tried / steps / rows, came, *host_ms]


def show(found: Measured, dtype: str) -> str:
    """Markdown: what was measured, then the bars of issue 18."""
    lines = [line(found, key, name) for key, by in found.runs.items() for name in DRAFTING if name in by]
    bars = []
    for (family, rows), by in found.runs.items():
        if "adaptive" in by and (family, rows) in BARS:
            bars.append(report.bar(f"{family}, {rows} rows, on / off", found.ratio(family, rows, "adaptive"), BARS[family, rows]))
        if "int8" in by and (family, rows) == ("chat", 1) and dtype in BARS_INT8:
            bars.append(report.bar("chat, 1 row, int8 / off", found.ratio(family, rows, "int8"), BARS_INT8[dtype]))
        fixed = [name for name in by if name not in DRAFTING]
        if len(fixed) > 1:
            worst = min(found.ratio(family, rows, "adaptive", name) for name in fixed)
            bars.append(report.bar(f"{family}, {rows} rows, adaptive / best fixed", worst, 0.95))
    head = ["prompts", "rows", "drafts", "on / off", "steps off / on", "tokens a step and row", "drafts a step and row"]
    head += ["drafts that came true", "host ms off", "host ms on"]
    return f"{report.table(head, lines)}\n\n{report.table(['bar', 'measured', 'asked', ''], bars)}"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "speculation", 5)
    options.add_dtype(parser)
    parser.add_argument("part", choices=list(PARTS), help="what is measured")
    parser.add_argument("--prompts", nargs="+", choices=list(FAMILIES), help="kinds of prompts (default: the part's)")
    parser.add_argument("--rows", type=int, nargs="+", help="prompts served together (default: the part's)")
    parser.add_argument("--new", type=int, default=160, help="most output tokens of a prompt (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further prompts after so long, the start with it")
    args = parser.parse_args(argv)
    families, rows, args.engines = PARTS[args.part]
    args.prompts, args.rows = args.prompts or families, args.rows or rows
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    began_s, args = time.monotonic(), parse_args(argv)
    machine.begin(args.urgent)
    from rayneuron import loading
    from rayneuron.config import parse

    kinds = {name: KINDS[name] for name in args.engines}
    said = {"model": {"path": args.model}, "dtype": args.dtype, "threads": args.threads}
    # no limit of a chunk's time: prompts are computed at once, or rows that end early would never decode beside those that begin late
    said |= {"max_num_seqs": max(args.rows), "max_model_len": 1024, "enable_prefix_caching": False, "prefill_chunk_ms": 0}
    engines = {name: loading.open_engine(parse({**said, "speculative_config": kind})) for name, kind in kinds.items()}
    watch, found = machine.Watch([]), Measured()
    for count in args.rows:
        serve(engines, prompts(engines["off"], "summary", count, 1000), 32)
    for turn in range(args.rounds):
        measure(engines, args, turn, found, began_s + args.seconds)
    for opened in engines.values():
        opened.engine.close()
    ratios = {f"{family}, {rows}": {n: found.ratio(family, rows, n) for n in by} for (family, rows), by in found.runs.items()}
    about = f"{args.part}, {args.model}, {args.dtype}, {max(len(by['off']) for by in found.runs.values())} rounds"
    if left := [f"{family} at {rows} rows" for family in args.prompts for rows in args.rows if (family, rows) not in found.runs]:
        about += f"; not measured within {args.seconds:g} s: {', '.join(left)}"
    report.tell("speculation", watch.facts(), about, show(found, args.dtype), {"ratios": ratios}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
