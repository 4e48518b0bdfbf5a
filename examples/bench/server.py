"""Ray Serve with one of our deployments, in processes of its own, as `serve run` starts it; ended by pid.

Its processes are told apart by a private RAY_TMPDIR in their environment, so that nothing else on the machine is counted or touched.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import yaml
from client import fetch

CHECKOUT = Path(__file__).resolve().parents[2]
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
    """`serve run` of `args` (config.Deployment's keys) with one profile. The constructor returns at once; `wait_ready` waits."""

    def __init__(self, args: dict[str, Any], profile: str = "plain", urgent: bool = False) -> None:
        from rayneuron.serve.profile import profile_env

        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.started_s = time.perf_counter()
        self._urgent = urgent
        self._folder = Path(tempfile.mkdtemp(prefix="rnb"))
        (self._folder / "ray").mkdir()
        self.log_path = self._folder / "serve.log"
        config = self._folder / "deployment.yaml"
        application = {"name": "bench", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args}
        config.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": self.port}, "applications": [application]}))
        self._mark = f"RAY_TMPDIR={self._folder}"
        env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "OMP_NUM_THREADS")}
        env |= profile_env(profile) | self._private(profile) | {"RAY_TMPDIR": str(self._folder), "RAY_AUTH_MODE": "disabled"}
        env["PYTHONPATH"] = str(CHECKOUT)
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local", str(config)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True, cwd=self._folder
            )
        if urgent:
            machine.prefer(self._process.pid)

    def _private(self, profile: str) -> dict[str, str]:
        """Files and ports HAProxy would otherwise share with every other cluster of this machine."""
        if profile != "fast":
            return {}
        folder = self._folder / "haproxy"
        folder.mkdir()
        first = 20_000 + os.getpid() % 9_000
        return {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + 50),
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first + 100),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + 150),
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }

    async def wait_ready(self, timeout_s: float = 240.0) -> float:
        """Seconds from the start until /health answers 200. Raises ServerFailed."""
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
        """The session `serve run` was started in; Ray's own processes leave it."""
        return self._process.pid

    def check(self) -> None:
        """Raise ServerFailed if `serve run` has ended."""
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
        """Everything this server started and that still runs."""
        return [p for p in machine.processes() if p.pid == self._process.pid or self._mark in machine.environment(p.pid)]

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
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
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
        return ServerFailed(f"serve run {what}; its log ends with:\n{self.log_path.read_text(errors='replace')[-3000:]}")


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
