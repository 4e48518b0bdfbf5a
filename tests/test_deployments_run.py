"""Every file in deployments/ runs on this machine: the same YAML with a tiny checkpoint on the CPU, every rank a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rayneuron import LLM, SamplingParams, demo
from tests.cluster.conftest import Cluster, deploy, free_port, remove, started, status
from tests.serve import own_ray
from tests.serve.scripted import eventually

ROOT = Path(__file__).parents[1]
ON_CPU = ["--set", "model.path=demo:random:tp128", "--set", "device=cpu", "--set", "dtype=fp32"]
PROMPT = {"prompt": "hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def serving(name: str, *more: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`rayneuron serve deployments/NAME.yaml ...` at a port of its own: its address and process."""
    port = free_port()
    with own_ray.temporary() as folder:
        file = folder / f"{name}.yaml"
        text = (ROOT / f"deployments/{name}.yaml").read_text()
        text, changed = re.subn(r"host: \S+\n  port: 8000", f"host: 127.0.0.1\n  port: {port}", text)
        assert changed == 1
        file.write_text(text)
        environment = os.environ | {
            "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "RAYNEURON_LEDGER": f"{folder}/cores",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        with own_ray.command(folder, environment, sys.executable, "-m", "rayneuron", "serve", str(file), *more) as process:
            yield f"http://127.0.0.1:{port}", process


def answers(url: str, model: str, process: subprocess.Popen[bytes], within_s: float = 300.0) -> str:
    """What the model says, once it is there."""

    def there() -> bool:
        assert process.poll() is None, "serve has ended"
        try:
            return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    eventually(there, within_s, lambda: f"{url} does not answer")
    reply = httpx.post(f"{url}/v1/completions", json=PROMPT | {"model": model}, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 8
    text: str = reply.json()["choices"][0]["text"]
    return text


def ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """Replicas and rank actors below a process; waits for nothing."""
    from tests.cluster.conftest import descendants

    found = []
    for pid in descendants(process.pid):
        try:
            if re.match(rb"ray::(RankActor|ServeReplica)", (Path("/proc") / str(pid) / "cmdline").read_bytes()):
                found.append(pid)
        except OSError:
            continue
    return found


def pss_mib(pids: list[int]) -> int:
    """Memory of processes, pages they share counted once."""
    rolled = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) for text in rolled) // 1024  # type: ignore[index]


@pytest.fixture(scope="module")
def expected() -> str:
    """What one process says."""
    with LLM(demo.random("tp128"), dtype="fp32", max_model_len=256, threads=1) as llm:
        return llm.generate(PROMPT["prompt"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].text


def test_llama70b(expected: str) -> None:
    """TP 32 on one declared trn1.32xlarge: 32 processes."""
    began = time.monotonic()
    with serving("llama70b", *ON_CPU) as (url, process):
        assert answers(url, "llama-3-70b-instruct", process) == expected
        found = ranks(process)
        print(f"llama70b: {len(found)} ranks, ready and answered after {time.monotonic() - began:.0f} s, {pss_mib(found)} MiB")
        assert len(found) == 32 and pss_mib(found) < 8000


def test_inf2_three_models(expected: str) -> None:
    """Three models of TP 8 side by side on one declared inf2.48xlarge: 24 processes, cores disjoint by the ledger."""
    with serving("inf2_three_models", "--application", "all", *ON_CPU) as (url, process):
        for name in ("chat", "mistral", "qwen"):
            assert answers(f"{url}/m/{name}", name, process) == expected
        assert len(ranks(process)) == 24


def test_inf2_host(expected: str) -> None:
    """Six models on 24 declared cores: the pinned one and the one of min 1 come by themselves, a third where it is asked."""
    with serving("inf2_host", "--application", "all", *ON_CPU, "--set", "compile.required=false") as (url, process):
        assert answers(url, "tiny", process, 400.0) == expected
        assert answers(url, "small", process) == expected
        assert answers(url, "chat", process) == expected
        told = httpx.get(f"{url}/debug/hosts", timeout=30).json()
        cores = [core for seat in told["seats"] for core in seat["cores"]]
        assert len(cores) == len(set(cores)) == 14 and {seat["model"] for seat in told["seats"]} == {"chat", "tiny", "small"}
        assert len(ranks(process)) == 14 + 2, "and the gateway with its arbiter"


class Trn1(Cluster):
    """Two nodes that declare what a trn1.32xlarge has."""

    cpus, cores = 128, 32


@pytest.mark.parametrize(
    ("name", "changed", "count"),
    [("llama405b_trn1x4", {"tensor_parallel": 64}, 64), ("llama405b_trn1x4_pp", {"tensor_parallel": 8, "pipeline_parallel": 2}, 16)],
)
def test_llama405b_over_two_of_its_four_nodes(name: str, changed: dict[str, int], count: int, expected: str) -> None:
    """128 ranks are 24 GB of Python and torch, more than this machine has; 64 on two nodes take 12. One file, a few keys changed for it."""
    from rayneuron import deployment_file

    assignments = {"model.path": "demo:random:tp128", "device": "cpu", "dtype": "fp32", "nodes": 2, **changed}
    read = deployment_file.read(ROOT / f"deployments/{name}.yaml", assignments)
    with started(Trn1) as cluster:
        began = time.monotonic()
        assert deploy(cluster, read.content["applications"][0]["args"], 400.0) == "RUNNING", status()
        reply = httpx.post(f"{cluster.url}/v1/completions", json=PROMPT | {"model": "llama-3.1-405b-instruct"}, timeout=120)
        assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == expected
        found = [*cluster.workers, *cluster.replicas]
        print(f"{name}: {len(found)} ranks, answered after {time.monotonic() - began:.0f} s, {pss_mib(found)} MiB")
        assert len(found) == count
        remove(cluster)


def test_llama8b_inf2(expected: str) -> None:
    with serving("llama8b_inf2", *ON_CPU) as (url, process):
        assert answers(url, "chat", process) == expected


@pytest.mark.parametrize("name", ["tiny", "smollm2", "handle_call"])
def test_cpu_files_as_they_are(name: str, smollm2: Path) -> None:
    with serving(name) as (url, process):
        assert answers(url, "tiny" if name == "tiny" else "smollm2-135m-instruct", process)
