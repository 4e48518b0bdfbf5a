"""demo-model: write a model to try things with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("demo-model", help="write the demo model, or a random one, and print its directory")
    command.add_argument("--random", metavar="SIZE", help="a Llama with random weights: tiny, tp8, tp128, 160m, 0.5b or 1b")
    command.add_argument("--seed", type=int, default=0, help="of the random weights (0)")
    command.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (bf16)")
    command.add_argument("--out", type=Path, metavar="DIR", help="write there instead of the cache")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron import demo

    if args.random is None:
        print(demo.ensure(dtype=args.dtype, out=args.out))
    else:
        print(demo.random(args.random, seed=args.seed, dtype=args.dtype, out=args.out))
