"""Pools through Ray Serve: one replica that prefills, one that decodes; one is killed in the middle, another comes where much is to do."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron import LLM, SamplingParams
from rayneuron.serve import leaks
from tests.cluster.conftest import descendants
from tests.models import adapters as adapted
from tests.serve import own_ray
from tests.serve.scripted import PATIENCE_S, eventually, sse

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PROMPTS = [" ".join(f"{n} words {i}" for i in range(20)) for n in range(12)]
ARGUMENTS: dict[str, Any] = {
    "dtype": "fp32", "max_model_len": 512, "max_num_seqs": 8, "threads": 1, "block_size": 16, "prefill_chunk_tokens": 64,
    "serving": {"drain_timeout_s": 10, "num_cpus": 0.5},
    "pools": {"local_tokens": 0, "stall_s": 2.0, "prefill": {"serving": {"num_cpus": 0.5}}},
}  # fmt: skip


@contextmanager
def deployed(tiny: Path, **more: Any) -> Iterator[tuple[httpx.Client, Path]]:
    """The model in pools, in a Ray of its own, whose files lie in a folder."""
    from ray import serve

    args = {"model": {"path": str(tiny), "name": "tiny"}, **ARGUMENTS, **more}
    with own_ray.running() as (folder, port):
        own_ray.deploy(port, {"name": "model", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": args})
        eventually(lambda: state() == "RUNNING", 120, lambda: serve.status().applications)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as found:
            yield found, folder


@pytest.fixture
def client(tiny: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """With adapters, which may come while it runs, from a folder that has one, x."""
    adapted.write(tmp_path / "x", tiny, r=4, size=0.2)
    with deployed(tiny, lora={"directory": str(tmp_path), "allow_runtime_updating": True}) as (found, _):
        yield found


def state() -> str:
    from ray import serve

    return str({name: app.status.value for name, app in serve.status().applications.items()}.get("model"))


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[str]:
    """What one engine says alone."""
    with LLM(str(tiny), dtype="fp32", max_model_len=512, threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        return [llm.generate([prompt], params)[0].outputs[0].text for prompt in PROMPTS]


def counted(client: httpx.Client, name: str) -> float:
    """The sum of a metric over its labels, of all replicas of both pools."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def streamed(client: httpx.Client, prompt: str, model: str = "tiny") -> str:
    asked = {"model": model, "prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=asked) as stream:
        lines = list(stream.iter_lines())
    assert stream.status_code == 200, (stream.status_code, lines)
    events = sse(lines)
    assert events[-1] == "[DONE]", events
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def prefillers() -> list[int]:
    """Processes of prefill replicas."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            if b"PrefillServer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_the_same_texts_and_a_killed_prefill_replica_costs_time_alone(client: httpx.Client, expected: list[str]) -> None:
    def remote() -> bool:
        adopted = counted(client, "rayneuron:tickets_ended_total")
        streamed(client, "some words to find out whether somebody computes prompts " + str(adopted))
        return counted(client, "rayneuron:kv_transfer_bytes_total") > 0

    eventually(remote, 60)
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert list(threads.map(lambda prompt: streamed(client, prompt), PROMPTS)) == expected
        text = client.get("/metrics").text
        assert 'rayneuron:tickets_ended_total{engine="prefill 0",how="committed",model_name="tiny"}' in text
        assert client.get("/load").json()["pools"]["kv_transfer_bytes"][""] > 0
        (said,) = leaks._pools()
        assert said.startswith("prefill replica of model: tickets queued 0, running 0, offered 0, ") and "committed" in said
        assert "blocks are kept" in said and said.endswith("; 0 connections were refused")
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "x"}).status_code == 200
        adopted = counted(client, "vllm:external_prefix_cache_hits_total")
        assert streamed(client, PROMPTS[0], "x") != expected[0]
        assert counted(client, "vllm:external_prefix_cache_hits_total") > adopted, "the other pool has been told of the adapter"
        (pid,) = prefillers()
        client.post("/reset_prefix_cache")
        begun = threading.Semaphore(0)

        def again(prompt: str) -> str:
            begun.release()
            return streamed(client, prompt)

        running = [threads.submit(again, prompt) for prompt in PROMPTS]
        for _ in range(4):
            begun.acquire()
        os.kill(pid, signal.SIGKILL)
        assert [one.result() for one in running] == expected
    assert streamed(client, PROMPTS[0]) == expected[0], "nobody computes prompts now"
    bytes_before = counted(client, "rayneuron:kv_transfer_bytes_total")
    eventually(lambda: bool(prefillers()) and prefillers() != [pid], 60)
    number = iter(range(1000))

    def back() -> bool:
        streamed(client, f"{next(number)} prompts that nobody has seen before, and that are long enough to be asked for elsewhere")
        return counted(client, "rayneuron:kv_transfer_bytes_total") > bytes_before

    eventually(back, 60)


def test_a_prefill_pool_grows_where_many_prompts_wait_and_one_trace_holds_both(tiny: Path, expected: list[str]) -> None:
    """Two replicas come of one, by its own policy, and both are asked; the decode pool stays. Spans of a request go to one trace."""
    scaling = {
        "max_replicas": 2, "metrics_interval_s": 0.2, "look_back_period_s": 1.0, "upscale_delay_s": 0.0, "downscale_delay_s": 600.0,
        "policy": {"policy_function": "rayneuron.policies.pool_sizes:PromptTokens", "policy_kwargs": {"tokens": 300}},
    }  # fmt: skip
    there = {"serving": {"num_cpus": 0.5, "autoscaling": scaling}}
    serving = {**ARGUMENTS["serving"], "trace": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH", "ray.serve._private.tracing_utils:default_tracing_exporter")
        patch.setenv("RAY_SERVE_TRACING_SAMPLING_RATIO", "1.0")
        with deployed(tiny, serving=serving, pools={**ARGUMENTS["pools"], "prefill": there}) as (client, folder):
            stop, numbers = threading.Event(), iter(range(10_000))

            def ask() -> None:
                while not stop.is_set():
                    streamed(client, f"{next(numbers)} " + PROMPTS[0] * 3)

            with ThreadPoolExecutor(12) as threads:
                asking = [threads.submit(ask) for _ in range(12)]
                try:
                    eventually(lambda: len(prefillers()) == 2, 120)
                    other = 'rayneuron:tickets_ended_total{engine="prefill 1",how="committed"'
                    eventually(lambda: counted(client, other) > 0, 60, lambda: client.get("/metrics").text)
                finally:
                    stop.set()
                for one in asking:
                    one.result()
            assert [streamed(client, prompt) for prompt in PROMPTS] == expected
            failed = sum(counted(client, f"rayneuron:{name}_total") for name in ("fallbacks", "kv_transfer_retries"))  # a busy machine
            found = (span for file in folder.glob("ray/session_2*/logs/serve/spans/*_tracing.json") for span in spans(file.read_text()))
            seen = {span["context"]["span_id"]: span for span in found if span["name"] in ("generate", "prefill")}
        parts = [span for span in seen.values() if span["name"] == "prefill"]
        adopted: list[bool] = []
        for part in parts:
            whole = seen[part["parent_id"]]
            assert whole["name"] == "generate" and whole["context"]["trace_id"] == part["context"]["trace_id"]
            adopted.append("adopted" in [event["name"] for event in whole["events"]])
        assert sum(adopted) >= len(PROMPTS) and adopted.count(False) <= failed


def spans(text: str) -> Iterator[dict[str, Any]]:
    """One JSON object after another."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        span, at = decoder.raw_decode(text, at)
        yield span
        at += len(text[at:]) - len(text[at:].lstrip(" ,\n"))
