"""batch: a file of requests, offline."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rayneuron.cli import flags


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("batch", help="answer a file of requests (OpenAI's batch lines) offline", conflict_handler="resolve")
    flags.add(command, whole=False)
    command.add_argument("input", metavar="IN", type=Path, help="a request a line: custom_id, url, body")
    command.add_argument("output", metavar="OUT", type=Path, help="gets an answer a line; what it answers already is left out")
    command.add_argument("model", metavar="MODEL", help="a model directory, org/name of a hub, s3://bucket/prefix or demo:smollm2")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of LLM: dtype=fp32, buckets.batch=[4]")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron import LLM, batches, deployment_file
    from rayneuron.validation import override

    total = sum(1 for _ in batches.lines(args.input))  # what is wrong with the file is said before a model is loaded
    with LLM(args.model, **override({}, {**deployment_file.parse_assignments(args.set), **getattr(args, "said", {})})) as llm:
        tally = batches.run(llm, args.input, args.output)
    print(f"{args.output}: {tally.answered} of {total} answered, {tally.refused} of them refused, {tally.before} known before")
