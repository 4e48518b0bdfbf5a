"""A cluster of three raylets on this machine: a head without cores at this host's address, and 127.0.0.2, 127.0.0.3 with four each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.serve.scripted import eventually

ROOT = str(Path(__file__).parents[2])
WORDS = (["import sys", "from ray.scripts.scripts import main", "sys.argv[0] = 'ray'", "main()"], "; ")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@dataclass
class Cluster:
    """Started nodes, each a process group of its own, and where Serve answers."""

    folder: Path
    port: int = field(default_factory=free_port)
    http: int = field(default_factory=free_port)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def environment(self) -> dict[str, str]:
        lies = {"HOST_IP": "203.0.113.9", "VLLM_HOST_IP": "203.0.113.9"}  # BR-20: nobody may believe these
        paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        ours = {"RAY_TMPDIR": str(self.folder), "RAYNEURON_LEDGER": str(self.folder / "cores"), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        return {**os.environ, **ours, **lies, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, name: str, *options: str) -> None:
        """One `ray start --block`: its raylet and workers end with it."""
        command = [sys.executable, "-c", WORDS[1].join(WORDS[0]), "start", "--block", "--object-store-memory", str(80 * 2**20), *options]
        log = open(self.folder / f"{name}.log", "wb")
        self.nodes[name] = subprocess.Popen(command, env=self.environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        log.close()

    def stop(self) -> None:
        for process in reversed(list(self.nodes.values())):
            process.send_signal(signal.SIGTERM)
        for process in reversed(list(self.nodes.values())):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pid in self.pids(""):
            os.kill(pid, signal.SIGKILL)  # ours by RAY_TMPDIR: a daemon that outlived its raylet

    def pids(self, title: str) -> list[int]:
        """Processes of this cluster whose command line begins so."""
        found = []
        mark = f"RAY_TMPDIR={self.folder}".encode()
        for process in Path("/proc").iterdir():
            try:
                if (
                    process.name.isdigit()
                    and int(process.name) != os.getpid()
                    and (process / "cmdline").read_bytes().startswith(title.encode())
                    and mark in (process / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(process.name))
            except OSError:
                continue
        return sorted(found)

    @property
    def workers(self) -> list[int]:
        """Rank actors."""
        return self.pids("ray::RankActor")

    @property
    def replicas(self) -> list[int]:
        return self.pids("ray::ServeReplica:model")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    import ray
    from ray import serve

    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp", ignore_cleanup_errors=True) as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "ray").mkdir()
        made = Cluster(Path(folder))
        patch.setenv("RAY_TMPDIR", folder)
        try:
            made.start(
                "head",
                "--head",
                "--node-ip-address",
                "127.0.0.1",
                "--port",
                str(made.port),
                "--num-cpus",
                "0",
                "--include-dashboard",
                "false",
            )
            eventually(lambda: _answers(made.port), 90, lambda: (made.folder / "head.log").read_text()[-2000:])
            for last in (2, 3):
                made.start(
                    f"127.0.0.{last}", "--address", f"127.0.0.1:{made.port}", "--node-ip-address", f"127.0.0.{last}", "--num-cpus", "8",
                    "--resources", '{"neuron_cores": 4}',
                )  # fmt: skip
                # One after the other: raylets of one host that start in the same moment take each other's ports.
                log = made.folder / f"127.0.0.{last}.log"
                eventually(lambda log=log: "Ray runtime started" in log.read_text(), 90, lambda log=log: log.read_text()[-2000:])
            ray.init(address=f"127.0.0.1:{made.port}", log_to_driver=False, namespace="serve")
            eventually(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, 120, ray.nodes)
            serve.start(http_options={"host": "127.0.0.1", "port": made.http}, proxy_location="HeadOnly")
            yield made
        finally:
            try:
                serve.shutdown()
                ray.shutdown()
            finally:
                made.stop()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def deploy(cluster: Cluster, args: dict[str, Any], wait_s: float = 180.0) -> str:
    """What `serve deploy` does; returns the status the application ends in."""
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    file = {
        "http_options": {"host": "127.0.0.1", "port": cluster.http},
        "proxy_location": "HeadOnly",
        "applications": [{"name": "model", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args}],
    }
    serve.context._get_global_client().deploy_apps(ServeDeploySchema.model_validate(file), _blocking=False)
    eventually(lambda: status()[0] in ("RUNNING", "DEPLOY_FAILED"), wait_s, status)
    return status()[0]


def remove(cluster: Cluster) -> None:
    """Take the application away; nothing of it may stay."""
    from ray import serve

    serve.delete("model", _blocking=True)
    eventually(lambda: not cluster.workers and not cluster.replicas and not groups(), 40, lambda: (cluster.workers, groups()))


def status() -> tuple[str, str]:
    from ray import serve

    applications = serve.status().applications
    if "model" not in applications:
        return "ABSENT", ""
    found = applications["model"]
    words = [found.message, *(d.message for d in found.deployments.values())]
    return str(found.status.value), " ".join(words)


def groups() -> list[str]:
    """Names of the placement groups that exist."""
    import ray

    return [g["name"] for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
