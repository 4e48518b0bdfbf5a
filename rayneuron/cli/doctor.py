"""doctor: cores, groups and who holds them, and what was left behind."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The command and its arguments."""
    command = commands.add_parser("doctor", help="list cores, groups and who holds them, and what was left behind")
    command.add_argument("--address", metavar="HOST:PORT", help="also look at this Ray cluster (auto: the one of this machine)")
    command.add_argument("--instance", metavar="TYPE", help="the type of this machine, to say which of its cores are free")
    command.add_argument("--clean", action="store_true", help="remove leaked placement groups and records of owners that have ended")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run it."""
    from rayneuron import settings
    from rayneuron.errors import NotReady
    from rayneuron.placement import doctor

    visible = settings.given("NEURON_RT_VISIBLE_CORES")
    for line in doctor.report(settings.ledger_dir(), args.instance, clean=args.clean, visible=visible):
        print(line)
    if args.address is not None:
        from rayneuron.serve import leaks

        try:
            for line in leaks.report(args.address, clean=args.clean):
                print(line)
        except ConnectionError as problem:
            raise NotReady(f"no Ray cluster answers at {args.address}: {problem}") from None
