"""config: check a deployment file, and print one with every default filled in."""

from __future__ import annotations

import argparse
from typing import Any

from rayneuron.cli import deployment


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("config", help="check a deployment file, and print one with every default filled in")
    deployment.add(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    import yaml

    print(yaml.safe_dump(deployment.checked(args).filled(), sort_keys=False), end="")
