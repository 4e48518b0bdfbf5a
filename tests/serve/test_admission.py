"""Who is turned away at the door, in what words, and how fast."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron.types import Request
from tests.serve.scripted import PATIENCE_S, Site, eventually, site
from tests.serve.wire import Wire

LONG = {"model": "scripted", "prompt": "go on", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture
def full(tiny: Path) -> Iterator[tuple[Site, list[Wire]]]:
    """One slot taken, two places in the queue taken, nothing moves."""
    with site(tiny, {"limits": {"max_waiting": 2, "retry_after_s": 2.5}}, rows=1) as running:
        running.runner.hold()
        wires = []
        for count in (1, 2, 3):
            wires.append(Wire(running))
            wires[-1].post("/v1/completions", LONG)
            eventually(lambda count=count: running.server.served.flights.sequences == count, PATIENCE_S, running.idle)  # type: ignore[misc]
            eventually(lambda: running.server.served.engine.snapshot().running == 1, PATIENCE_S, running.idle)
        yield running, wires
        running.runner.free()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/generate", {"prompt": "hi", "max_tokens": 4}),
        ("/v1/completions", LONG | {"prompt": "word " * 40}),
    ],
)
def test_a_full_queue(full: tuple[Site, list[Wire]], path: str, body: dict[str, object], stream: bool) -> None:
    running, wires = full
    with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        http.get("/version")  # the connection is up
        refusals_s, cheapest_s = [], []
        for _ in range(10):
            start = time.perf_counter()
            http.get("/version")
            began = time.perf_counter()
            reply = http.post(path, json=body | {"stream": stream})
            refusals_s.append(time.perf_counter() - began)
            cheapest_s.append(began - start)
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "3"  # whole seconds, rounded up
            error = reply.json()["error"]
            assert error["type"] == "RateLimitError" and error["code"] == 429 and "limit is 2" in error["message"]
        # As quick as the cheapest answer there is, or nearly. The least of each: what a busy machine adds is not the server's.
        assert min(refusals_s) < 5 * min(cheapest_s), (refusals_s, cheapest_s)
        text = http.get("/metrics").text
        assert 'vllm:admission_rejections_total{engine="0",model_name="scripted",reason="capacity"} 10.0' in text
    running.runner.free()
    for wire in wires:  # those who were in get their answer
        assert wire.read_until(b'"finish_reason":"length"').startswith(b"HTTP/1.1 200")
        wire.close()
    running.settle()
    assert httpx.post(f"{running.url}{path}", json=body | {"stream": False, "max_tokens": 4}, timeout=PATIENCE_S).status_code == 200


def test_prompt_tokens_in_the_queue_are_limited_too(tiny: Path) -> None:
    with site(tiny, {"limits": {"max_waiting": 50, "max_waiting_tokens": 60}}, rows=1) as running:
        running.runner.hold()
        first = Wire(running)
        first.post("/v1/completions", LONG)
        eventually(lambda: running.server.served.engine.snapshot().running == 1, PATIENCE_S, running.idle)
        second = Wire(running)
        second.post("/v1/completions", LONG | {"prompt": [9] * 50})
        eventually(lambda: running.server.served.flights.sequences == 2, PATIENCE_S, running.idle)
        reply = httpx.post(f"{running.url}/v1/completions", json=LONG | {"prompt": [9] * 10}, timeout=PATIENCE_S)
        assert reply.status_code == 429 and "prompt tokens" in reply.json()["error"]["message"]
        for wire in (first, second):
            wire.drop()
        running.runner.free()
        running.settle()


def test_a_call_that_could_never_be_admitted_is_a_400(tiny: Path) -> None:
    """Trying again would not help, so it is not a 429."""
    with site(tiny, {"limits": {"max_waiting": 2}}, rows=1) as running:
        reply = httpx.post(f"{running.url}/v1/completions", json=LONG | {"prompt": ["a"] * 9}, timeout=PATIENCE_S)
        assert reply.status_code == 400 and "9 prompts" in reply.json()["error"]["message"]
        assert httpx.post(f"{running.url}/v1/completions", json=LONG | {"prompt": ["a"] * 2}, timeout=PATIENCE_S).status_code == 200
        running.settle()


def test_one_call_leaves_half_of_the_queue_to_the_others(tiny: Path) -> None:
    """3 prompts x 20 choices are sixty sequences, and no call gets beyond the slots and half of the queue."""
    with site(tiny, {"limits": {"max_waiting": 40}}, rows=4) as running:
        running.runner.hold()
        for prompts, n, status, param in ((3, 20, 400, "prompt"), (1, 25, 400, "n"), (2, 13, 400, "prompt")):
            body = LONG | {"prompt": ["a"] * prompts, "n": n, "temperature": 1}
            reply = httpx.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE_S)
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
            assert f"{prompts * n} sequences" in reply.json()["error"]["message"] and "takes 24" in reply.json()["error"]["message"]
        assert running.server.served.flights.sequences == 0
        large, small, second = Wire(running), Wire(running), Wire(running)
        large.post("/v1/completions", LONG | {"prompt": ["a", "b"], "n": 12, "temperature": 1})
        eventually(lambda: running.server.served.flights.sequences == 24, PATIENCE_S, running.idle)
        small.post("/v1/completions", LONG)  # there is room for somebody else
        eventually(lambda: running.server.served.flights.sequences == 25, PATIENCE_S, running.idle)
        body = LONG | {"prompt": ["a", "b"], "n": 12, "temperature": 1}
        refused = httpx.post(f"{running.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert refused.status_code == 429 and "21 sequences wait, and this call brings 24; the limit is 40" in refused.text
        for wire in (large, small, second):
            wire.drop()
        running.runner.free()
        running.settle()


def test_a_request_that_is_taken_in_counts_once(tiny: Path) -> None:
    """One slot, one place: while the engine's thread moves the first call from the inbox to the queue, the second one has its place."""
    with site(tiny, {"limits": {"max_waiting": 1}}, rows=1) as running, concurrent.futures.ThreadPoolExecutor(1) as pool:
        engine, answers = running.server.served.opened.engine, []
        add = engine.add

        def ask() -> httpx.Response:
            return httpx.post(f"{running.url}/v1/completions", json=LONG | {"max_tokens": 4}, timeout=PATIENCE_S)

        def add_and_linger(request: Request, *more: Any) -> None:
            add(request, *more)
            if not answers:
                answers.append(pool.submit(ask))
                concurrent.futures.wait(answers, 0.3)  # a refusal would come at once

        engine.add = add_and_linger  # type: ignore[method-assign]
        assert ask().status_code == 200
        assert answers[0].result(PATIENCE_S).status_code == 200
        running.settle()


def test_new_limits_without_a_restart(full: tuple[Site, list[Wire]]) -> None:
    running, wires = full
    assert httpx.post(f"{running.url}/v1/completions", json=LONG, timeout=PATIENCE_S).status_code == 429
    running.call(lambda: running.server.reconfigure({"limits": {"max_waiting": 9}}))
    more = Wire(running)
    more.post("/v1/completions", LONG)
    eventually(lambda: running.server.served.flights.sequences == 4, PATIENCE_S, running.idle)
    running.call(lambda: running.server.reconfigure({"limits": {"max_wait": 1}}))
    assert "did you mean max_waiting" in (running.server.served.refused or "") and running.server.now.limits.max_waiting == 9
    for wire in (*wires, more):
        wire.drop()
    running.runner.free()
    running.settle()
