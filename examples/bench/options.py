"""The words every benchmark's command line understands (standard library only)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import machine
import report


def parser(description: str, saved_as: str, rounds: int) -> argparse.ArgumentParser:
    """A command line with the common options. `saved_as`: the name of the JSON file. From here on SIGTERM, as of `timeout`, ends what the
    benchmark has started, too."""
    machine.leave_cleanly_when_told()
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default="demo:smollm2", help="model directory or demo:NAME, made before any clock starts (%(default)s)")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads of each engine (default: all cores)")
    made.add_argument("--rounds", type=int, default=rounds, help="of which medians are taken (default %(default)s)")
    made.add_argument("--urgent", action="store_true", help="run before other users of this machine (needs root)")
    made.add_argument("--json", type=Path, help=f"where the figures go (default {report.FOLDER}/{saved_as}.json)")
    return made


def add_dtype(made: argparse.ArgumentParser) -> None:
    """One compute dtype."""
    made.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")


def add_load(made: argparse.ArgumentParser, clients: list[int], each: int) -> None:
    """A closed loop over HTTP."""
    made.add_argument("--clients", type=int, nargs="+", default=clients, help=f"levels (default {' '.join(map(str, clients))})")
    made.add_argument("--each", type=int, default=each, help="requests a client sends in a round (default %(default)s)")
    made.add_argument("--prompt", type=int, default=128, help="prompt tokens (default %(default)s)")
    made.add_argument("--new", type=int, default=64, help="output tokens (default %(default)s)")
