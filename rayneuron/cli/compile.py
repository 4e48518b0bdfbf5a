"""compile: everything a deployment needs, before it is served."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rayneuron.cli import deployment
from rayneuron.cli.bar import bar


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("compile", help="compile everything a deployment needs, before it is served")
    deployment.add(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="also copy it there, for `compile.artifact` on another node")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron.compiling import compile_ahead

    file = deployment.read(args)
    for name, config in file.deployments.items():
        if args.application not in (None, name):
            continue
        out = args.out / name if args.out is not None and len(file.deployments) > 1 and args.application is None else args.out
        print(f"{name}: {config.model.served_name} on {config.device}")
        with bar("graphs") as progress:
            print(compile_ahead(config, out, print, progress), flush=True)
