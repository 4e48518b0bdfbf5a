"""A node of a group lost, cut off, or with a rank that is silent: through Serve, with the group coming back by itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, deploy, groups, status
from tests.cluster.faults import Client, ever, holders
from tests.cluster.test_faults import END_S, ERROR_S, Before, _stats
from tests.cluster.test_groups import LONG, SHAPES, arguments, expected, says  # noqa: F401
from tests.serve.scripted import eventually

CUT_END_S = 12.0  # the half beyond the cut hears nothing either, and may wait for the longer of two silences
HEALTH_S = 6.0  # Serve asks every 2 s

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("whose", ["a rank's", "the replica's"])
@pytest.mark.parametrize("name", ["tp4 over two nodes", "pp2 over two nodes"])
def test_a_node_is_lost(name: str, whose: str, clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # noqa: F811
    """Every process of it at once. The rest ends, nothing is leaked, and when the node is back the group is too, by itself."""
    assert deploy(clean, arguments(tiny, **SHAPES[name])) == "RUNNING", status()
    before, (replica,) = Before(clean), clean.replicas
    home = clean.node_of(replica)
    lost = home if whose == "the replica's" else next(n for n in clean.names if n != home)
    clients = [Client(clean, LONG) for _ in range(2)]
    assert all(client.begun.wait(60) for client in clients)
    killed_s = time.monotonic()
    clean.kill_node(lost)
    waits = [client.last(killed_s) for client in clients]
    print(f"{name}, {whose} node: error events after {waits} s")
    assert max(waits) < ERROR_S
    eventually(lambda: not before.pids & {*clean.workers, *clean.replicas}, 60, lambda: clean.workers)
    ended_s = time.monotonic() - killed_s
    print(f"the rest has ended after {ended_s:.2f} s")
    assert ended_s < END_S
    assert holders(clean) == [], "no core is held"
    eventually(lambda: not set(groups()) & set(before.named), 60, groups)
    clean.start_worker_node(lost)
    eventually(lambda: status()[0] == "RUNNING" and says(clean, expected["short"]), 180, status)
    assert len(groups()) == 1 and len(clean.workers) == len(before.pids) - 1
    assert set(holders(clean)) <= {*clean.workers, *clean.replicas}


def test_a_node_is_cut_off(clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # noqa: F811
    """No packet gets through and nobody says goodbye: the streams end in 2 s all the same, and so do both halves of the group."""
    if not clean.network.real:
        pytest.skip("needs network namespaces: run as root")
    assert deploy(clean, arguments(tiny, **SHAPES["tp4 over two nodes"])) == "RUNNING", status()
    before, (replica,) = Before(clean), clean.replicas
    lost = next(n for n in clean.names if n != clean.node_of(replica))
    beyond = {pid for pid in before.pids if clean.node_of(pid) == lost}
    assert len(beyond) == 2
    clients = [Client(clean, LONG) for _ in range(2)]
    assert all(client.begun.wait(60) for client in clients)
    cut_s = time.monotonic()
    clean.network.cut(lost)
    try:
        waits = [client.last(cut_s) for client in clients]
        print(f"cut off: error events after {waits} s")
        assert max(waits) < ERROR_S
        eventually(lambda: not before.pids & {*clean.workers, *clean.replicas}, 60, lambda: clean.workers)
        ended_s = time.monotonic() - cut_s
        print(f"both halves have ended after {ended_s:.2f} s")
        assert ended_s < CUT_END_S
        assert holders(clean) == []
    finally:
        clean.network.heal(lost)
    if clean.nodes[lost].poll() is not None:  # Ray may have given the node up meanwhile, whose raylet then ends
        clean.kill_node(lost)
        clean.start_worker_node(lost)
    eventually(lambda: status()[0] == "RUNNING" and says(clean, expected["short"]), 180, status)
    assert len(groups()) == 1 and set(holders(clean)) <= {*clean.workers, *clean.replicas}


def test_a_node_that_is_told_to_end_finishes_its_streams(  # as a drained pod, whose first process is `ray start --block`
    clean: Cluster,
    tiny: Path,
    expected: dict[str, str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a drain time longer than the replica's own, as in cluster/kuberay.py: another replica starts elsewhere, the streams of this one
    end as they would have, and then the node does, long before its time is up."""
    monkeypatch.setenv("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "120")
    for name in clean.names:
        clean.kill_node(name)
        clean.start_worker_node(name)
    assert deploy(clean, arguments(tiny, **SHAPES["tp2 on one node"])) == "RUNNING", status()
    (replica,) = clean.replicas
    home = clean.node_of(replica)
    clients = [Client(clean, LONG) for _ in range(2)]
    assert all(client.begun.wait(60) for client in clients)
    told_s = time.monotonic()
    clean.nodes[home].send_signal(signal.SIGTERM)
    for client in clients:
        client.join(60)
        assert client.error_s is None and "data: [DONE]" in client.lines[-2:], client.lines[-3:]
    clean.nodes[home].wait(100)
    print(f"the node ended after {time.monotonic() - told_s:.1f} s")
    clean.nodes.pop(home)
    eventually(lambda: status()[0] == "RUNNING" and says(clean, expected["short"]), 180, status)
    (other,) = clean.replicas
    assert clean.node_of(other) != home


def test_a_silent_rank_makes_the_replica_unhealthy(clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # noqa: F811  BR-23
    """Stopped, not dead: no connection breaks, and the step's own deadline is far away. Serve's health check sees the age of the step."""
    args = arguments(tiny, **SHAPES["tp2 on one node"])
    args["serving"]["stall_timeout_s"] = 4.0
    assert deploy(clean, args) == "RUNNING", status()
    before, (rank,) = Before(clean), clean.workers
    os.kill(rank, signal.SIGSTOP)
    stopped_s = time.monotonic()
    client = Client(clean, LONG)
    client.join(60)
    assert not client.is_alive() and client.status >= 500, client.lines
    assert time.monotonic() - stopped_s < 4.0 + HEALTH_S
    before.restarted_once(stopped_s, expected["short"], within_s=4.0 + HEALTH_S + END_S)
    assert rank not in clean.workers, "a stopped process is ended too"


def test_a_slow_rank_does_not(clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # noqa: F811
    """The rank stands still again and again, each time for less than the limit and longer than a health check; it is work, not a fault."""
    args = arguments(tiny, **SHAPES["tp2 on one node"]) | {"max_model_len": 1024}
    args["buckets"]["token_generation"], args["serving"]["stall_timeout_s"] = [1024], 4.0
    assert deploy(clean, args) == "RUNNING", status()
    replicas, (rank,) = ever()[0], clean.workers
    client = Client(clean, LONG | {"max_tokens": 1000})  # it must not have ended before the last stop
    assert client.begun.wait(60)
    try:
        for _ in range(4):  # 10 s altogether, several health checks, and a step between two stops
            steps = _steps()
            os.kill(rank, signal.SIGSTOP)
            assert not client.ended.wait(2.5)
            os.kill(rank, signal.SIGCONT)
            eventually(lambda steps=steps: _steps() > steps, 30, _stats)
    finally:
        os.kill(rank, signal.SIGCONT)
    client.join(60)
    assert client.lines[-1] == "data: [DONE]" or client.lines[-2] == "data: [DONE]", client.lines[-3:]
    assert client.error_s is None and ever()[0] == replicas and clean.workers == [rank]


def _steps() -> int:
    return int(_stats()["steps"])
