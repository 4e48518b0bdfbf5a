"""neuron-check: the first day on a machine with Neuron cores, as one command."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """The command and its arguments."""
    text = "ask a machine with Neuron cores, step by step, what cannot be known without one"
    command = commands.add_parser("neuron-check", help=text, description=text + "; it stops at the first difference and writes a report")
    command.add_argument("--stage", choices=("host", "sdk", "compile", "core", "group"), help="only this one (all, in this order)")
    command.add_argument("--only", type=int, action="append", metavar="N", help="only the step of this number; several times")
    command.add_argument("--instance", metavar="TYPE", help="the type of this machine: inf2.48xlarge")
    command.add_argument("--model", default="demo:random:tp8", help="a model that a few cores hold")
    command.add_argument("--tensor-parallel", type=int, action="append", metavar="N", help="degrees to try (1, 2 and 8)")
    command.add_argument("--hosts", nargs="+", default=[], metavar="HOST", help="the nodes of a group, this one first")
    command.add_argument("--report", type=Path, default=Path("neuron-check.txt"), metavar="FILE", help="where the report goes")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it. Raises NotReady where a step found something else than was expected."""
    import tempfile

    from rayneuron import __version__
    from rayneuron.devices.neuron.sdk import imitated
    from rayneuron.errors import ConfigError, NotReady
    from rayneuron.neuron_check import graphs, host, serving, steps

    degrees = tuple(args.tensor_parallel or (1, 2, 8))
    listed = [*host.HOST, *graphs.SDK, *graphs.COMPILE, *serving.COMPILED, *serving.CORE, *host.GROUP]
    chosen = [s for s in listed if args.stage in (None, s.stage) and (not args.only or s.number in args.only)]
    if not chosen:
        raise ConfigError(f"there is no such step; there are {', '.join(f'{s.number} ({s.stage})' for s in listed)}", param="only")
    with tempfile.TemporaryDirectory(prefix="neuron-check-") as folder:
        machine = steps.Machine(imitated(), args.instance, args.model, degrees, Path(folder), tuple(args.hosts))
        if machine.standin:
            print("this is a stand-in for the SDK: what follows says nothing of hardware")
        answers = steps.ask(chosen, machine, lambda line: print(line, flush=True))
    args.report.write_text(steps.report(answers, machine, [f"rayneuron {__version__}"]))
    print(f"report: {args.report}")
    if answers[-1].outcome == "differs":
        raise NotReady(f"step {answers[-1].step.number} differs; attach {args.report} to a bug")
