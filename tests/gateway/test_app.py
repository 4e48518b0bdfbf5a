"""The gateway once with everything: Ray, Serve's proxy, two models, one of them twice, callers by handle, and kills of real processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import descendants
from tests.serve import own_ray
from tests.serve.scripted import PATIENCE_S, eventually, sse

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]  # tests/serve/test_app.py has a gateway in the default run

GATEWAYS = int(os.environ.get("RAYNEURON_GATEWAYS", "1"))
DEPLOY: list[Callable[[int], None]] = []  # what the fixture deploys with
GO = {"model": "tiny", "prompt": "hello there", "max_tokens": 12, "temperature": 0}


def model(path: Path, name: str, route: str | None, replicas: int) -> dict[str, Any]:
    args = {
        "model": {"path": str(path), "name": name}, "dtype": "fp32", "max_model_len": 512, "max_num_seqs": 8, "threads": 1,
        "serving": {"drain_timeout_s": 5, "num_cpus": 0.2, "num_replicas": replicas}, "seed": 5,
    }  # fmt: skip
    return {"name": f"app-{name}", "route_prefix": route, "import_path": "rayneuron.serve.app:build", "args": args}


@pytest.fixture(scope="module")
def url(tiny: Path) -> Iterator[str]:
    """A gateway at /, twice `tiny` behind it, which has a route of its own, once `other`, and a caller by handle."""
    from ray import serve

    with own_ray.running() as (_, port):
        gateway = {"models": [{"application": "app-tiny"}, {"application": "app-other"}], "default_model": "tiny"}
        gateway |= {"serving": {"num_cpus": 0.2, "replicas": GATEWAYS, "drain_timeout_s": 5}}
        applications = [
            model(tiny, "tiny", "/m/tiny", 2),
            model(tiny, "other", None, 1),
            {"name": "gateway", "route_prefix": "/", "import_path": "rayneuron.gateway.app:build", "args": gateway},
            {"name": "probe", "route_prefix": "/probe", "import_path": "tests.serve.probe:build", "args": {"application": "gateway"}},
        ]

        def deploy(replicas: int) -> None:
            """With so many replicas of `tiny`."""
            applications[0]["args"]["serving"]["num_replicas"] = replicas
            own_ray.deploy(port, *applications)

        DEPLOY.append(deploy)
        deploy(2)
        eventually(lambda: [a.status.value for a in serve.status().applications.values()] == ["RUNNING"] * 4, 300, serve.status)
        made = f"http://127.0.0.1:{port}"
        eventually(lambda: connected(made) >= 3 and states(made) == {"ready"}, PATIENCE_S, lambda: states(made))
        yield made


def states(url: str) -> set[str]:
    """What the gateway which answers says of its models."""
    return {card["rayneuron"]["state"] for card in httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]}


def connected(url: str) -> int:
    """Replicas that the gateway which answers is connected with."""
    reply = httpx.get(f"{url}/metrics", timeout=PATIENCE_S)
    return int(sum(float(line.split()[-1]) for line in reply.text.splitlines() if line.startswith("rayneuron:gateway_replicas{")))


def replicas(application: str) -> list[int]:
    """Pids of an application's replicas."""
    found = []
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if f"ServeReplica:{application}:" in Path(f"/proc/{pid}/cmdline").read_bytes().decode():
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        yield http


@pytest.fixture(scope="module")
def expected(client: httpx.Client) -> str:
    """What a replica says to whom asks without the gateway."""
    text: str = client.post("/m/tiny/v1/completions", json=GO).json()["choices"][0]["text"]
    return text


def test_a_model_is_chosen_by_body_path_and_header(client: httpx.Client, expected: str) -> None:
    assert client.post("/v1/completions", json=GO).json()["choices"][0]["text"] == expected
    body = {key: value for key, value in GO.items() if key != "model"}
    assert client.post("/v1/completions", json=body).json()["model"] == "tiny"
    assert client.post("/m/other/v1/completions", json=body).json()["model"] == "other"
    header = {"X-Amzn-SageMaker-Target-Model": "other"}
    assert client.post("/v1/completions", json=body, headers=header).json()["model"] == "other"
    wrong = client.post("/v1/completions", json=GO | {"model": "third"})
    assert wrong.status_code == 404 and "There are: tiny, other" in wrong.json()["error"]["message"]
    assert client.post("/m/third/v1/completions", json=body).status_code == 404
    with client.stream("POST", "/v1/completions", json=GO | {"stream": True}) as stream:
        events = sse(list(stream.iter_lines()))
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected and events[-1] == "[DONE]"


def test_what_it_says_of_all_models(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"], card["rayneuron"]["state"]) for card in listed] == [
        ("tiny", 512, "ready"), ("app-tiny", 512, "ready"), ("other", 512, "ready"), ("app-other", 512, "ready"),
    ]  # fmt: skip
    assert client.get("/v1/models/other").json()["id"] == "other" and client.get("/v1/models/x").status_code == 404
    assert client.get("/health").status_code == client.get("/m/other/health").status_code == 200
    assert set(client.get("/load").json()["models"]) == {"tiny", "other"}
    page = client.get("/")
    assert page.status_code == 200 and 'id="model"' in page.text
    lines = client.get("/metrics").text.splitlines()
    steps = [line for line in lines if line.startswith("rayneuron:steps_total{")]
    told = {(re.findall(r'model_name="(\w+)"', line)[0], re.findall(r'engine="(\w+)"', line)[0]) for line in steps}
    assert told == {("tiny", "0"), ("tiny", "1"), ("other", "0")} and len(steps) == 3
    assert sum(line.startswith("# HELP vllm:generation_tokens_total ") for line in lines) == 1
    assert any(line.startswith('rayneuron:gateway_ttft_seconds_count{engine=') and 'model_name="tiny"' in line for line in lines)


def test_other_applications_call_models_by_handle(client: httpx.Client, expected: str) -> None:
    said = client.post("/probe", json=GO).json()
    assert said["completions"]["choices"][0]["text"] == expected == "".join(piece["text"] for piece in said["pieces"])
    assert "".join(chunk["choices"][0]["text"] for chunk in said["chunks"] if chunk["choices"]) == expected
    assert said["error"][:3] == [True, 400, "temperature"]
    assert [model["id"] for model in said["models"]["data"]] == ["tiny", "app-tiny", "other", "app-other"]
    assert said["chat"] == "".join(c["choices"][0]["delta"].get("content") or "" for c in said["chat_chunks"] if c["choices"])
    eventually(lambda: client.get("/load").json()["open_calls"] == 0, PATIENCE_S)


def test_many_prompts_of_one_call_each_come_to_their_own_replica(client: httpx.Client) -> None:
    """Serve takes calls of one request for one call, and may swap them; ours are made from an empty context, and say whom they are for."""
    prompts = [f"hello {i}" for i in range(24)]
    body = GO | {"max_tokens": 4}
    alone = [client.post("/m/tiny/v1/completions", json=body | {"prompt": prompt}).json()["choices"][0]["text"] for prompt in prompts]
    for _ in range(4):
        together = client.post("/v1/completions", json=body | {"prompt": prompts}).json()["choices"]
        assert [choice["text"] for choice in together] == alone


async def streamed(http: httpx.AsyncClient, number: int, tokens: int, gaps: list[float]) -> str:
    """The text of one stream; half are greedy, half drawn."""
    body = GO | {"prompt": f"stream {number}", "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": number}
    body |= {"temperature": 0 if number % 2 else 1, "stream_options": {"include_usage": True}}
    text, last_s = "", time.monotonic()
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        rest, line = b"", b""
        async for part in reply.aiter_bytes():
            *lines, rest = (rest + part).split(b"\n")  # httpx's own lines end at whatever Unicode calls an end, too
            for line in filter(None, lines):
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
                if chunk.get("usage"):
                    assert chunk["usage"]["completion_tokens"] == tokens
                gaps.append(time.monotonic() - last_s)
                last_s = time.monotonic()
    assert line == b"data: [DONE]"
    return text


async def killed(url: str, kills: int, tokens: int, streams: int = 8) -> list[list[float]]:
    """Streams through the gateway while a replica is killed in the middle of them, so many times; each is what it is without."""
    pauses: list[list[float]] = []
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S * 2) as http:
        wanted = [await streamed(http, number, tokens, []) for number in range(streams)]
        for _ in range(kills):
            await asyncio.to_thread(eventually, lambda: len(replicas("app-tiny")) == 2 and connected(url) >= 3 and connected(url) >= 3, 120)
            gaps: list[list[float]] = [[] for _ in range(streams)]
            calls = [asyncio.ensure_future(streamed(http, number, tokens, gaps[number])) for number in range(streams)]
            while not all(len(each) > 3 or call.done() for each, call in zip(gaps, calls, strict=True)):  # some end in fewer chunks
                await asyncio.sleep(0.005)
            os.kill(replicas("app-tiny")[0], signal.SIGKILL)
            assert await asyncio.gather(*calls) == wanted
            pauses.append([max(each) for each in gaps])
    return pauses


def replayed(url: str, *causes: str) -> float:
    """Choices that went on elsewhere for one of these causes."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    counts = [line for line in lines if line.startswith("rayneuron:gateway_replays_total{")]
    return sum(float(line.split()[-1]) for line in counts if any(f'cause="{cause}"' in line for cause in causes))


async def test_a_replica_that_serve_takes_away_ends_what_it_has(url: str) -> None:
    """Serve waits for the calls that stand for orders: nobody is cut off, though the orders are none of its calls."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S * 2) as http:
        wanted = [await streamed(http, number, 400, []) for number in range(6)]
        before = replayed(url, "crash", "silence", "gap", "step")
        over = asyncio.Event()

        async def again(number: int) -> int:
            rounds = 0
            while not over.is_set():
                assert await streamed(http, number, 400, []) == wanted[number]
                rounds += 1
            return rounds

        calls = [asyncio.ensure_future(again(number)) for number in range(6)]
        await asyncio.sleep(1.0)
        for count in (1, 2):
            await asyncio.to_thread(DEPLOY[0], count)
            await asyncio.to_thread(eventually, lambda count=count: len(replicas("app-tiny")) == count and connected(url) == count + 1, 120)
        over.set()
        assert min(await asyncio.gather(*calls)) > 0
    logs = Path(os.environ["RAY_TMPDIR"]).glob("ray/session_latest/logs/serve/replica_*.log")
    assert any("Serve takes this replica away" in log.read_text() for log in logs), "nobody saw it in time"
    assert replayed(url, "crash", "silence", "gap", "step") == before


async def test_a_killed_replica_is_a_pause(url: str) -> None:
    text = ""
    for _ in range(5):  # where steps are fast, all of that replica may have ended a moment before
        assert len(await killed(url, 1, 440)) == 1
        if "rayneuron:gateway_replays_total{" in (text := httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text):
            break
    assert "rayneuron:gateway_replays_total{" in text


@pytest.mark.timeout(3600)
async def test_two_hundred_kills_and_not_a_token_lost(url: str) -> None:
    kills = int(os.environ.get("RAYNEURON_KILLS", "200"))
    pauses = await killed(url, kills, 440)
    assert len(pauses) == kills
    print("longest pause of each kill:", sorted(round(max(each), 2) for each in pauses))
