"""version: the versions of what matters."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("version", help="print the versions of what matters")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from importlib.metadata import PackageNotFoundError, version

    print("python", sys.version.split()[0])
    for name in ("rayneuron", "ray", "torch", "transformers", "torch-neuronx", "neuronx-cc"):
        try:
            print(name, version(name))
        except PackageNotFoundError:
            print(name, "not installed")
