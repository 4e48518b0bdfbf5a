"""Processes as Linux tells of them: which one a pid is, and the end of those that others have started."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def process_started(pid: int) -> int | None:
    """Start time of a running process in kernel ticks since boot; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def this_process() -> tuple[int, int]:
    """Pid and start time of the caller."""
    pid = os.getpid()
    return pid, process_started(pid) or 0


def kill_started_by(pid: int, thread: int | None = None) -> None:
    """Every process that a process, or one thread of it, has started, and theirs first: once it is gone nobody knows whose they were."""
    for task in [Path(f"/proc/{pid}/task/{thread}")] if thread else _listed(Path(f"/proc/{pid}/task")):
        started = []
        with contextlib.suppress(OSError):
            started = (task / "children").read_text().split()
        for child in map(int, started):
            kill_started_by(child)
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)


def _listed(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(directory.iterdir())
    return []
