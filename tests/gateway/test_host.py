"""A model of the host through Ray: asleep, woken by a call, put to sleep again, its cores free; what callers see meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron.placement.instances import instance
from rayneuron.placement.ledger import Ledger
from tests.serve import own_ray
from tests.serve.scripted import PATIENCE_S, eventually, sse

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
GO = {"prompt": "hello there", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def host(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Two cores; `nap`, which takes both of them, `broken`, which cannot start, and a gateway. The address, and the ledgers."""
    from ray import serve

    cores = tmp_path_factory.mktemp("cores")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)  # an engine of this process may have been given cores
        with own_ray.running({"RAYNEURON_LEDGER": str(cores)}, num_cpus=4, resources={"neuron_cores": 2}) as (_, port):
            args = {"model": {"path": str(tiny)}, "dtype": "fp32", "max_model_len": 512, "max_num_seqs": 4, "threads": 1, "seed": 5}
            args |= {"tensor_parallel": 2, "serving": {"num_cpus": 0.1, "drain_timeout_s": 5}}
            broken = {**args, "model": {"path": "/nowhere"}, "tensor_parallel": 1}
            gateway: dict[str, Any] = {
                "models": [{"name": "nap", "args": args, "idle_s": 12}, {"name": "broken", "args": broken}],
                "host": {"instance": "cores:2"}, "scaling": {"min_life_s": 0.5, "orphan_s": 5},
                "serving": {"num_cpus": 0.1, "drain_timeout_s": 5}, "explain": True,
            }  # fmt: skip
            own_ray.deploy(port, {"name": "gateway", "route_prefix": "/", "import_path": "rayneuron.gateway.app:build", "args": gateway})
            eventually(lambda: serve.status().applications["gateway"].status.value == "RUNNING", 120, serve.status)
            made = f"http://127.0.0.1:{port}"
            eventually(lambda: state(made, "nap") == "sleeping", PATIENCE_S, lambda: state(made, "nap"))
            yield made, cores


def state(url: str, name: str) -> str:
    cards = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
    return str(next(card["rayneuron"]["state"] for card in cards if card["id"] == name))


def free(cores: Path) -> set[int]:
    (folder,) = cores.iterdir()
    return set(Ledger(folder, instance("cores:2")).free())


def described(url: str) -> dict[str, Any]:
    reply = httpx.get(f"{url}/debug/hosts", timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


def test_a_call_wakes_its_model_which_then_sleeps_again(host: tuple[str, Path]) -> None:
    url, cores = host
    assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200 and described(url)["seats"] == []
    began_s = time.monotonic()
    reply = httpx.post(f"{url}/v1/completions", json=GO | {"model": "nap"}, timeout=120)
    assert reply.status_code == 200, reply.text
    print(f"woken and answered in {time.monotonic() - began_s:.1f} s, waited {reply.headers['x-rayneuron-waited-ms']} ms")
    assert reply.json()["usage"]["completion_tokens"] == 12 and state(url, "nap") == "ready"
    eventually(lambda: [seat["state"] for seat in described(url)["seats"]] == ["ready"], PATIENCE_S)
    (seat,) = described(url)["seats"]
    assert (seat["seat"], seat["cores"]) == ("nap.0", [0, 1]) and free(cores) == set()
    again = httpx.post(f"{url}/v1/completions", json=GO | {"model": "nap"}, timeout=120)
    assert again.json()["choices"] == reply.json()["choices"] and "x-rayneuron-waited-ms" not in again.headers
    eventually(lambda: described(url)["seats"] == [], 60, lambda: described(url)["seats"])
    assert free(cores) == {0, 1}
    eventually(lambda: state(url, "nap") == "sleeping", PATIENCE_S)  # which the gateway hears of the arbiter a moment later
    page = httpx.get(f"{url}/debug/hosts", headers={"accept": "text/html"}, timeout=PATIENCE_S)
    assert "nap" in page.text and page.headers["content-type"].startswith("text/html")


def test_whoever_streams_may_be_told_how_far_it_is(host: tuple[str, Path]) -> None:
    url, _ = host
    eventually(lambda: state(url, "nap") == "sleeping", 60)
    lines = []
    with httpx.stream("POST", f"{url}/v1/completions", json=GO | {"model": "nap", "stream": True},
                      headers={"x-rayneuron-progress": "1"}, timeout=120) as stream:  # fmt: skip
        assert stream.status_code == 200
        lines = list(stream.iter_lines())
    comments = [line for line in lines if line.startswith(": nap ")]
    assert comments and "about" in comments[0], lines[:3]
    events = sse([line for line in lines if not line.startswith(":")])
    assert events[-1] == "[DONE]" and sum(bool(json.loads(event)["choices"][0]["text"]) for event in events[:-1])


def test_a_start_that_fails_says_why(host: tuple[str, Path]) -> None:
    url, cores = host
    reply = httpx.post(f"{url}/v1/completions", json=GO | {"model": "broken"}, timeout=120)
    assert reply.status_code == 503 and "/nowhere" in reply.json()["error"]["message"], reply.text
    assert 1 <= float(reply.headers["retry-after"]) <= 120
    again = httpx.post(f"{url}/v1/completions", json=GO | {"model": "broken"}, timeout=120)
    assert again.status_code == 503 and "/nowhere" in again.json()["error"]["message"], "at once, from what is known"
    eventually(lambda: free(cores) >= {1}, 30)
