"""`device: neuron` through Ray Serve over the stand-in: two and eight ranks in the replica, and a group over two nodes of a cluster.

Cores come from the ledger, text is the CPU device's.
"""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rayneuron import LLM, SamplingParams, demo
from tests.cluster.conftest import Cluster, deploy, remove, started, status
from tests.serve.scripted import eventually, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ARGS = {
    "dtype": "fp32", "max_model_len": 64, "max_num_seqs": 2, "prefill_chunk_tokens": 16, "threads": 1,
    "buckets": {"context_encoding": [16], "token_generation": [64], "batch": [2]},
}  # fmt: skip


FOLDERS = (Path(__file__).parent / "standin", Path(__file__).parents[2])
INSTANCES = {2: "inf2.xlarge", 8: "inf2.24xlarge"}


@pytest.fixture(scope="module")
def wide() -> Path:
    """A random Llama with eight KV heads."""
    return demo.random("tp8", dtype="fp32")


@pytest.fixture(scope="module")
def want(wide: Path) -> str:
    """What the CPU device says."""
    with LLM(str(wide), **ARGS) as cpu:
        return cpu.generate(["hello there"], SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].text


@pytest.fixture(params=INSTANCES)
def url(request: pytest.FixtureRequest, wide: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A Ray of its own that declares so many Neuron cores, and the model at /."""
    import ray
    from ray import serve

    ranks = request.param
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(FOLDERS[0]))  # the application's builder checks the deployment in this process
    for name in ("STANDIN_CORES", "NEURON_COMPILE_CACHE_URL", "RAYNEURON_LEDGER"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="rn", dir="/tmp", ignore_cleanup_errors=True) as folder:
        probe.bind(("127.0.0.1", free_port()))
        port = probe.getsockname()[1]
        (Path(folder) / "ray").mkdir()
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        probe.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address="local", num_cpus=2, resources={"neuron_cores": ranks}, include_dashboard=False,
                object_store_memory=100 * 2**20, log_to_driver=False,
            )  # fmt: skip
            try:
                from ray.serve.schema import ServeDeploySchema

                args = {
                    "model": {"path": str(wide), "name": "tiny"}, "device": "neuron", "instance": INSTANCES[ranks],
                    "tensor_parallel": ranks, "serving": {"num_cpus": 0.5, "drain_timeout_s": 5}, **ARGS,
                }  # fmt: skip
                application = {"name": "model", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args}
                http = {"host": "127.0.0.1", "port": port}
                serve.start(http_options=http)
                file = ServeDeploySchema.model_validate({"http_options": http, "applications": [application]})
                serve.context._get_global_client().deploy_apps(file, _blocking=False)
                eventually(lambda: str(serve.status().applications["model"].status.value) == "RUNNING", 240, serve.status)
                yield f"http://127.0.0.1:{port}"
            finally:
                serve.shutdown()
                ray.shutdown()


def said(url: str) -> str:
    asked = {"model": "tiny", "prompt": "hello there", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=120).json()
    return str(answer["choices"][0]["text"])


def test_text_is_the_cpu_devices(url: str, want: str) -> None:
    assert said(url) == want


class Nodes(Cluster):
    """A cluster whose nodes have the stand-in, each its own cores, and one compile cache."""

    def environment(self) -> dict[str, str]:
        ours = {"NEURON_COMPILE_CACHE_URL": str(self.folder / "graphs"), "STANDIN_CORES": str(self.folder / f"cores-{len(self.nodes)}")}
        found = super().environment()
        return {**found, **ours, "PYTHONPATH": os.pathsep.join([*map(str, FOLDERS), found["PYTHONPATH"]])}


GROUPS = {
    "tp8 over two nodes": {"tensor_parallel": 8, "nodes": 2, "instance": "cores:4"},
    "two stages of tp2 on two nodes": {"tensor_parallel": 2, "pipeline_parallel": 2, "nodes": 2, "instance": "cores:4"},
}


def test_groups_over_two_nodes(wide: Path, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDERS[0]))
    with started(Nodes) as cluster:
        for name, shape in GROUPS.items():
            args = {
                "model": {"path": str(wide), "name": "tiny"}, "device": "neuron", "group": {"start_s": 90, "load_s": 120, "step_s": 60},
                "serving": {"num_cpus": 0.5, "drain_timeout_s": 5}, **shape, **ARGS,
            }  # fmt: skip
            assert deploy(cluster, args) == "RUNNING", status()
            assert len(cluster.workers) == 1 and len(cluster.replicas) == 1, name
            assert said(cluster.url) == want, name
            remove(cluster)
