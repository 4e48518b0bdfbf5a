"""One child process that stays loaded and answers JSON lines; ended by its pid, frozen while another one is measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import machine

GRACE_S = 10.0
LOG_TAIL_BYTES = 3000


class ChildFailed(RuntimeError):
    """The child ended or stayed silent; the message ends with the last lines of its log."""


class Child:
    """A process in a session of its own. `command` must speak the protocol of peers/answer.py. `urgent`: see machine.prefer."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], urgent: bool = False) -> None:
        self.name = name
        self._log = tempfile.NamedTemporaryFile("w+b", prefix=f"bench-{name}-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=dict(env), start_new_session=True
        )
        if urgent:
            machine.prefer(self._process.pid)
        self._pending = b""
        self._frozen = False

    @property
    def session(self) -> int:
        """The session id of the child and of all it starts."""
        return self._process.pid

    def ask(self, command: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises ChildFailed."""
        self.thaw()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        answer = json.loads(self._line(time.monotonic() + timeout_s))
        if "error" in answer:
            raise self._failed(f"answered: {answer['error']}")
        return answer

    def freeze(self) -> None:
        """Stop the child's processes, so that nothing of it competes with whoever is measured now."""
        if not self._frozen:
            os.killpg(self.session, signal.SIGSTOP)
            self._frozen = True

    def thaw(self) -> None:
        """Let them run again."""
        if self._frozen:
            os.killpg(self.session, signal.SIGCONT)
            self._frozen = False

    def close(self) -> None:
        """End the child and all of its session: asked first, then told."""
        if self._process.poll() is None:
            self.thaw()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._wait_or(signal.SIGTERM)
        _signal_group(self.session, signal.SIGTERM)
        self._wait_or(signal.SIGKILL)
        _signal_group(self.session, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _wait_or(self, then: signal.Signals) -> None:
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            _signal_group(self.session, then)

    def _line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise self._failed("did not answer in time")
            piece = os.read(fd, 1 << 20)
            if not piece:
                raise self._failed("ended")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _failed(self, what: str) -> ChildFailed:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL_BYTES))
        return ChildFailed(f"{self.name} {what}; its log ends with:\n{self._log.read().decode(errors='replace')}")


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
