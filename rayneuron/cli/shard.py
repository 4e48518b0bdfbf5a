"""shard: cut a checkpoint once, so that every rank reads its own file."""

from __future__ import annotations

import argparse
from typing import Any

from rayneuron.cli import conversion


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("shard", help="cut a checkpoint once, so that every rank reads its own file")
    conversion.add(command)
    command.add_argument("--tp", type=int, required=True, metavar="N", help="tensor-parallel degree: how many ranks")
    command.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16 (auto: as a deployment has it)")
    command.add_argument("--quantization", help="int8, f8e4m3 or f8e5m2 weights (none)")
    command.add_argument("--unfused", action="store_true", help="keep q, k and v apart, for deployments with fused_qkv: false")
    command.add_argument("--group-query-attention", metavar="NAME", help="how heads are shared, as in the deployment file")
    command.add_argument("--shard-over-sequence", action="store_true", help="for deployments with shard_over_sequence: true")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron.errors import ConfigError
    from rayneuron.models import presharded

    if args.tp < 1:
        raise ConfigError(f"--tp: must be at least 1, got {args.tp}")
    options = {"tp": args.tp, "dtype": args.dtype, "quantization": args.quantization, "fused_qkv": not args.unfused}
    options |= {"group_query_attention": args.group_query_attention, "shard_over_sequence": args.shard_over_sequence}
    conversion.convert(args, "layers", presharded.shard, **options)
