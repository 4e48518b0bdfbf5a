"""Groups deployed through Serve on a cluster of several nodes: same tokens, placement, faults, refusals, and what `doctor` finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron import demo
from tests.cluster.conftest import ROOT, Cluster, deploy, groups, remove, status
from tests.serve.scripted import eventually, sse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GO = {"model": "tiny", "prompt": "hello there", "max_tokens": 12, "temperature": 0}
LONG = GO | {"max_tokens": 220, "ignore_eos": True, "stream": True}


def arguments(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(path), "name": "tiny"}, "dtype": "fp32", "max_model_len": 256, "max_num_seqs": 4, "threads": 1,
        "prefill_chunk_tokens": 32, "buckets": {"batch": [4], "token_generation": [256], "context_encoding": [32]},
        "group": {"start_s": 90, "load_s": 90, "step_s": 60}, "serving": {"drain_timeout_s": 20, "num_cpus": 0.5}, **more,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "tp2 on one node": {"tensor_parallel": 2, "instance": "cores:4"},
    "tp4 over two nodes": {"tensor_parallel": 4, "nodes": 2, "instance": "cores:2"},
    "pp2 over two nodes": {"pipeline_parallel": 2, "nodes": 2, "instance": "inf2.xlarge"},
    "tp2 pp2 over two nodes": {"tensor_parallel": 2, "pipeline_parallel": 2, "nodes": 2, "instance": "inf2.xlarge"},
    "tp2 without counted cores": {"tensor_parallel": 2},
}


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[str, str]:
    """What the single process says, in text."""
    from rayneuron import LLM, SamplingParams

    options = {k: v for k, v in arguments(tiny).items() if k not in ("model", "serving", "group")}
    with LLM(tiny, **options) as llm:
        return {
            "short": llm.generate(GO["prompt"], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text,
            "long": llm.generate(GO["prompt"], SamplingParams(temperature=0, max_tokens=220, ignore_eos=True))[0].outputs[0].text,
        }


def streamed(cluster: Cluster, body: dict[str, Any]) -> str:
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as reply:
        events = sse(list(reply.iter_lines()))
    assert events[-1] == "[DONE]", events[-3:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_those_of_one_process(name: str, clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:
    shape = SHAPES[name]
    assert deploy(clean, arguments(tiny, **shape)) == "RUNNING", status()
    workers = shape.get("tensor_parallel", 1) * shape.get("pipeline_parallel", 1)
    assert len(clean.workers) == workers - 1 and len(clean.replicas) == 1 and len(groups()) == 1
    reply = httpx.post(f"{clean.url}/v1/completions", json=GO, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == expected["short"]
    assert streamed(clean, LONG) == expected["long"]
    _check_cores(clean, shape, workers)


def _check_cores(cluster: Cluster, shape: dict[str, Any], workers: int) -> None:
    """Each process was told its cores, contiguous and disjoint on its node, and they are locked in the node's ledger."""
    if "instance" not in shape:
        return
    from rayneuron.placement.instances import instance
    from rayneuron.placement.ledger import Ledger

    held = [
        core
        for node in sorted((cluster.folder / "cores").iterdir())
        for holder in Ledger(node, instance(shape["instance"])).holders()
        for core in holder.cores
    ]
    assert len(held) == workers
    per_node = workers // shape.get("nodes", 1)
    assert sorted(held) == sorted(list(range(per_node)) * shape.get("nodes", 1))


@pytest.mark.parametrize("name", ["tp2 on one node", "tp2 pp2 over two nodes"])
def test_a_killed_worker_ends_streams_and_is_replaced_whole(
    name: str, clean: Cluster, tiny: Path, expected: dict[str, str]
) -> None:  # BR-23
    assert deploy(clean, arguments(tiny, **SHAPES[name])) == "RUNNING", status()
    before, (replica,), named = clean.workers, clean.replicas, groups()
    began, ended, lines = threading.Event(), threading.Event(), []

    def read() -> None:
        try:
            with httpx.stream("POST", f"{clean.url}/v1/completions", json=LONG, timeout=120) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    if len(sse(lines)) >= 3:
                        began.set()
        except httpx.HTTPError as error:
            lines.append(f"data: broken: {error}")
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert began.wait(60)
    os.kill(before[-1], signal.SIGKILL)
    killed = time.monotonic()
    assert ended.wait(60)
    took = time.monotonic() - killed
    assert "error" in sse(lines)[-1] or "error" in sse(lines)[-2], sse(lines)[-3:]
    assert took < 15, "within 2 s on a quiet machine; this one may be busy"
    eventually(lambda: not ({replica, *before} & {*clean.replicas, *clean.workers}), 30, lambda: (clean.replicas, clean.workers))
    eventually(lambda: status()[0] == "RUNNING" and len(clean.workers) == len(before), 180, status)
    assert len(groups()) == 1 and groups() != named
    eventually(lambda: says(clean, expected["short"]), 60, status)


def says(cluster: Cluster, text: str) -> bool:
    try:
        reply = httpx.post(f"{cluster.url}/v1/completions", json=GO, timeout=60)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200 and reply.json()["choices"][0]["text"] == text


def test_a_killed_replica_leaves_nobody(clean: Cluster, tiny: Path, expected: dict[str, str]) -> None:  # O-8
    assert deploy(clean, arguments(tiny, **SHAPES["tp2 on one node"])) == "RUNNING", status()
    workers = clean.workers
    os.kill(clean.replicas[0], signal.SIGKILL)
    eventually(lambda: not set(workers) & set(clean.workers), 20, lambda: clean.workers)
    eventually(lambda: status()[0] == "RUNNING" and len(clean.workers) == 1 and says(clean, expected["short"]), 180, status)


def test_more_than_the_cluster_has_is_refused_in_time(cluster: Cluster) -> None:  # BR-21
    wide, began = demo.resolve("demo:random:tp128"), time.monotonic()
    assert deploy(cluster, arguments(wide, tensor_parallel=8, instance="inf2.24xlarge")) == "DEPLOY_FAILED"
    assert time.monotonic() - began < 120
    words = status()[1]
    assert "1 bundles of {CPU 4, neuron_cores 8}" in words and f"{cluster.names[0]}: CPU 8" in words and "neuron_cores 4" in words, words
    remove(cluster)


def test_doctor_lists_and_cleans(cluster: Cluster) -> None:
    import ray
    from ray.util.placement_group import placement_group

    leaked = placement_group([{"CPU": 1}], name="SERVE_REPLICA::gone#EngineServer#abc", lifetime="detached")
    ray.get(leaked.ready(), timeout=60)
    address = cluster.address

    def doctor(*more: str) -> str:
        command = [sys.executable, "-m", "rayneuron", "doctor", "--address", address, *more]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=cluster.environment(), cwd=ROOT, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    said = doctor()
    assert "SERVE_REPLICA::gone#EngineServer#abc" in said and "leaked" in said and cluster.names[1] in said
    assert groups() == ["SERVE_REPLICA::gone#EngineServer#abc"]
    assert "removed" in doctor("--clean")
    assert groups() == []
    assert "leaked" not in doctor()
