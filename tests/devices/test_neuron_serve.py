"""`device: neuron` through Ray Serve over the stand-in: two ranks in the replica, cores from the ledger, the CPU device's text."""

from __future__ import annotations

import os
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rayneuron import LLM, SamplingParams
from tests.serve.scripted import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ARGS = {
    "dtype": "fp32", "max_model_len": 64, "max_num_seqs": 2, "prefill_chunk_tokens": 16, "threads": 1,
    "buckets": {"context_encoding": [16], "token_generation": [64], "batch": [2]},
}  # fmt: skip


@pytest.fixture
def url(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A Ray of its own that declares two Neuron cores, and the model at /."""
    import ray
    from ray import serve

    folders = (Path(__file__).parent / "standin", Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(folders[0]))  # the application's builder checks the deployment in this process
    for name in ("STANDIN_CORES", "NEURON_COMPILE_CACHE_URL", "RAYNEURON_LEDGER"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="rn", dir="/tmp", ignore_cleanup_errors=True) as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        (Path(folder) / "ray").mkdir()
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        probe.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address="local", num_cpus=2, resources={"neuron_cores": 2}, include_dashboard=False,
                object_store_memory=100 * 2**20, log_to_driver=False,
            )  # fmt: skip
            try:
                from ray.serve.schema import ServeDeploySchema

                args = {
                    "model": {"path": str(tiny), "name": "tiny"}, "device": "neuron", "instance": "inf2.xlarge", "tensor_parallel": 2,
                    "serving": {"num_cpus": 0.5, "drain_timeout_s": 5}, **ARGS,
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


def test_text_is_the_cpu_devices(url: str, tiny: Path) -> None:
    asked = {"model": "tiny", "prompt": "hello there", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=120).json()
    with LLM(str(tiny), **ARGS) as cpu:
        want = cpu.generate(["hello there"], SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].text
    assert answer["choices"][0]["text"] == want
