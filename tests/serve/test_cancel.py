"""The cancel and leak meter: whoever leaves, at whatever moment, leaves nothing behind."""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.scripted import PATIENCE_S, Site, eventually, site
from tests.serve.wire import Wire, post

LONG = {"model": "scripted", "prompt": "go on", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def held(tiny: Path) -> Iterator[Site]:
    """Two slots, and every step waits for the test to open the gate."""
    with site(tiny, rows=2, chunk=16) as running:
        running.runner.hold()
        yield running


def aborts(site: Site) -> float:
    """Choices counted as aborted."""
    found = re.search(r'vllm:request_success_total\{[^}]*finished_reason="abort"[^}]*\} (\S+)', httpx.get(f"{site.url}/metrics").text)
    return float(found[1]) if found else 0.0


def test_leaving_while_the_body_is_sent(held: Site) -> None:
    whole = post("/v1/completions", LONG)
    wire = Wire(held)
    wire.send(whole[:-10])
    wire.drop()
    held.runner.free()
    eventually(lambda: "rayneuron:client_disconnects_total" in httpx.get(f"{held.url}/metrics").text, PATIENCE_S)
    held.settle()
    assert held.runner.log == []  # it never reached the engine


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_queued(held: Site, stream: bool) -> None:
    running = [Wire(held) for _ in range(2)]
    for wire in running:
        wire.post("/v1/completions", LONG)
    eventually(lambda: held.server.served.flights.sequences == 2, PATIENCE_S, held.idle)
    queued = Wire(held)
    queued.post("/v1/completions", LONG | {"stream": stream, "prompt": "queued"})
    eventually(lambda: held.server.served.flights.sequences == 3, PATIENCE_S, held.idle)
    queued.drop()
    eventually(lambda: held.server.served.flights.sequences == 2, PATIENCE_S, held.idle)
    for wire in running:
        wire.drop()
    eventually(lambda: held.server.served.flights.sequences == 0, PATIENCE_S, held.idle)
    held.runner.free()
    held.settle()
    assert not any(len(requests) > 2 for _, requests in held.runner.log)
    assert aborts(held) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_prefill_and_before_the_first_token(held: Site, stream: bool) -> None:
    """The prompt needs six chunks; the client leaves in the first. No more than two further steps may carry the request."""
    wire = Wire(held)
    wire.post("/v1/completions", LONG | {"prompt": [9] * 96, "max_tokens": 99, "stream": stream})
    eventually(lambda: held.server.served.engine.snapshot().running == 1, PATIENCE_S, held.idle)  # the first chunk is at the gate
    wire.drop()
    eventually(lambda: not held.server.served.flights.sequences, PATIENCE_S, held.idle)
    held.flush()  # the engine has been told
    held.runner.free()
    held.settle()
    assert len(held.runner.log) <= 2


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_the_middle_stops_the_work_within_two_steps(held: Site, stream: bool) -> None:
    wire = Wire(held)
    wire.post("/v1/completions", LONG | {"stream": stream})
    held.runner.allow(4)
    if stream:
        wire.read_until(b"data: ")
    eventually(lambda: len(held.runner.log) == 4, PATIENCE_S)  # the fifth waits at the gate
    wire.drop()
    eventually(lambda: not held.server.served.flights.sequences, PATIENCE_S, held.idle)
    held.flush()  # the engine has been told
    held.runner.free()
    held.settle()
    assert len(held.runner.log) <= 4 + 2
    assert aborts(held) == 1


def test_leaving_at_the_last_token(tiny: Path) -> None:
    with site(tiny, rows=2) as running:
        for _ in range(20):
            wire = Wire(running)
            wire.post("/v1/completions", {"model": "scripted", "prompt": "say:bye", "max_tokens": 9, "stream": True})
            wire.read_until(b'"finish_reason":"stop"')
            wire.drop()
        running.settle()
        assert aborts(running) == 0


def test_leaving_takes_every_choice_and_every_prompt(held: Site) -> None:
    wire = Wire(held)
    wire.post("/v1/completions", LONG | {"prompt": ["a", "b", "c"], "n": 3, "temperature": 1.0, "stream": True})
    eventually(lambda: held.server.served.flights.sequences == 9, PATIENCE_S, held.idle)
    wire.drop()
    eventually(lambda: held.server.served.flights.sequences == 0, PATIENCE_S, held.idle)
    held.runner.free()
    held.settle()
    assert aborts(held) == 9


def test_a_slow_reader_holds_no_step(tiny: Path) -> None:
    """One client never reads; the other gets its tokens all the same, and the slow one's work ends by itself."""
    with site(tiny, rows=2, length=4096) as running:
        slow = Wire(running)
        slow.post("/v1/completions", LONG | {"stream": True, "max_tokens": 4000, "return_token_ids": True})
        done = httpx.post(f"{running.url}/v1/completions", json=LONG | {"max_tokens": 100}, timeout=PATIENCE_S).json()
        assert done["usage"]["completion_tokens"] == 100
        eventually(lambda: running.server.served.engine.snapshot().running == 0, PATIENCE_S, running.idle)
        slow.drop()
        running.settle()


def test_five_hundred_connect_and_drop(tiny: Path) -> None:
    with site(tiny, rows=4, pace_s=0.002) as running:
        requests = [
            post("/v1/completions", LONG | {"stream": bool(i % 2)}) if i % 3 else post("/v1/chat/completions", _chat(bool(i % 2)))
            for i in range(500)
        ]

        def drop(number: int) -> None:
            whole = requests[number]
            wire = Wire(running)
            wire.send(whole if number % 5 else whole[: len(whole) // 2])
            if number % 7 == 0:
                wire.read_until(b"data: " if b'"stream": true' in whole and number % 5 else b"") if number % 5 and number % 2 else None
            wire.drop()

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(drop, range(500)))
        running.settle()
        steps = running.server.served.engine.snapshot().steps
        after = httpx.post(
            f"{running.url}/v1/completions", json={"model": "scripted", "prompt": "say:still here", "max_tokens": 20}, timeout=PATIENCE_S
        )
        assert after.json()["choices"][0]["text"] == "still here"
        assert running.server.served.engine.snapshot().steps < steps + 30  # nobody else's work was left in the engine
        gauges = httpx.get(f"{running.url}/metrics").text
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "rayneuron:open_calls", "rayneuron:open_sequences"):
            assert re.search(rf"^{name}\{{[^}}]*\}} 0\.0$", gauges, re.M), name


def _chat(stream: bool) -> dict[str, object]:
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": 100,
        "stream": stream,
        "ignore_eos": True,
    }


def test_a_storm_of_refusals_leaves_nothing(tiny: Path) -> None:
    limits = {"max_waiting": 1, "retry_after_s": 3}
    with site(tiny, {"limits": limits}, rows=1) as running:
        running.runner.hold()
        holders = [Wire(running) for _ in range(2)]
        for wire in holders:
            wire.post("/v1/completions", LONG)
        eventually(lambda: running.server.served.flights.sequences == 2, PATIENCE_S, running.idle)
        eventually(lambda: running.server.served.engine.snapshot().running == 1, PATIENCE_S, running.idle)
        with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as client:
            for i in range(300):
                reply = client.post("/v1/completions", json=LONG | {"stream": bool(i % 2)})
                assert reply.status_code == 429 and reply.headers["retry-after"] == "3"
        assert running.server.served.flights.sequences == 2
        for wire in holders:
            wire.drop()
        running.runner.free()
        running.settle()


def test_a_handle_call_that_is_cancelled_is_aborted(held: Site) -> None:
    async def start_and_cancel() -> None:
        import asyncio

        task = asyncio.ensure_future(held.server.completions(dict(LONG)))
        while not held.server.served.flights.sequences:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    held.await_(start_and_cancel())
    assert held.server.served.flights.sequences == 0
    held.runner.free()
    held.settle()
