"""What is to be served, as the arguments of a command: a model or a deployment file, and flags for its keys."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from rayneuron.cli import flags

log = logging.getLogger(__name__)


def add(command: argparse.ArgumentParser) -> None:
    """The arguments of such a command."""
    command.usage = f"{command.prog} MODEL|FILE.yaml [--KEY VALUE ...]"
    command.description = flags.ABOUT
    said = "a directory, org/name of a hub, s3://bucket/prefix or demo:smollm2; or a Ray Serve config file with our keys under args"
    command.add_argument("what", nargs="?", metavar="MODEL|FILE.yaml", help=f"{said} ($HF_MODEL_ID)")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the args: model.path=/models/x"
    )
    command.add_argument("--application", metavar="NAME", help="which application flags and --set mean, where the file has several; or all")
    lmi = "a folder with serving.properties of DJL LMI; without one its container's variables"
    command.add_argument("--lmi", nargs="?", const="", metavar="DIR", help=lmi)
    flags.add(command)


def read(args: argparse.Namespace) -> Any:
    """The deployment file of a command, or the one that serves its model, with what --set and flags say."""
    from rayneuron import deployment_file, settings
    from rayneuron.errors import ConfigError

    options = getattr(args, "options", {})
    assigned = {**deployment_file.parse_assignments(args.set), **getattr(args, "said", {})}
    if args.lmi is not None:
        return _translated(Path(args.lmi) if args.lmi else None, assigned, options)
    what = args.what or assigned.pop("model.path", None) or settings.hub_model()  # or as vLLM's server was told it: --model
    if what is None:
        raise ConfigError("name a model or a deployment file: rayneuron serve demo:smollm2; or set HF_MODEL_ID")
    if not (what.endswith((".yaml", ".yml")) or Path(what).is_file()):
        if args.application is not None:
            raise ConfigError("--application is for a file, which may have several; leave it out")
        return deployment_file.made(what, assigned, options)
    file = deployment_file.read(Path(what), assigned, args.application, options)
    if options:
        log.info("%s is overridden by %s", what, ", ".join(f"{option} ({key})" for key, option in options.items()))
    return file


def _translated(folder: Path | None, assigned: dict[str, Any], options: dict[str, str]) -> Any:
    """What a container of LMI would serve."""
    from rayneuron import settings
    from rayneuron.options import translation

    file, notes = translation.lmi(folder, settings.variables(), assigned, options)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return file


def checked(args: argparse.Namespace) -> Any:
    """As `read`, refused here if a replica would refuse it."""
    from rayneuron import preflight

    file = read(args)
    for note in preflight.inspect_file(file):
        print(f"note: {note}", file=sys.stderr)
    return file
