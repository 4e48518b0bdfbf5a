"""The command line, a file a command."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from rayneuron import __version__
from rayneuron.cli import (
    batch,
    check,
    compile,
    config,
    demo_model,
    doctor,
    generate,
    neuron_check,
    plan,
    quantize,
    serve,
    shard,
    simulate,
    size,
    translate,
    version,
)
from rayneuron.cli.flags import FlagParser
from rayneuron.errors import RayNeuronError

COMMANDS = (
    *(demo_model, config, plan, compile, serve, generate, batch, check, shard, quantize, simulate, size, translate),
    *(doctor, neuron_check, version),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, or 2 with one line on standard error that says what is wrong."""
    logging.basicConfig(format="%(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a text is printed whatever the locale has no letters for
    logging.getLogger("rayneuron").setLevel(logging.INFO)  # not what libraries say of each request
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has seen enough; the interpreter would complain about it once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (RayNeuronError, OSError) as error:  # the latter: a full disk, a directory nobody may write into
        said = str(error)
        if isinstance(error, OSError) and error.strerror:  # a full disk says not where
            where = error.filename or getattr(args, "out", None) or getattr(args, "output", None)
            said = f"{where}: {error.strerror}" if where else error.strerror
        print(f"rayneuron {args.command}: {said}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(prog="rayneuron", description="Large language models on AWS Neuron behind Ray Serve.")
    parser.add_argument("--version", action="version", version=f"rayneuron {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
