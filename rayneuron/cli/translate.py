"""translate: the option files of another system, as the deployment file that they become."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("translate", help="print the deployment file that serving.properties, NxD's or ray.serve.llm's become")
    said = "a folder with serving.properties or neuron_config.json, such a JSON, or a YAML of ray.serve.llm; without: LMI's variables"
    command.add_argument("what", nargs="?", metavar="DIR|FILE", help=said)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    import yaml

    from rayneuron import settings
    from rayneuron.options import translation

    file, notes = translation.read(Path(args.what)) if args.what else translation.lmi(None, settings.variables(), {}, {})
    for note in notes:
        print(f"# {note}")
    print(yaml.safe_dump(dict(file.content), sort_keys=False), end="")
