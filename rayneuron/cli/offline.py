"""What commands share that load a model into this process."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rayneuron.cli import flags

if TYPE_CHECKING:
    from rayneuron.llm import LLM


def command(commands: Any, name: str, said: str) -> argparse.ArgumentParser:
    """A command with every key of a deployment file as a flag."""
    made: argparse.ArgumentParser = commands.add_parser(name, help=said, conflict_handler="resolve")
    flags.add(made, whole=False)
    return made


def add_model(command: argparse.ArgumentParser) -> None:
    """Which model, and its options."""
    command.add_argument("model", metavar="MODEL", help="a model directory, org/name of a hub, s3://bucket/prefix or demo:smollm2")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of LLM: dtype=fp32, buckets.batch=[4]")


def opened(args: argparse.Namespace) -> LLM:
    """The model that was named, with what --set and flags say. Raises ConfigError or CheckpointError."""
    from rayneuron import deployment_file
    from rayneuron.llm import LLM
    from rayneuron.validation import override

    return LLM(args.model, **override({}, {**deployment_file.parse_assignments(args.set), **getattr(args, "said", {})}))
