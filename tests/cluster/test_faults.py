"""Point 8 through Serve: a rank or the replica killed at every stage, a node lost, a node cut off, a step that never ends.

After each: clients have an error event within 2 s, every other process of the group has ended, its cores are free, Ray has started exactly
one group more, and the new one answers as before.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, deploy, groups, status
from tests.cluster.faults import Client, ever, held, holders
from tests.cluster.test_groups import GO, LONG, SHAPES, arguments, expected, says  # noqa: F401
from tests.serve.scripted import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = GO | {"prompt": [7] * 200, "stream": True}  # seven chunks of 32
ERROR_S = 2.0  # from the death of a process to the error event at the client
END_S = 5.0  # and to the end of the last process of its group
WIDE = "tp2 pp2 over two nodes"


class Before:
    """The group as it was before the fault."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pids = {*cluster.workers, *cluster.replicas}
        self.named = groups()
        self.replicas, self.actors = ever()

    def restarted_once(self, killed_s: float, text: str, *, within_s: float = END_S) -> None:
        """Everybody of the old group is gone in time, nothing of it is left, and one new group answers."""
        cluster = self.cluster
        eventually(lambda: not self.pids & {*cluster.workers, *cluster.replicas}, 60, lambda: (self.pids, cluster.workers))
        ended_s = time.monotonic() - killed_s
        print(f"the group has ended after {ended_s:.2f} s")
        assert ended_s < within_s
        eventually(lambda: status()[0] == "RUNNING" and says(cluster, text), 180, status)
        workers = len(self.pids) - 1
        assert len(cluster.workers) == workers and len(cluster.replicas) == 1
        assert len(groups()) == 1 and groups() != self.named
        assert (ever()[0] - self.replicas, ever()[1] - self.actors) == (1, workers), "one restart of the whole group"
        assert set(holders(cluster)) <= {*cluster.workers, *cluster.replicas}, "the old group holds no cores"


def victim(cluster: Cluster, who: str) -> int:
    return cluster.replicas[0] if who == "replica" else cluster.workers[-1]


@pytest.mark.parametrize("who", ["rank", "replica"])
@pytest.mark.parametrize("name", ["tp2 on one node", "tp4 over two nodes", WIDE])
def test_killed_in_the_middle_of_decoding(name: str, who: str, clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # noqa: F811
    assert deploy(clean, arguments(tiny, **SHAPES[name])) == "RUNNING", status()
    before, clients = Before(clean), [Client(clean, LONG) for _ in range(3)]
    assert all(client.begun.wait(60) for client in clients)
    killed_s = time.monotonic()
    os.kill(victim(clean, who), signal.SIGKILL)
    waits = [client.last(killed_s) for client in clients]
    print(f"{name}, {who}: error events after {waits} s")
    assert max(waits) < ERROR_S
    before.restarted_once(killed_s, expected["short"])


@pytest.mark.parametrize("who", ["rank", "replica"])
def test_killed_in_the_middle_of_a_prefill(who: str, clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # noqa: F811
    """A rank is stopped, so that the chunk in flight cannot end; then it, or the replica, is killed."""
    assert deploy(clean, arguments(tiny, **SHAPES[WIDE])) == "RUNNING", status()
    before, stopped = Before(clean), clean.workers[-1]
    os.kill(stopped, signal.SIGSTOP)
    client = Client(clean, PROMPT)
    eventually(_stepping, 60, _stats)
    assert not client.lines, "no token yet"
    killed_s = time.monotonic()
    os.kill(victim(clean, who), signal.SIGKILL)
    os.kill(stopped, signal.SIGCONT)
    client.join(60)
    print(f"prefill, {who}: status {client.status} after {client.ended_s - killed_s:.3f} s")
    assert client.ended_s - killed_s < ERROR_S
    assert client.status >= 500 and "error" in "".join(client.lines), "before the first token it is a status, not an event"
    before.restarted_once(killed_s, expected["short"])


def _stats() -> dict[str, Any]:
    from ray import serve

    found: dict[str, Any] = serve.get_app_handle("model").stats.remote().result(timeout_s=30)
    return found


def _stepping() -> bool:
    stats = _stats()
    return bool(stats["open_calls"] and stats["step_started_s"] > stats["last_step_s"])


@pytest.mark.parametrize("who", ["rank", "replica"])
@pytest.mark.parametrize("stage", ["rendezvous", "load"])
def test_killed_while_starting(
    stage: str, who: str, clean: Cluster, tiny: Path, tmp_path: Path, expected: dict[str, str]  # noqa: F811
) -> None:
    """Rendezvous: the workers have come, the replica still reads its chat template and has given them no place. Load: all read weights."""
    model = shutil.copytree(tiny, tmp_path / "model")
    template, whole = tmp_path / "template.jinja", tmp_path / "whole.jinja"
    for path in (template, whole):
        path.write_text("{{ messages[0]['content'] }}")
    pipe, source = (template, whole) if stage == "rendezvous" else (model / "model.safetensors", tiny / "model.safetensors")
    shape = SHAPES[WIDE if stage == "load" else "tp2 on one node"]
    workers = shape["tensor_parallel"] * shape.get("pipeline_parallel", 1) - 1
    args = arguments(model, **shape)
    args["model"]["chat_template"] = str(template)
    replicas, actors = ever()
    deploy(clean, args, wait=False)
    eventually(lambda: len(clean.replicas) == 1, 120, status)  # the builder has looked at the files; the replica begins with its imports
    with held(pipe) as hold:
        eventually(lambda: len(clean.replicas) == 1 and len(clean.workers) == workers, 120, status)
        before = Before(clean)
        assert (before.replicas, before.actors) == (replicas + 1, actors + workers)
        hold.wait(clean.replicas if stage == "rendezvous" else sorted(before.pids))
        if stage == "rendezvous":
            eventually(lambda: all(_joined(pid) for pid in clean.workers), 60, clean.workers)
        hold.replace(source)
        killed_s = time.monotonic()
        os.kill(victim(clean, who), signal.SIGKILL)
        if stage == "rendezvous":
            hold.release()  # the replica goes on, and finds that a worker is gone
        before.restarted_once(killed_s, expected["short"])


def _joined(pid: int) -> bool:
    """Whether a worker has said hello: its watch over the leader is on, which begins right after."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry.path) == "anon_inode:[pidfd]":
                return True
    return False
