"""What commands share that load a model into this process."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rayneuron.cli import flags

if TYPE_CHECKING:
    from rayneuron.llm import LLM


def command(commands: Any, name: str, said: str, words: str) -> argparse.ArgumentParser:
    """A command with every key of a deployment file as a flag; `words`: what else its line says."""
    usage = f"rayneuron {name} {words} [--KEY VALUE ...]"
    made: argparse.ArgumentParser = commands.add_parser(name, help=said, usage=usage, description=flags.ABOUT, conflict_handler="resolve")
    flags.add(made, whole=False)
    return made


def add_model(command: argparse.ArgumentParser) -> None:
    """Which model, and its options."""
    said = "a model directory, org/name of a hub, s3://bucket/prefix or demo:smollm2 ($HF_MODEL_ID)"
    command.add_argument("model", nargs="?", metavar="MODEL", help=said)
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of LLM: dtype=fp32, buckets.batch=[4]")


def opened(args: argparse.Namespace) -> LLM:
    """The model that was named, with what --set and flags say. Raises ConfigError or CheckpointError."""
    from rayneuron import deployment_file, settings
    from rayneuron.errors import ConfigError
    from rayneuron.llm import LLM
    from rayneuron.validation import override

    said = {**deployment_file.parse_assignments(args.set), **getattr(args, "said", {})}
    named = said.pop("model.path", None)
    if named is not None and args.model is not None:
        raise ConfigError(f"the model is named twice, {args.model!r} and {named!r}; leave one of them out", param="model.path")
    args.model = args.model if args.model is not None else named or settings.hub_model()
    if args.model is None:
        raise ConfigError(f"name a model: rayneuron {args.command} demo:smollm2 ...; or set HF_MODEL_ID")
    return LLM(args.model, **override({}, said))
