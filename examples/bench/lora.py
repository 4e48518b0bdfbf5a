#!/usr/bin/env python3
"""What adapters cost: two engines of one model in this process, one of which has room for adapters, and random ones of all its products.

Four figures, all of rows that decode greedily together: rows without an adapter in the engine with room against those in the other; rows
with one adapter, and with eight, against rows without in the same engine; and the longest gap of 8 streams while adapters are loaded
beside them, beyond their longest gap without. Rounds alternate.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import machine
import options
import report

if TYPE_CHECKING:
    from rayneuron import LLM

PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = "Once upon a time there was"


def write(folder: Path, model: Path, rank: int, seed: int) -> str:
    """A random adapter of a Llama's products, as PEFT writes it."""
    import torch
    from safetensors.torch import save_file

    said, generator = json.loads((model / "config.json").read_text()), torch.Generator().manual_seed(seed)
    hidden, ffn, heads = said["hidden_size"], said["intermediate_size"], said["num_attention_heads"]
    keys = hidden // heads * said["num_key_value_heads"]
    sizes = ((hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden), (ffn, hidden), (ffn, hidden), (hidden, ffn))
    shapes = dict(zip(PRODUCTS, sizes, strict=True))
    tensors = {}
    for layer in range(said["num_hidden_layers"]):
        for name, (out, inside) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{'mlp' if name in PRODUCTS[4:] else 'self_attn'}.{name}.lora_"
            tensors[f"{at}A.weight"] = torch.randn(rank, inside, generator=generator) / math.sqrt(inside)
            tensors[f"{at}B.weight"] = torch.randn(out, rank, generator=generator) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(PRODUCTS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def rate(llm: LLM, rows: int, new: int, adapters: Sequence[str | None]) -> float:
    """Tokens a second of rows that decode together; their adapters in turn."""
    from rayneuron import SamplingParams

    params, ids = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), llm.text.encode(PROMPT)
    requests = [llm.request([*ids, 100 + i], params, adapters[i % len(adapters)]) for i in range(rows)]
    last: dict[str, int] = {}
    began = 0.0
    for delta in llm.tokens(requests):
        last[delta.request_id] = last.get(delta.request_id, 0) + len(delta.token_ids)
        began = began or (time.perf_counter() if len(last) == rows else 0.0)  # every prompt has been computed
    return rows * (new - 1) / (time.perf_counter() - began)


def longest_gap_ms(llm: LLM, adapter: str, new: int, beside: Callable[[], None]) -> float:
    """The longest time between two steps of 8 streams, while something happens beside them."""
    from rayneuron import SamplingParams

    params, ids = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), llm.text.encode(PROMPT)
    requests = [llm.request([*ids, 100 + i], params, adapter if i % 2 else None) for i in range(8)]
    seen: set[str] = set()
    worst = last = 0.0
    busy = threading.Thread(target=beside)
    for delta in llm.tokens(requests):
        now = time.perf_counter()
        if last:
            worst = max(worst, 1e3 * (now - last))
        elif len(seen := seen | {delta.request_id}) == 8:
            busy.start()
        last = now if len(seen) == 8 else 0.0
    busy.join()
    return worst


def load(llm: LLM, paths: Sequence[str]) -> None:
    """Take adapters and give them back, as a server does where clients ask for it."""
    from functools import partial

    from rayneuron.engine.engine import Engine

    shelf = llm.engine.runner.shelf
    assert shelf is not None
    for path in paths:
        identity = shelf.read(path, gently=True)
        llm._loop.ask(partial(lambda identity, engine: engine.adapters.name("beside", identity), identity)).result()

    def forget(engine: Engine) -> None:
        engine.adapters.forget("beside")

    llm._loop.ask(forget).result()


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = options.parser(__doc__ or "", "lora", 7)
    options.add_dtype(parser)
    parser.add_argument("--rows", type=int, default=16, help="rows served together (default %(default)s)")
    parser.add_argument("--new", type=int, default=96, help="output tokens of a row (default %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of every adapter (default %(default)s)")
    return parser.parse_args(argv)


def measure(plain: LLM, room: LLM, spare: Sequence[str], args: argparse.Namespace) -> dict[str, list[float]]:
    """Every figure of every round."""
    names = list(room.engine.adapters.names)
    kinds: dict[str, tuple[LLM, Sequence[str | None]]] = {
        "plain": (plain, (None,)), "base": (room, (None,)), "one": (room, names[:1]), "eight": (room, names[:8]),
    }  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in (*kinds, "gap", "gap loading")}
    for turn in range(-1, args.rounds):
        order = list(kinds) if turn % 2 else list(kinds)[::-1]
        made = {name: rate(kinds[name][0], args.rows, args.new, kinds[name][1]) for name in order}
        made["gap"] = longest_gap_ms(room, names[0], 3 * args.new, lambda: None)
        made["gap loading"] = longest_gap_ms(room, names[0], 3 * args.new, lambda: load(room, spare))
        for name in found if turn >= 0 else ():
            found[name].append(made[name])
    return found


def show(found: dict[str, list[float]]) -> str:
    """Markdown: the bars of issue 20."""
    import statistics

    beyond = statistics.median(found["gap loading"]) - statistics.median(found["gap"])
    bars = [
        report.bar("rows without an adapter: engine with room / without", report.median_ratio(found["base"], found["plain"]), 0.99),
        report.bar("rows with one adapter / without", report.median_ratio(found["one"], found["base"]), 0.90),
        report.bar("rows with eight adapters / without", report.median_ratio(found["eight"], found["base"]), 0.75),
        report.bar("longest gap while adapters load, beyond without, ms", beyond, 5.0, False),
    ]
    return report.table(["bar", "measured", "asked", ""], bars)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse_args(argv)
    machine.begin(args.urgent)
    from rayneuron import LLM

    watch = machine.Watch([])
    words = {"dtype": args.dtype, "threads": args.threads, "max_num_seqs": args.rows, "max_model_len": 1024, "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as folder, LLM(args.model, **words) as plain:
        paths = [write(Path(folder) / f"adapter{i}", plain.path, args.rank, i) for i in range(12)]
        lora = {"lora_modules": {f"adapter{i}": path for i, path in enumerate(paths[:8])}, "max_lora_rank": args.rank}
        with LLM(args.model, **words, lora=lora) as room:
            machine.settle()
            found = measure(plain, room, paths[8:], args)
    about = f"{args.model}, {args.dtype}, rank {args.rank}, {args.rounds} rounds"
    report.tell("lora", watch.facts(), about, show(found), {"figures": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
