"""quantize: a copy of a checkpoint with int8 or float8 weights."""

from __future__ import annotations

import argparse
from typing import Any

from rayneuron.cli import conversion


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("quantize", help="write a copy of a checkpoint with int8 or float8 weights")
    conversion.add(command)
    command.add_argument("--dtype", default="int8", help="int8, f8e4m3 or f8e5m2 (int8)")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron.models import quantize

    conversion.convert(args, "tensors", quantize.quantize, dtype=args.dtype)
