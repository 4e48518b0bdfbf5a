"""Workers as child processes of worker 0, for one host without Ray."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

import rayneuron
from rayneuron import settings
from rayneuron.group.worker import Invitation

LOOPBACK = "127.0.0.1"


class Processes(Protocol):
    """How a group gets its other workers. `node_ips`: the internal address of each node of the layout, worker 0's first."""

    node_ips: Sequence[str]

    def start(self, invitations: Sequence[Invitation], nodes: Sequence[int]) -> None:
        """Start one process for each invitation, on its node of the layout. Does not wait."""

    def gone(self) -> Mapping[int, str]:
        """Workers whose process has ended, and how."""

    def end(self, within_s: float) -> None:
        """See that no process is left: wait so long for them, then kill them."""


class Children:
    """Child processes of this one. `before_start`: variables they start with, where the operator has not set them."""

    node_ips: Sequence[str] = (LOOPBACK,)

    def __init__(self, before_start: Mapping[str, str] = MappingProxyType({})) -> None:
        self._before_start = before_start
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> dict[int, int]:
        """Worker index -> process id."""
        return {index: process.pid for index, process in self._processes.items()}

    def start(self, invitations: Sequence[Invitation], nodes: Sequence[int]) -> None:
        """Start them all on this host."""
        root = str(Path(rayneuron.__file__).parents[1])
        environment = settings.environment(self._before_start) | {"PYTHONPATH": ":".join(dict.fromkeys([root, *filter(None, sys.path)]))}
        for invitation in invitations:
            process = subprocess.Popen([sys.executable, "-m", "rayneuron.group.worker"], stdin=subprocess.PIPE, env=environment)
            self._processes[invitation.index] = process
            assert process.stdin is not None
            try:
                process.stdin.write(msgspec.msgpack.encode(invitation))
                process.stdin.close()
            except OSError:
                pass  # it has died already, and `gone` will say so

    def gone(self) -> Mapping[int, str]:
        """Those that have ended, with their exit code."""
        codes = {index: process.poll() for index, process in self._processes.items()}
        return {index: _how(code) for index, code in codes.items() if code is not None}

    def end(self, within_s: float) -> None:
        """Wait, kill, reap."""
        until = time.monotonic() + within_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


def _how(code: int) -> str:
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
