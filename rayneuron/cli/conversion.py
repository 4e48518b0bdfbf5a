"""What commands that write a checkpoint anew have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayneuron.cli.bar import bar


def add(command: argparse.ArgumentParser) -> None:
    """The arguments of such a command."""
    command.add_argument("model", metavar="MODEL", help="a model directory, org/name of a hub, s3://bucket/prefix or demo:NAME")
    command.add_argument("--scheme", default="per_channel", help="one scale per_channel or per_tensor (per_channel)")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to; not there yet")


def convert(args: argparse.Namespace, unit: str, write: Callable[..., object], **options: Any) -> None:
    """write(model, out=..., **options) with a progress bar over so many `unit`; then the new directory is printed."""
    from rayneuron import sources
    from rayneuron.aside import aside

    with bar(unit) as progress, aside(args.out) as partial:
        write(sources.resolve(args.model).path, scheme=args.scheme, out=partial, progress=progress, **options)
    print(args.out)
