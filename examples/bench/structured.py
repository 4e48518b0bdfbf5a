#!/usr/bin/env python3
"""What it costs that outputs must match: an engine in this process, with rows that are constrained and rows that are free.

Three figures: tokens a second of 16 rows held to a JSON schema against the same rows free, both greedy and of one length; the first token
with a schema of 4 KiB that nobody has sent before, and with one that is known, beyond the first token without; and the longest gap of 8
streams while 50 constraints come that take compilers and matchers long, beyond their longest gap without. Rounds alternate.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import machine
import options
import report

if TYPE_CHECKING:
    from rayneuron import LLM, StructuredOutputs

PROMPT = "List the people of a small town as JSON, with their names, ages and trades: "
PEOPLE = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "trade": {"enum": ["baker", "smith", "tailor"]},
        },
        "required": ["name", "age", "trade"],
        "additionalProperties": False,
    },
}


def large(seed: int) -> dict[str, Any]:
    """A schema of 4 KiB like no other."""
    flags = {"type": "array", "items": {"type": "boolean"}, "maxItems": 5}
    kinds: tuple[dict[str, Any], ...] = ({"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0}, flags)
    parts = {f"field_{seed}_{i}": {**kinds[i % 3], "description": f"what field {i} of form {seed} says"} for i in range(42)}
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


def hostile(rng: random.Random) -> dict[str, Any]:
    """What takes long to compile, or to follow."""
    rules = "\n".join(f"a{i}: a{i + 1} a{i + 1} | /x*{i}/" for i in range(300))
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(150):
        deep = {"anyOf": [{"type": "object", "properties": {"a": deep}}, {"type": "array"}]}
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"regex": f"(.*a.{{{rng.randrange(200, 900)}}}b){{50}}"},
        lambda: {"regex": f"(a?){{{rng.randrange(1000, 9000)}}}a{{5000}}"},
        lambda: {"regex": "|".join(f"{rng.randrange(10**9)}.*x" for _ in range(5000))},
        lambda: {"json": {**deep, "title": str(rng.random())}},
        lambda: {"json": {"type": "object", "properties": {f"p{i}": {"pattern": f".*{i + rng.randrange(9)}.*"} for i in range(2000)}}},
        lambda: {"grammar": f"start: a0\n{rules}\na300: /y{rng.randrange(999)}/"},
        lambda: {"grammar": f'start: e\ne: e "+" e | e e | /[a-z]*{rng.randrange(999)}?/ | ""'},
        lambda: {"choice": tuple(str(rng.random()) for _ in range(6000))},
    ]
    return rng.choice(kinds)()


def rate(llm: LLM, rows: int, new: int, said: StructuredOutputs | None) -> float:
    """Tokens a second of rows served together."""
    from rayneuron import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, structured_outputs=said)
    began = time.perf_counter()
    found = llm.generate([f"{PROMPT}{i} " for i in range(rows)], params)
    took_s = time.perf_counter() - began
    tokens = sum(len(result.outputs[0].token_ids) for result in found)
    assert tokens == rows * new, f"{tokens} tokens of {rows * new}: a row ended early"
    return tokens / took_s


def first_ms(llm: LLM, said: StructuredOutputs | None) -> float:
    """Until the first token of a request alone."""
    from rayneuron import SamplingParams

    began = time.perf_counter()
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, structured_outputs=said))
    next(stream)
    took_ms = 1e3 * (time.perf_counter() - began)
    for _ in stream:
        pass
    return took_ms


def gaps_ms(llm: LLM, streams: int, new: int, beside: Callable[[], None]) -> list[float]:
    """The longest gap between two tokens of each of some streams, while something happens beside them."""
    from rayneuron import SamplingParams

    worst, begun = [0.0] * streams, threading.Barrier(streams + 1)

    def follow(place: int) -> None:
        last = 0.0
        for delta in llm.stream(f"{PROMPT}{place} ", SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)):
            now = time.perf_counter()
            if last:
                worst[place] = max(worst[place], 1e3 * (now - last))
            else:
                begun.wait()
            last = now
            assert delta.error is None

    threads = [threading.Thread(target=follow, args=(place,)) for place in range(streams)]
    for thread in threads:
        thread.start()
    begun.wait()
    beside()
    for thread in threads:
        thread.join()
    return worst


def attack(llm: LLM, wanted: Sequence[StructuredOutputs]) -> list[str]:
    """Send constraints one after another, each with a request of its own; how each ended."""
    from rayneuron import SamplingParams
    from rayneuron.errors import RequestError

    ends = []
    for said in wanted:
        try:
            found = llm.generate("x", SamplingParams(temperature=1, max_tokens=6, structured_outputs=said))
            ends.append(str(found[0].outputs[0].finish_reason))
        except RequestError:
            ends.append("refused")
    return ends


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "structured", 5)
    options.add_dtype(parser)
    parser.add_argument("--rows", type=int, default=16, help="rows served together (default %(default)s)")
    parser.add_argument("--new", type=int, default=160, help="output tokens of a row (default %(default)s)")
    parser.add_argument("--hostile", type=int, default=50, help="constraints that take long (default %(default)s)")
    return parser.parse_args(argv)


def measure(llm: LLM, args: argparse.Namespace) -> dict[str, list[float]]:
    """Every figure of every round."""
    from rayneuron import StructuredOutputs

    names = ("constrained", "free", "ttft free", "ttft new", "ttft known", "gap", "gap hostile")
    found: dict[str, list[float]] = {name: [] for name in names}
    people, rng = StructuredOutputs(json=PEOPLE), random.Random(7)
    ends: list[str] = []
    for turn in range(-1, args.rounds):
        made: dict[str, list[float]] = {name: [] for name in found}
        for name in ("free", "constrained") if turn % 2 else ("constrained", "free"):
            made[name].append(rate(llm, args.rows, args.new, people if name == "constrained" else None))
        for i in range(10):
            said = StructuredOutputs(json=large(100 * (turn + 1) + i))
            for name, each in (("ttft free", None), ("ttft new", said), ("ttft known", said)):
                made[name].append(first_ms(llm, each))
        wanted = [StructuredOutputs(**hostile(rng)) for _ in range(args.hostile)]
        made["gap"] += gaps_ms(llm, 8, args.new, lambda: None)
        made["gap hostile"] += gaps_ms(llm, 8, args.new, lambda wanted=wanted: ends.extend(attack(llm, wanted)))  # type: ignore[misc]
        for name in found if turn >= 0 else ():
            found[name] += made[name]
    print(f"hostile constraints ended: { {end: ends.count(end) for end in sorted(set(ends))} }", file=sys.stderr)
    return found


def show(found: dict[str, list[float]]) -> str:
    """Markdown: the bars of issue 18."""
    new, known, free = (statistics.median(found[name]) for name in ("ttft new", "ttft known", "ttft free"))
    worse = max(found["gap hostile"]) - max(found["gap"])
    bars = [
        report.bar("JSON schema, rows constrained / free", report.median_ratio(found["constrained"], found["free"]), 0.93),
        report.bar("first token with a new schema of 4 KiB, beyond without, ms", new - free, 10.0, False),
        report.bar("first token with a known one, beyond without, ms", known - free, 1.0, False),
        report.bar("longest gap beside hostile constraints, beyond without, ms", worse, 20.0, False),
    ]
    return report.table(["bar", "measured", "asked", ""], bars)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_args(argv)
    machine.begin(args.urgent)
    from rayneuron import LLM

    watch = machine.Watch([])
    rows = max(args.rows, 9)
    said = {"dtype": args.dtype, "threads": args.threads, "max_num_seqs": rows, "max_model_len": 1024}
    with LLM(args.model, **said, enable_prefix_caching=False, speculative_config=False) as llm:
        machine.settle()
        found = measure(llm, args)
    about = f"{args.model}, {args.dtype}, {args.rounds} rounds"
    report.tell("structured", watch.facts(), about, show(found), {"figures": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
