"""The Ray that this process started, where it started one: whether it still runs, and its end."""

from __future__ import annotations

import os
import sys
import threading
import time

import ray
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET

from rayneuron.processes import kill_started_by

PERIOD_S = 0.25
NEEDED = (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET)  # what hangs without an error where one of them is gone


def ended() -> str | None:
    """The name of a process that nothing works without and that has ended; None where there is none, or Ray is not ours."""
    node = ray._private.worker._global_node
    gone = [kind for kind, _ in node.dead_processes()] if node is not None else []
    return next((kind for kind in NEEDED if kind in gone), None)


def watch(until_s: float, left: threading.Event) -> None:
    """End this process then, or before streams have `left` if Ray has ended: service managers tell every process."""
    while time.monotonic() < until_s:
        gone = ended()
        if gone is not None and not left.is_set():
            print(f"Ray's {gone} ended before the streams had", file=sys.stderr, flush=True)
            break
        time.sleep(PERIOD_S)
    end_now(1)


def end_now(code: int) -> None:
    """End this process without waiting for anything, and Ray's: its agents too, which would live for a minute without the rest."""
    if ray._private.worker._global_node is not None:
        kill_started_by(os.getpid())
    os._exit(code)
