"""What a group outlives and what it waits for: Serve's controller killed, nodes that come later."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, deploy, groups, remove, status
from tests.cluster.faults import Client, ever
from tests.cluster.test_groups import LONG, SHAPES, arguments, expected, says  # noqa: F401
from tests.serve.scripted import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_controller_is_killed(clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # noqa: F811  BR-24
    """Streams finish, new calls succeed, the group is the same one, and it is not taken for leaked while nobody controls it."""
    from rayneuron.serve.leaks import leaked

    assert deploy(clean, arguments(tiny, **SHAPES["tp2 on one node"])) == "RUNNING", status()
    pids, started, (controller,) = {*clean.workers, *clean.replicas}, ever(), clean.pids("ray::ServeController")
    client = Client(clean, LONG)
    assert client.begun.wait(60)
    os.kill(controller, signal.SIGKILL)
    assert leaked() == []
    client.join(60)
    assert client.error_s is None and "data: [DONE]" in client.lines[-2:]
    eventually(lambda: says(clean, expected["short"]), 60, status)
    eventually(lambda: clean.pids("ray::ServeController") not in ([], [controller]), 60, lambda: "no controller")
    eventually(lambda: status()[0] == "RUNNING", 60, status)
    assert {*clean.workers, *clean.replicas} == pids and ever() == started and len(groups()) == 1


def test_a_group_waits_for_nodes_where_told_to(clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # noqa: F811  BR-21
    """As with an autoscaler: a node too few is refused by default, and waited for with serving.wait_for_nodes."""
    import ray

    late = clean.names[1]
    clean.kill_node(late)
    eventually(lambda: sum(n["Alive"] for n in ray.nodes()) == 2, 60, ray.nodes)
    args = arguments(tiny, **SHAPES["pp2 over two nodes"])
    assert deploy(clean, args) == "DEPLOY_FAILED" and "serving.wait_for_nodes: true" in status()[1]
    remove(clean)
    args["serving"]["wait_for_nodes"] = True
    deploy(clean, args, wait=False)
    eventually(lambda: [g for g in ray.util.placement_group_table().values() if g["state"] == "PENDING"], 60, groups)
    assert status()[0] == "DEPLOYING"
    began = time.monotonic()
    clean.start_worker_node(late)
    eventually(lambda: status()[0] == "RUNNING" and says(clean, expected["short"]), 120, status)
    print(f"ready {time.monotonic() - began:.0f} s after the node was started")
