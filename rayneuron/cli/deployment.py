"""A deployment file as the argument of a command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add(command: argparse.ArgumentParser) -> None:
    """The arguments of such a command."""
    command.add_argument("deployment", type=Path, metavar="DEPLOYMENT.yaml", help="a Ray Serve config file with our keys under args")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the args: model.path=/models/x"
    )
    command.add_argument("--application", metavar="NAME", help="which application --set means, where the file has several; or all")


def read(args: argparse.Namespace) -> Any:
    """The deployment file of a command, with what --set says."""
    from rayneuron import deployment_file

    return deployment_file.read(args.deployment, deployment_file.parse_assignments(args.set), args.application)


def checked(args: argparse.Namespace) -> Any:
    """As `read`, refused here if a replica would refuse it."""
    from rayneuron import preflight

    file = read(args)
    for note in preflight.inspect_file(file):
        print(f"note: {note}", file=sys.stderr)
    return file
