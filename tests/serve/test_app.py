"""The whole of it once: Ray, Serve's proxy, the replica, a real engine with random weights, and a caller by handle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron import demo
from rayneuron.errors import TIMED_OUT, ConfigError
from tests.gateway.test_app import replicas, streamed
from tests.serve import own_ray
from tests.serve.scripted import PATIENCE_S, eventually, sse

pytestmark = pytest.mark.timeout(400)

GO = {"model": "tiny", "prompt": "hello there", "max_tokens": 12, "temperature": 0}
MUCH = GO | {"max_tokens": 240, "ignore_eos": True, "n": 128, "temperature": 1.0}  # 7,680 steps on 4 slots: seconds of work


def arguments(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(path), "name": "tiny"}, "dtype": "fp32", "max_model_len": 256, "max_num_seqs": 4, "threads": 1,
        "limits": {"max_waiting": 248},
        "serving": {"drain_timeout_s": 20, "num_cpus": 0.5, "reset_prefix_cache": True, "weights_directory": str(path.parent)}, **more,
    }  # fmt: skip


def deploy(path: Path, port: int, gateway: bool = False, **deployment: Any) -> None:
    """What `serve deploy` does with a deployment file; returns when everything runs."""
    from ray import serve

    model: dict[str, Any] = {"name": "model", "route_prefix": "/", "import_path": "rayneuron.serve.app:build", "args": arguments(path)}
    if deployment:
        model["deployments"] = [{"name": "EngineServer", **deployment}]
    applications = [model]
    for name, builder in (("caller", "examples.handle_call:build"), ("probe", "tests.serve.probe:build")):
        applications.append({"name": name, "route_prefix": f"/{name}", "import_path": builder, "args": {"application": "model"}})
    if gateway:
        said = {"models": [{"application": "model"}], "serving": {"num_cpus": 0.2, "drain_timeout_s": 5}}
        applications.append({"name": "gateway", "route_prefix": "/gateway", "import_path": "rayneuron.gateway.app:build", "args": said})
    own_ray.deploy(port, *applications)
    eventually(lambda: set(states().values()) == {"RUNNING"} and len(states()) == 3 + gateway, 300, lambda: serve.status().applications)


def states() -> dict[str, str]:
    from ray import serve

    return {name: str(app.status.value) for name, app in serve.status().applications.items()}


@pytest.fixture(scope="module")
def url(tiny: Path) -> Iterator[str]:
    """The model at /, callers at /caller and /probe, in a Ray of their own."""
    with own_ray.running() as (_, port):
        deploy(tiny, port)
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        yield http


@pytest.fixture(scope="module")
def expected(tiny: Path) -> str:
    """What transformers says to the same prompt, greedily."""
    return greedy(tiny)


def greedy(tiny: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    prompt = tokenizer(GO["prompt"], return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=GO["max_tokens"], do_sample=False)[0, prompt.input_ids.shape[1] :]
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def test_completion_and_stream(client: httpx.Client, expected: str) -> None:
    reply = client.post("/v1/completions", json=GO, headers={"x-request-id": "through-serve"})
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == expected
    assert reply.headers.get_list("x-request-id") == ["through-serve"]
    with client.stream("POST", "/v1/completions", json=GO | {"stream": True}) as stream:
        events = sse(list(stream.iter_lines()))
        assert len(stream.headers.get_list("x-request-id")) == 1
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected and events[-1] == "[DONE]"


def test_the_other_routes(client: httpx.Client) -> None:
    assert client.get("/health").status_code == client.head("/health").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 256
    assert client.get("/version").json()["version"]
    ids = client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hello"}
    assert client.post("/generate", json={"prompt": "hi", "max_tokens": 4}).json()["usage"]["completion_tokens"] == 4
    assert "vllm:generation_tokens_total" in client.get("/metrics").text
    assert client.head("/metrics").status_code == 200
    assert "<html" in client.get("/").text.lower()


def test_errors_keep_their_body_through_the_proxy(client: httpx.Client) -> None:
    for path, body, status in (
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404),
        ("/v1/completions", GO | {"temperature": 9}, 400),
        ("/v1/completions", GO | {"prompt": [9] * 400}, 400),
        ("/v1/nowhere", {}, 404),
    ):
        reply = client.post(path, json=body)
        assert reply.status_code == status and reply.json()["error"]["code"] == status
    for limit_s in ("0.05", "0.001", "1e-06"):  # Serve itself is first where the replica has not even begun
        limited = client.post("/v1/completions", json=MUCH, headers={"x-request-timeout-seconds": limit_s})
        assert limited.status_code == 408 and limited.json()["error"]["type"] == "RequestTimeoutError"
        assert limited.json()["error"]["message"] == TIMED_OUT
    much = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": MUCH["max_tokens"]}  # what is wrong may be said in time
    messages = client.post("/v1/messages", json=much, headers={"x-request-timeout-seconds": "1e-06"})
    assert messages.status_code == 408 and messages.json()["error"]["type"] == "timeout_error"
    assert client.post("/v1/completions", json=GO, headers={"x-session-id": b"\xff"}).status_code == 200  # type: ignore[dict-item]


def settle(client: httpx.Client) -> None:
    """Wait until nobody calls and the engine holds nothing."""
    names = ("open_calls", "open_sequences", "running", "waiting", "kv_tokens_used")
    eventually(lambda: not any(client.get("/load").json()[name] for name in names), PATIENCE_S, lambda: client.get("/load").json())


def aborted(client: httpx.Client) -> float:
    """Choices that were ended because their client had gone."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total") and '"abort"' in line)


def test_leaving_through_the_proxy_stops_the_work(client: httpx.Client) -> None:
    """Each of the calls is thousands of steps: by itself none of them ends before its client has gone."""
    before = aborted(client)
    for calls in range(1, 4):
        with client.stream("POST", "/v1/completions", json=MUCH | {"stream": True}) as stream:
            next(stream.iter_lines())
        settle(client)
        assert aborted(client) >= before + calls


def test_a_full_queue_is_a_429(client: httpx.Client, url: str) -> None:
    """4 slots and 248 places: while two calls fill them nobody gets 64 more, in OpenAI's words; afterwards 12 at once all finish.

    As many, since the two calls give places back while they run.
    """
    import concurrent.futures

    def ask(number: int, **more: Any) -> httpx.Response:
        body = GO | {"max_tokens": 100, "ignore_eos": True, "stream": bool(number % 2)} | more
        return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        with client.stream("POST", "/v1/completions", json=MUCH | {"stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)  # whoever lets go of `lines` has left
            other = pool.submit(httpx.post, f"{url}/v1/completions", json=MUCH | {"n": 124, "max_tokens": 8}, timeout=PATIENCE_S)
            eventually(lambda: client.get("/load").json()["open_sequences"] > 240, PATIENCE_S, lambda: client.get("/load").json())
            refused = list(pool.map(partial(ask, n=64, temperature=1.0), range(12)))
        assert {reply.status_code for reply in refused} == {429}
        assert all(reply.json()["error"]["type"] == "RateLimitError" and reply.headers["retry-after"] == "1" for reply in refused)
        assert other.result().status_code == 200
        settle(client)
        assert {reply.status_code for reply in pool.map(ask, range(12))} == {200}


def test_handles(client: httpx.Client, expected: str) -> None:
    """From other applications: chat whole, generate as a stream; an error arrives as what it is; a stream that is cancelled, or dropped,
    ends the work: by itself the one that was dropped takes 6,400 steps."""
    before = aborted(client)
    reply = client.post("/caller", json={"prompt": GO["prompt"], "max_tokens": 12})
    assert reply.status_code == 200, reply.text
    assert reply.json()["streamed"] == expected
    assert reply.json()["chat"]["object"] == "chat.completion"
    reply = client.post("/probe", json=GO)
    assert reply.status_code == 200, reply.text
    got = reply.json()
    assert got["completions"]["choices"][0]["text"] == expected
    assert got["tokenize"]["count"] > 0 and got["models"]["data"][0]["id"] == "tiny" and got["stats"]["slots_total"] == 4
    assert "".join(piece["text"] for piece in got["pieces"]) == expected and got["pieces"][-1]["finish_reason"] in ("stop", "length")
    assert got["error"][:3] == [True, 400, "temperature"]
    assert "".join(chunk["choices"][0]["text"] for chunk in got["chunks"]) == expected
    assert [chunk["object"] for chunk in got["chat_chunks"][:1]] == ["chat.completion.chunk"]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in got["chat_chunks"][:-1]) == got["chat"]
    assert got["chat_chunks"][-1]["usage"]["completion_tokens"] > 0
    assert got["first"]["text"]
    settle(client)
    assert aborted(client) > before + 100


def test_ray_takes_our_metrics(url: str) -> None:
    """Every name, label and bucket list goes through `ray.util.metrics` itself."""
    from rayneuron.serve.telemetry import Load, RayExport, Telemetry
    from rayneuron.types import Request, SamplingParams, Snapshot, Stamps

    telemetry = Telemetry("tiny", "0", lambda: Load(Snapshot(), 0, 0))
    telemetry.asked(Request(id="r", prompt_ids=[1], params=SamplingParams()))
    telemetry.finished("stop", 3, Stamps(arrived=1.0, scheduled=2.0, first_token=3.0, finished=5.0), 5.0)
    export = RayExport(telemetry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export.push()


def test_user_config_is_hot(client: httpx.Client, url: str, tiny: Path) -> None:
    """New defaults without a restart: the engine is the one that was started first."""
    started = client.get("/v1/models").json()["data"][0]["created"]
    deploy(tiny, int(url.rpartition(":")[2]), user_config={"sampling_defaults": {"max_tokens": 3}})
    eventually(lambda: tokens(client) == 3, PATIENCE_S)
    assert client.get("/v1/models").json()["data"][0]["created"] == started


def tokens(client: httpx.Client) -> int:
    return int(client.post("/v1/completions", json={"prompt": "hi", "ignore_eos": True}).json()["usage"]["completion_tokens"])


def test_metrics_are_those_of_every_replica(client: httpx.Client, url: str, tiny: Path) -> None:
    """With two replicas every scrape holds both, whichever answers: ten calls later the sums have grown by ten, and none ever falls."""

    def counted() -> dict[str, float]:
        """Finished sequences by replica."""
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("vllm:request_success_total")]
        ended = Counter[str]()
        for line in lines:
            ended[line.partition('engine="')[2].partition('"')[0]] += float(line.split()[-1])  # type: ignore[assignment]
        return dict(ended)

    deploy(tiny, int(url.rpartition(":")[2]), num_replicas=2)
    eventually(lambda: set(counted()) == {"0", "1"}, PATIENCE_S, counted)
    before = counted()
    for _ in range(10):
        assert client.post("/v1/completions", json=GO | {"max_tokens": 1}).status_code == 200
    scrapes = [counted() for _ in range(8)]
    assert all(scrape == scrapes[0] for scrape in scrapes) and sum(scrapes[0].values()) == sum(before.values()) + 10
    text = client.get("/metrics").text
    assert sum(line.startswith("process_resident_memory_bytes{") for line in text.splitlines()) == 2

    def known() -> list[float]:
        """Blocks of prefixes each replica keeps."""
        lines = client.get("/metrics").text.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith("rayneuron:kv_blocks{") and 'state="cached"' in line]

    for i in range(12):  # until both have been asked
        client.post("/v1/completions", json={"prompt": [20 + i] * 70, "max_tokens": 1})
    kept = known()
    reply = client.post("/reset_prefix_cache")
    assert reply.status_code == 200 and reply.json()["blocks"] == sum(kept) > 0 and len(kept) == 2 and known() == [0, 0], (reply.text, kept)


def test_every_replica_takes_other_weights(client: httpx.Client, tiny: Path, expected: str) -> None:
    from ray import serve

    def texts() -> set[str]:
        """What both say: twelve calls have not all gone to one of them."""
        return {client.post("/v1/completions", json=GO).json()["choices"][0]["text"] for _ in range(12)}

    other = demo.random("tiny", seed=1, dtype="fp32")
    reply = client.post("/admin/weights", json={"path": other.name})
    assert reply.status_code == 200 and texts() == {greedy(other)} != {expected}, reply.text
    assert client.post("/admin/weights", json={"path": "/etc"}).status_code == 400 and texts() == {greedy(other)}
    assert serve.get_app_handle("model").load_weights.remote(str(tiny)).result(timeout_s=PATIENCE_S) and texts() == {expected}


async def test_a_gateway_in_front_of_both(client: httpx.Client, url: str, tiny: Path, expected: str) -> None:
    """It says what they say; where one of them is killed in the middle of streams on both, it is a pause."""
    deploy(tiny, int(url.rpartition(":")[2]), gateway=True, num_replicas=2)

    def both() -> bool:
        lines = client.get("/gateway/metrics").text.splitlines()
        connected = [line.split()[-1] for line in lines if line.startswith("rayneuron:gateway_replicas{")]
        return connected == ["2.0"] and client.get("/gateway/health").status_code == 200

    eventually(both, PATIENCE_S)
    reply = client.post("/gateway/v1/completions", json=GO)
    assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == expected, reply.text
    async with httpx.AsyncClient(base_url=f"{url}/gateway", timeout=PATIENCE_S * 2) as http:
        gaps: list[list[float]] = [[] for _ in range(8)]  # as many as both have slots: neither is without
        wanted = [await streamed(http, number, 160, gaps[number]) for number in range(8)]
        for each in gaps:
            each.clear()
        calls = [asyncio.ensure_future(streamed(http, number, 160, gaps[number])) for number in range(8)]
        while not all(len(each) > 3 or call.done() for each, call in zip(gaps, calls, strict=True)):  # some end in fewer chunks
            await asyncio.sleep(0.005)
        os.kill(replicas("model")[0], signal.SIGKILL)
        assert await asyncio.gather(*calls) == wanted
    assert 'rayneuron:gateway_replays_total{cause="crash"' in client.get("/gateway/metrics").text


def test_unknown_keys_are_refused_at_build(tiny: Path) -> None:
    from rayneuron.serve.app import build

    with pytest.raises(ConfigError, match=r"max_num_seq.*did you mean max_num_seqs"):
        build(arguments(tiny) | {"max_num_seq": 3})
    with pytest.raises(ConfigError, match=r"serving\.num_replica.*did you mean num_replicas"):
        build({"model": {"path": str(tiny)}, "serving": {"num_replica": 2}})


def test_the_builder_is_one_ray_takes(tiny: Path) -> None:
    """`import_path: rayneuron.serve.app:build` with args, as `serve run` resolves it, in a process where no Ray runs."""
    script = """
        import json, sys
        from ray._common.utils import import_attr
        from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call
        app = call(import_attr("rayneuron.serve.app:build"), json.loads(sys.argv[1]))
        deployment = app._bound_deployment
        print(deployment.name, deployment.max_ongoing_requests, deployment.ray_actor_options["num_cpus"])
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), json.dumps(arguments(tiny))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout.split() == ["EngineServer", "100000", "0.5"], ran.stderr
