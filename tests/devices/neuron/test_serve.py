"""`device: neuron` through Ray Serve over the stand-in: two and eight ranks in the replica, and a group over two nodes of a cluster.

Cores come from the ledger, text is the CPU device's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron import LLM, SamplingParams
from rayneuron.models import hub
from rayneuron.placement.instances import INSTANCES as TYPES
from tests.cluster.conftest import Cluster, deploy, remove, started, status
from tests.models import cases
from tests.placement.test_cores import listed, neuron_ls
from tests.serve import own_ray
from tests.serve.scripted import eventually, free_port
from tests.test_deployments_run import ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ARGS = {
    "dtype": "fp32", "max_model_len": 64, "max_num_seqs": 2, "prefill_chunk_tokens": 16, "threads": 1,
    "buckets": {"context_encoding": [16], "token_generation": [64], "batch": [2]},
}  # fmt: skip


FOLDERS = (Path(__file__).parent / "standin", Path(__file__).parents[3])
INSTANCES = {2: "inf2.xlarge", 8: "inf2.24xlarge"}


@pytest.fixture(scope="module")
def want(wide: Path) -> str:
    """What the CPU device says."""
    with LLM(str(wide), **ARGS) as cpu:
        return cpu.generate(["hello there"], SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].text


@pytest.fixture(params=INSTANCES)
def url(request: pytest.FixtureRequest, wide: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A Ray of its own that declares so many Neuron cores, and the model at /."""
    from ray import serve

    ranks = request.param
    monkeypatch.syspath_prepend(str(FOLDERS[0]))  # the application's builder checks the deployment in this process
    words = {name: str(tmp_path / name) for name in ("STANDIN_CORES", "NEURON_COMPILE_CACHE_URL", "RAYNEURON_LEDGER")}
    words["PYTHONPATH"] = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")])
    args = {
        "model": {"path": str(wide), "name": "tiny"}, "device": "neuron", "instance": INSTANCES[ranks],
        "tensor_parallel": ranks, "serving": {"num_cpus": 0.5, "drain_timeout_s": 5}, **ARGS,
    }  # fmt: skip
    with own_ray.running(words, resources={"neuron_cores": ranks}) as (_, port):
        own_ray.deploy(port, {"name": "model", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args})
        eventually(lambda: str(serve.status().applications["model"].status.value) == "RUNNING", 240, serve.status)
        yield f"http://127.0.0.1:{port}"


def said(url: str) -> str:
    asked = {"model": "tiny", "prompt": "hello there", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=120).json()
    return str(answer["choices"][0]["text"])


def test_text_is_the_cpu_devices(url: str, want: str) -> None:
    assert said(url) == want


def opened(pid: int) -> Iterator[Path]:
    """What a process has open; what it closes meanwhile is left out."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield Path(os.readlink(entry))
        except FileNotFoundError:
            continue


HERE = {"operator": ("4-7", None, "4,5"), "container": (None, [2, 3, 4], "4,5,6,7")}


@dataclass
class Server:
    """The real `rayneuron serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def ready(self) -> None:
        """Wait until it answers. Raises AssertionError where it ends instead."""
        eventually(self._there, 330, lambda: f"{self.url} does not answer")

    def _there(self) -> bool:
        assert self.process.poll() is None, "serve has ended"
        try:
            return httpx.get(f"{self.url}/v1/models", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def serving(
    model: Path, ranks: int, visible: str | None, devices: list[int] | None = None, options: Mapping[str, Any] | None = None,
    **variables: str,
) -> Iterator[Server]:  # fmt: skip
    """In a mount namespace of its own where neuron-ls lists some `devices` of an inf2.48xlarge."""
    args = {
        "model": {"path": str(model), "name": "tiny"}, "device": "neuron", "instance": "inf2.48xlarge", "tensor_parallel": ranks,
        "serving": {"num_cpus": 0.5, "drain_timeout_s": 5}, **ARGS, **(options or {}),
    }  # fmt: skip
    port = free_port()
    with own_ray.temporary() as folder:
        application = {"name": "model", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args}
        (folder / "file.yaml").write_text(json.dumps({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "RAYNEURON_"))} | {
            "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, FOLDERS)),
            "STANDIN_CORES": f"{folder}/cores", "RAYNEURON_LEDGER": f"{folder}/ledger", "NEURON_COMPILE_CACHE_URL": f"{folder}/graphs",
            "NEURON_RT_LOG_LEVEL": "WARN", "NEURON_RT_INSPECT_ENABLE": "0", "NEURON_RT_EXEC_TIMEOUT": "77",
            **variables,
        }  # fmt: skip
        command = [sys.executable, "-m", "rayneuron", "serve", str(folder / "file.yaml")]
        if visible is not None:
            environment["NEURON_RT_VISIBLE_CORES"] = visible
        if devices is not None:
            neuron_ls(folder / "root", listed(TYPES["inf2.48xlarge"], devices))
            command = ["unshare", "--mount", "sh", "-c", f'mount --bind {folder}/root/opt /opt && exec "$@"', "sh", *command]
        with own_ray.command(folder, environment, *command, cwd=folder) as process:
            yield Server(f"http://127.0.0.1:{port}", process, folder / "log")


@pytest.mark.parametrize("here", HERE)
def test_serve_takes_only_what_is_here_and_left_to_us(here: str, wide: Path, want: str) -> None:
    """Faults 23, 24 and 26 with the real process: `NEURON_RT_VISIBLE_CORES=4-7 rayneuron serve`, and three of twelve devices mounted."""
    visible, devices, taken = HERE[here]
    if devices is not None and subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    with serving(wide, taken.count(",") + 1, visible, devices) as server:
        server.ready()
        assert said(server.url) == want
        (replica,) = ranks(server.process)
        inherited = dict(word.split(b"=", 1) for word in Path(f"/proc/{replica}/environ").read_bytes().split(b"\0") if b"=" in word)
        assert (inherited[b"NEURON_RT_LOG_LEVEL"], inherited[b"NEURON_RT_INSPECT_ENABLE"]) == (b"WARN", b"0")
        ledgers = Path(os.fsdecode(inherited[b"RAYNEURON_LEDGER"]))
        (record,) = [json.loads(path.read_text()) for path in ledgers.glob("*/*.json")]
        assert (record["pid"], ",".join(map(str, range(record["first"], record["last"] + 1)))) == (replica, taken)
        assert {int(file.name) for file in opened(replica) if file.parent.name == "cores"} == set(map(int, taken.split(","))), "claimed"


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, steps ahead": (1, {"compile": {"async_mode": True}}),
    "four ranks, float8": (4, {"quantization": "f8e4m3", "kv_dtype": "f8e4m3"}),
    "two ranks, experts": (2, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind: str, wide: Path, tmp_path: Path) -> None:
    """The CPU device's text, through HTTP."""
    ranks, options = KINDS[kind]
    model = wide
    if "experts" in kind:
        model = tmp_path / "experts"
        cases.save(cases.tf.MixtralConfig(**{**cases.SMALL, "vocab_size": hub.read_config(wide)["vocab_size"]}, num_local_experts=4), model)
        for file in wide.glob("token*"):
            shutil.copy(file, model)
    with LLM(str(model), **ARGS, **options) as cpu:
        want = cpu.generate(["hello there"], SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].text
    with serving(model, ranks, f"0-{ranks - 1}", options=options) as server:
        server.ready()
        assert said(server.url) == want


def test_a_graph_that_fails_keeps_the_others(wide: Path, want: str, tmp_path: Path) -> None:
    """`rayneuron serve` says which graph, and where the compiler's log is, which is there; the next start compiles what is missing."""
    cache, alone = tmp_path / "graphs", {"compile": {"workers": 1, "cache": str(tmp_path / "graphs")}}
    with serving(wide, 1, "0", options=alone, STANDIN_FAIL_GRAPH="kv_copy") as server:
        eventually(lambda: "could not be compiled" in server.log.read_text(), 240, lambda: server.log.read_text()[-3000:])
        told = re.sub(r"\s+", " ", server.log.read_text())
        log = Path(re.search(r"The compiler's log is (\S+log-neuron-cc\.txt)\.", told)[1])  # type: ignore[index]
        assert re.search(r"tiny: graph kv_copy_n(\d+) \(\1 KV blocks\) could not be compiled: ", told) and "[F137]" in log.read_text()
        assert "4 of 5 graphs are compiled and kept" in told
    kept = {file: file.stat().st_mtime_ns for file in cache.rglob("graph.neff")}
    assert len(kept) >= 4
    with serving(wide, 1, "0", options=alone) as server:
        server.ready()
        assert said(server.url) == want
    after = {file: file.stat().st_mtime_ns for file in cache.rglob("graph.neff") if "builds" not in file.parts}
    assert len(after) == len([file for file in kept if "builds" not in file.parts]) + 1
    assert all(after[file] == when for file, when in kept.items() if "builds" not in file.parts)


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
