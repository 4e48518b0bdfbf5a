"""A Ray that starts to serve one model: without what only a cluster's operators ask, and with workers that are forks.

What Ray starts in Python beside its workers are five interpreters, and it waits for two of them before it takes work.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray._raylet
from ray._private import log_monitor, services
from ray._private.node import Node

from rayneuron.serve import fork_client, stand_in_agent

log = logging.getLogger(__name__)

UNUSED = ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME")
NOBODY = -1  # what Ray's own agent says of ports where it is installed without its dashboard
REGISTERED_S, LOOK_PERIOD_S = 10.0, 0.01
ALONE = [sys.executable, "-I", "-S"]


@contextlib.contextmanager
def lean(forks: str | None) -> Iterator[None]:
    """A Ray that starts meanwhile has no dashboard, no agent of it and no autoscaler, hands on logs from here, prepares no environments
    before somebody asks for one, and asks at `forks` for its workers.

    All of that is private to Ray: a Ray that has it no more starts as it does by itself.
    """
    ours: dict[str, tuple[Any, Callable[..., Any]]] = {
        "start_api_server": (Node, lambda self, **said: None),
        "start_monitor": (Node, lambda self, **said: None),
        "start_log_monitor": (Node, _watch_logs),
        "start_ray_process": (services, _starting(getattr(services, "start_ray_process", None), forks)),
    }
    kept = {name: (owner, getattr(owner, name)) for name, (owner, _) in ours.items() if hasattr(owner, name)}
    try:
        for name, (owner, _) in kept.items():
            setattr(owner, name, ours[name][1])
        yield
    finally:
        for name, (owner, before) in kept.items():
            setattr(owner, name, before)


def _watch_logs(node: Any) -> None:
    """Ray's own log monitor, as a thread of this process."""

    logging.getLogger(log_monitor.__name__).setLevel(logging.WARNING)  # it tells of every file

    def run() -> None:
        try:
            client = ray._raylet.GcsClient(address=node.gcs_address)
            log_monitor.LogMonitor(node.node_ip_address, node.get_logs_dir_path(), client, log_monitor.is_proc_alive).run()
        except Exception as wrong:  # Ray has ended
            log.debug("logs are handed on no more: %r", wrong)

    threading.Thread(target=run, name="log-monitor", daemon=True).start()


def _starting(start: Any, forks: str | None) -> Callable[..., Any]:
    """As Ray's own `start`, but of the raylet, which is told of other commands."""

    def process(command: Sequence[str], kind: str, *more: Any, **said: Any) -> Any:
        if kind == "raylet":
            try:
                command = raylet(command, forks)
            except (AttributeError, ValueError, OSError) as wrong:
                log.debug("this Ray's node starts as it does by itself: %r", wrong)
        begun = start(command, kind, *more, **said)
        if kind == "raylet":
            _registered(command)
        return begun

    return process


def _registered(command: Sequence[str]) -> None:
    """Wait until the raylet is known: Ray, who looks for it at once and finds nothing, looks again after two seconds."""
    address = next((word.partition("=")[2] for word in command if word.startswith("--gcs-address=")), "")
    try:
        client, until = ray._raylet.GcsClient(address=address), time.monotonic() + REGISTERED_S
        while not client.get_all_node_info(timeout=REGISTERED_S) and time.monotonic() < until:
            time.sleep(LOOK_PERIOD_S)
    except Exception as wrong:
        log.debug("whether the raylet is known is not told: %r", wrong)


def _kept_port(ip: str) -> int:
    """A port that nobody else is given while this process lives, and that may be listened at."""
    holder = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((ip, 0))
    port: int = holder.getsockname()[1]
    holder.detach()
    return port


def raylet(command: Sequence[str], forks: str | None) -> list[str]:
    """The command of a raylet whose agents wait and whose workers are asked for at `forks`. Raises AttributeError, ValueError, OSError
    where it is not the command that is known here."""
    flags = {word.partition("=")[0]: word.partition("=")[2] for word in command if "=" in word}
    session, node = flags.get("--session_dir", ""), flags.get("--node_id", "")
    agents, environments = flags.get("--dashboard_agent_command"), shlex.split(flags.get("--runtime_env_agent_command", ""))
    workers, ip = flags.get("--python_worker_command", ""), flags.get("--node_ip_address", "")
    program = next((word for word in shlex.split(workers) if word.endswith("default_worker.py")), None)
    if not session or not node or agents is None or stand_in_agent.PORT not in environments or program is None:
        raise ValueError(f"unknown flags: {sorted(flags)}")
    port, waiting = _kept_port(ip), [*ALONE, stand_in_agent.__file__]
    ports = {getattr(ray._raylet, name): NOBODY for name in UNUSED} | {ray._raylet.RUNTIME_ENV_AGENT_PORT_NAME: port}
    changed: dict[str, str | list[str]] = {"--dashboard_agent_command": waiting}
    changed["--runtime_env_agent_command"] = [*waiting, ip, str(port), *environments]
    if forks is not None:
        asking = subprocess.list2cmdline([*ALONE[1:], fork_client.__file__, forks, program])
        changed["--python_worker_command"] = workers.replace(subprocess.list2cmdline([program]), asking, 1)
        changed["--num_prestart_python_workers"] = "0"  # they know no job yet, and forks do
    lines = {name: line if isinstance(line, str) else subprocess.list2cmdline(line) for name, line in changed.items()}
    for name, number in ports.items():
        ray._raylet.persist_port(session, node, name, number)  # a raylet that finds none looks again after a second
    return [f"{name}={lines[name]}" if (name := word.partition("=")[0]) in lines else word for word in command]
