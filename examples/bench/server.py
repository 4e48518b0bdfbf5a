"""One HTTP server in processes of its own, told apart by a mark in their environment, measured from outside, ended by pid."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import machine
from client import fetch

MARK = "RAYNEURON_BENCH_SERVER"
POLL_S = 0.02
PROBE_TIMEOUT_S = 1.0  # Serve's proxy holds a request until a replica is there; short, so that the moment of readiness is seen
STOP_S = 40.0  # Serve in HAProxy mode drains for seconds before it ends


class ServerFailed(RuntimeError):
    """The server ended, or was not ready in time; the message ends with the last lines of its log."""


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds since the start: proxy (with HAProxy), replica, its compute threads, and everything else of Ray."""

    proxy_s: float
    replica_s: float
    compute_s: float
    rest_s: float


class Server:
    """One server, started by `command(port)` with `env`. The constructor returns at once; `wait_ready` waits.

    `folder` is the server's own and is removed with it; its name in the environment marks every process the server starts.
    """

    def __init__(self, name: str, command: Callable[[int], list[str]], env: Mapping[str, str], folder: Path, urgent: bool = False) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._urgent = urgent
        self._folder = folder
        self.log_path = folder / "server.log"
        self._mark = f"{MARK}={folder}"
        whole = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "OMP_NUM_THREADS")} | {**env, MARK: str(folder)}
        self.started_s = time.perf_counter()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command(self.port),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=whole,
                start_new_session=True,
                cwd=folder,
            )
        if urgent:
            machine.prefer(self._process.pid)

    async def wait_ready(self, timeout_s: float = 240.0) -> float:
        """Seconds from the start until /health answers 200; for our servers and vLLM's own this is the truth. Raises ServerFailed."""
        while time.perf_counter() - self.started_s < timeout_s:
            self.check()
            if await self.status("/health") == 200:
                ready_s = time.perf_counter() - self.started_s
                if self._urgent:
                    for session in {p.session for p in self.processes()}:
                        machine.prefer(session)
                return ready_s
            await asyncio.sleep(POLL_S)
        raise self._failed(f"was not ready after {timeout_s:.0f} s")

    @property
    def session(self) -> int:
        """The session the server was started in; Ray's own processes leave it."""
        return self._process.pid

    def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        if self._process.poll() is not None:
            raise self._failed("ended")

    async def status(self, path: str) -> int:
        """The HTTP status of a GET, 0 where nobody answers."""
        try:
            return (await fetch(self.url, path, PROBE_TIMEOUT_S))[0]
        except (OSError, asyncio.TimeoutError):
            return 0

    async def metric(self, name: str) -> float:
        """The sum of all series of one name on /metrics. Raises KeyError where there is none."""
        _, body = await fetch(self.url, "/metrics")
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)", body.decode(), re.MULTILINE)
        if not values:
            raise KeyError(f"{name} is not on /metrics")
        return sum(map(float, values))

    async def metric_by(self, name: str, label: str) -> dict[str, float]:
        """The series of one name on /metrics by one label's value."""
        _, body = await fetch(self.url, "/metrics")
        found = re.findall(rf'^{re.escape(name)}{{[^}}]*\b{label}="([^"]*)"[^}}]*}} (\S+)', body.decode(), re.MULTILINE)
        return {value: float(number) for value, number in found}

    def processes(self) -> list[machine.Process]:
        """Everything this server started and that still runs: the sessions of whoever has our mark in its environment.

        Not all have it: a process that sets its title writes over its environment, as the processes of Ray's dashboard do.
        """
        found = machine.processes()
        sessions = {p.session for p in found if p.pid == self._process.pid or self._mark in machine.environment(p.pid)}
        return [p for p in found if p.session in sessions - {os.getsid(0)} and p.state != "Z"]

    def cpu_s(self) -> float:
        """CPU seconds of all of them so far."""
        return sum(p.cpu_s for p in self.processes())

    def freeze(self) -> None:
        """Stop every process of the server, so that nothing of it competes with whoever is measured now."""
        for process in self.processes():
            _signal(process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them run again."""
        for process in self.processes():
            _signal(process.pid, signal.SIGCONT)

    def cpu_time(self, threads: int) -> CpuTime:
        """CPU seconds so far, by part. Compute threads: the `threads` busiest of the replica, those of the engine and its products."""
        parts = {"proxy": 0.0, "replica": 0.0, "rest": 0.0}
        compute = 0.0
        for process in self.processes():
            title = machine.command(process.pid)
            part = "replica" if "ServeReplica" in title else "proxy" if "ProxyActor" in title or "haproxy" in title.lower() else "rest"
            parts[part] += process.cpu_s
            if part == "replica":
                compute += sum(sorted(machine.thread_cpu_s(process.pid), reverse=True)[:threads])
        return CpuTime(parts["proxy"], parts["replica"], compute, parts["rest"])

    def close(self) -> None:
        """End the server as Ctrl-C does, and whatever of it is left, by pid."""
        self.thaw()
        if self._process.poll() is None:  # a child of a background job inherits that SIGINT is ignored
            self._process.send_signal(signal.SIGTERM if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else signal.SIGINT)
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + STOP_S
            while self.processes() and time.monotonic() < deadline:
                if self._process.poll() is not None and number is signal.SIGKILL:
                    break
                time.sleep(POLL_S)
            for process in self.processes():
                _signal(process.pid, number)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _failed(self, what: str) -> ServerFailed:
        return ServerFailed(f"{self.name} {what}; its log ends with:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines of the log."""
        return self.log_path.read_text(errors="replace")[-3000:]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
