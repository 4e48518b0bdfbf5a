"""batch: a file of requests, offline."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rayneuron.cli import offline


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = offline.command(commands, "batch", "answer a file of requests (OpenAI's batch lines) offline", "IN OUT MODEL")
    command.add_argument("input", metavar="IN", type=Path, help="a request a line: custom_id, url, body")
    command.add_argument("output", metavar="OUT", type=Path, help="gets an answer a line; what it answers already is left out")
    offline.add_model(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron import batches
    from rayneuron.errors import ConfigError

    lines = list(batches.lines(args.input))  # what is wrong with the files is said before a model is loaded
    args.output.open("ab").close()
    if args.output.samefile(args.input):
        raise ConfigError(f"{args.output}: the answers would be written into the file of requests; name another")
    with offline.opened(args) as llm:
        tally = batches.run(llm, lines, args.output)
    print(f"{args.output}: {tally.answered} of {len(lines)} answered, {tally.refused} of them refused, {tally.before} known before")
