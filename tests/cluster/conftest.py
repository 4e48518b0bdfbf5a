"""A cluster of three raylets on this machine: a head without cores, and two further nodes with four each (tests.cluster.network)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rayneuron.serve.profile import profile_env
from tests.cluster.network import Network
from tests.serve import own_ray
from tests.serve.scripted import eventually, free_port

ROOT = str(Path(__file__).parents[2])
WORDS = (["import sys", "from ray.scripts.scripts import main", "sys.argv[0] = 'ray'", "main()"], "; ")


@dataclass
class Cluster:
    """Started nodes, each a process group of its own, and where Serve answers. `cpus` and `cores`: what the further nodes declare."""

    cpus: ClassVar[int] = 8
    cores: ClassVar[int] = 4

    folder: Path
    network: Network = field(default_factory=lambda: Network().open())
    port: int = field(default_factory=free_port)
    http: int = field(default_factory=free_port)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes that have cores, by their addresses."""
        return self.network.nodes

    @property
    def address(self) -> str:
        """Ray's own."""
        return f"{self.network.head}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def environment(self) -> dict[str, str]:
        lies = {"HOST_IP": "203.0.113.9", "VLLM_HOST_IP": "203.0.113.9"}  # BR-20: nobody may believe these
        paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        ours = {"RAY_TMPDIR": str(self.folder), "RAYNEURON_LEDGER": str(self.folder / "cores"), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        return {**os.environ, **profile_env("plain"), **ours, **lies, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self, name: str, *options: str) -> None:
        """One `ray start --block`: its raylet and workers end with it."""
        ray = [sys.executable, "-c", WORDS[1].join(WORDS[0]), "start", "--block"]
        command = [*self.network.inside(name), *ray, "--object-store-memory", str(80 * 2**20), *options]
        log = open(self.folder / f"{name}.log", "wb")
        self.nodes[name] = subprocess.Popen(command, env=self.environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        log.close()

    def start_worker_node(self, name: str) -> None:
        """A raylet with CPUs and cores."""
        self.start(
            name, "--address", self.address, "--node-ip-address", name, "--num-cpus", str(self.cpus),
            "--resources", f'{{"neuron_cores": {self.cores}}}',
        )  # fmt: skip
        log = self.folder / f"{name}.log"
        eventually(lambda: "Ray runtime started" in log.read_text(), 90, lambda: log.read_text()[-2000:])

    def kill_node(self, name: str) -> None:
        """What a power cut does to the processes of a node: all of them at once, none warned."""
        process = self.nodes.pop(name)
        doomed = [process.pid, *descendants(process.pid)]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def node_of(self, pid: int) -> str:
        """Which of the nodes a process belongs to."""
        return next(name for name, process in self.nodes.items() if pid in descendants(process.pid))

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


def descendants(pid: int) -> list[int]:
    """Children of a process, theirs, and so on."""
    parents: dict[int, list[int]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # ended meanwhile
            parents.setdefault(parent, []).append(int(process.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with started() as made:
        yield made


@contextmanager
def started(kind: type[Cluster] = Cluster) -> Iterator[Cluster]:
    """A cluster, with Serve, that ends with the block."""
    import ray
    from ray import serve

    with own_ray.temporary() as folder, pytest.MonkeyPatch.context() as patch:
        made = kind(folder)
        patch.setenv("RAY_TMPDIR", str(folder))
        try:
            head = ["--head", "--node-ip-address", made.network.head, "--port", str(made.port)]
            made.start("head", *head, "--num-cpus", "0", "--include-dashboard", "false")
            eventually(lambda: _answers(made), 90, lambda: (made.folder / "head.log").read_text()[-2000:])
            for name in made.names:
                # One after the other: raylets of one host that start in the same moment take each other's ports.
                made.start_worker_node(name)
            ray.init(address=made.address, log_to_driver=False, namespace="serve")
            eventually(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, 120, ray.nodes)
            serve.start(http_options={"host": "127.0.0.1", "port": made.http}, proxy_location="HeadOnly")
            yield made
        finally:
            try:
                serve.shutdown()
                ray.shutdown()
            finally:
                made.stop()
                made.network.close()


def _answers(cluster: Cluster) -> bool:
    try:
        socket.create_connection((cluster.network.head, cluster.port), timeout=1).close()
    except OSError:
        return False
    return True


def deploy(cluster: Cluster, args: dict[str, Any], wait_s: float = 180.0, *, wait: bool = True) -> str:
    """What `serve deploy` does; returns the status the application ends in, or with `wait=False` at once."""
    entry = {"name": "model", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args}
    own_ray.deploy(cluster.http, entry, proxy_location="HeadOnly")
    if not wait:
        return ""
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


@pytest.fixture
def clean(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, whole and empty again afterwards."""
    yield cluster
    for name in cluster.names:
        if name not in cluster.nodes:
            cluster.start_worker_node(name)
    remove(cluster)
