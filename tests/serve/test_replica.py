"""Replica without HTTP: handle methods, health, start-up and hot settings."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron import metrics
from rayneuron.config import Deployment
from rayneuron.config import parse as parse_config
from rayneuron.errors import ConfigError, NotReady, RayNeuronError, RequestError
from rayneuron.serve import health, served
from rayneuron.serve.ingress import application
from rayneuron.serve.profile import profile_env
from rayneuron.serve.replica import Replica
from rayneuron.serve.startup import thread_share
from rayneuron.types import Delta, Request, SamplingParams, TokenDelta
from tests.serve.scripted import PATIENCE_S, ScriptedRunner, opener_of

STALL_S = 600.0


class Clock:
    """The replica's clock, which a test may put forward; the engine's goes on as it is."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def time(self) -> float:
        return time.time()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (served, health):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
async def server(tiny: Path) -> AsyncIterator[Replica]:
    made = Replica({"model": {"path": str(tiny), "name": "scripted"}, "serving": {"stall_timeout_s": STALL_S}}, opener_of(tiny))
    await made.open()
    yield made
    runner_of(made).free()
    await made.close()


def runner_of(server: Replica) -> ScriptedRunner:
    runner: Any = server.served.opened.engine.runner
    assert isinstance(runner, ScriptedRunner)
    return runner


async def test_methods_for_handles(server: Replica) -> None:
    reply = await server.completions({"prompt": "say:hello", "max_tokens": 20})
    assert reply["choices"][0]["text"] == "hello"
    reply = await server.chat({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4})
    assert reply["object"] == "chat.completion" and reply["usage"]["completion_tokens"] == 4
    ids = (await server.tokenize({"prompt": "say:hello"}))["tokens"]
    said = len(ids) - (await server.tokenize({"prompt": "say:"}))["count"]
    assert (await server.detokenize({"tokens": ids}))["prompt"] == "say:hello"
    for params in ({"max_tokens": 20}, SamplingParams(max_tokens=20, stop=("zz",))):
        for prompt in ("say:hello", ids, {"prompt": "say:hello"}):
            pieces = [piece async for piece in server.generate(prompt, params)]
            assert "".join(piece["text"] for piece in pieces) == "hello"
            assert pieces[-1]["finish_reason"] == "stop" and pieces[-1]["usage"]["completion_tokens"] == said + 1
    asked = {"prompt": "say:hello", "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    streamed = await server.completions(asked)
    chunks = [chunk async for chunk in streamed]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "hello"
    assert chunks[-1]["usage"]["completion_tokens"] == said + 1 and {chunk["object"] for chunk in chunks} == {"text_completion"}
    with pytest.raises(RequestError, match="temperature"):
        await server.chat({"messages": [{"role": "user", "content": "x"}], "stream": True, "temperature": 5})
    with pytest.raises(RequestError, match="temperature"):
        [piece async for piece in server.generate("x", {"temperature": 5})]
    assert (await server.stats())["open_calls"] == 0 and (await server.models())["data"][0]["id"] == "scripted"


async def test_a_stream_that_is_left_is_aborted(server: Replica) -> None:
    stream = server.generate("go on", {"max_tokens": 200, "ignore_eos": True})
    await anext(stream)
    await stream.aclose()
    assert server.served.flights.sequences == 0 and len(server.served.flights) == 0
    chunks = await server.chat({"messages": [{"role": "user", "content": "go on"}], "max_tokens": 200, "stream": True})
    await anext(chunks)
    await chunks.aclose()
    assert server.served.flights.sequences == 0 and len(server.served.flights) == 0


async def test_a_stream_of_chunks_raises_its_error(server: Replica) -> None:
    with pytest.raises(RayNeuronError, match="the engine has stopped"):
        [chunk async for chunk in await server.completions({"prompt": "boom:2:", "max_tokens": 9, "stream": True})]


async def test_health_follows_the_steps(server: Replica, clock: Clock) -> None:
    server.check_health()
    runner_of(server).hold()
    task = asyncio.ensure_future(server.completions({"prompt": "go", "max_tokens": 3}))
    while not server.served.flights.sequences:
        await asyncio.sleep(0)
    server.check_health()  # work for a moment is no stall
    clock.ahead_s = STALL_S + 1
    with pytest.raises(RayNeuronError, match=r"not finished a step for 60\d s"):
        server.check_health()
    runner_of(server).free()
    await task
    server.check_health()


async def test_an_idle_engine_is_healthy_however_long_ago_its_last_step_was(server: Replica, clock: Clock) -> None:
    await server.completions({"prompt": "go", "max_tokens": 3})
    clock.ahead_s = STALL_S + 1
    server.check_health()
    runner_of(server).hold()
    task = asyncio.ensure_future(server.completions({"prompt": "go", "max_tokens": 3}))
    while not server.served.engine.pending():
        await asyncio.sleep(0)
    server.check_health()  # the new work is young, although the last step is old
    runner_of(server).free()
    await task


async def test_a_dead_engine_is_unhealthy_at_once(server: Replica) -> None:
    with pytest.raises(RayNeuronError, match="engine has stopped"):
        await server.completions({"prompt": "boom:1:", "max_tokens": 3})
    with pytest.raises(RayNeuronError, match="scripted step fails"):
        server.check_health()
    with pytest.raises(NotReady):
        await server.completions({"prompt": "go", "max_tokens": 3})


async def test_one_call_that_cannot_be_put_into_text_fails_alone(server: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    class Torn(served.Assembler):
        def push(self, delta: TokenDelta) -> Delta | None:
            if len(self.request.prompt_ids) == 3 and delta.finish_reason:
                raise ValueError("a secret detail")
            return super().push(delta)

    monkeypatch.setattr(served, "Assembler", Torn)
    runner_of(server).hold()
    good = asyncio.ensure_future(server.completions({"prompt": [9] * 4, "max_tokens": 20, "ignore_eos": True}))
    bad = asyncio.ensure_future(server.completions({"prompt": [9] * 3, "max_tokens": 10, "ignore_eos": True}))
    while server.served.flights.sequences < 2:
        await asyncio.sleep(0)
    runner_of(server).free()
    with pytest.raises(RayNeuronError, match="could not be put together") as caught:
        await bad
    assert "secret" not in str(caught.value)
    assert (await good)["usage"]["completion_tokens"] == 20
    assert (server.served.flights.sequences, server.served.flights.waiting_tokens, len(server.served.flights)) == (0, 0, 0)
    server.check_health()


async def test_unknown_fields_are_said_once_and_not_for_ever(server: Replica, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rayneuron"):
        for _ in range(3):
            await server.completions({"prompt": "go", "max_tokens": 1, "wishes": 3})
        assert caplog.text.count("'wishes'") == 1
        for number in range(300):
            await server.completions({"prompt": "go", "max_tokens": 1, f"junk{number}": 1})
    assert 90 <= caplog.text.count("junk") <= 100


@pytest.mark.parametrize("seed", [None, 7])
async def test_every_way_in_fixes_the_seed_before_the_engine_hears_of_a_request(tiny: Path, seed: int | None) -> None:
    """Whoever goes on with a request elsewhere draws the same; a deployment's seed makes a whole replica repeatable."""
    runs = []
    for _ in range(2):
        server = Replica({"model": {"path": str(tiny)}, "seed": seed}, opener_of(tiny))
        await server.open()
        asked: list[Request] = []
        submit = server.served.engine.submit
        server.served.engine.submit = lambda request, submit=submit, asked=asked: (asked.append(request), submit(request))[1]  # type: ignore
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application(server)), base_url="http://x") as http:
            for path, body in (
                ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}),
                ("/v1/completions", {"prompt": "a", "max_tokens": 1, "seed": 5, "stream": True}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}),
                ("/generate", {"prompt": "a", "max_tokens": 1}),
            ):
                assert (await http.post(path, json=body)).status_code == 200
        await server.completions({"prompt": "a", "max_tokens": 1})
        await server.chat({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        assert [piece async for piece in server.generate("a", {"max_tokens": 1, "n": 2})]
        await server.close()
        seeds = [request.seed for request in asked]
        assert len(seeds) == 8 and None not in seeds and seeds[2] == 5 and len(set(seeds)) == 8
        runs.append(seeds)
    assert (runs[0] == runs[1]) is (seed is not None)


async def test_stats_for_serve(server: Replica) -> None:
    stats = {"waiting": 0, "waiting_tokens": 0, "running": 0, "sequences": 0, "kv_used": 0, "backlog_ms": 0}
    assert server.record_autoscaling_stats() == stats
    assert server.record_routing_stats()["slots_total"] == 4


async def test_hot_settings(server: Replica) -> None:
    server.reconfigure({"sampling_defaults": {"max_tokens": 2}})
    assert (await server.completions({"prompt": "go"}))["usage"]["completion_tokens"] == 2
    server.reconfigure({"limits": {"retry_after_s": 3}})
    assert server.now.limits.retry_after_s == 3
    assert (await server.completions({"prompt": "go"}))["usage"]["completion_tokens"] > 2, "what user_config no longer says is as args say"
    server.reconfigure(None)
    assert server.now.limits == server.config.limits


WRONG_UPDATES: dict[str, Any] = {
    "unknown key": {"sampling_default": {}},
    "unknown parameter": {"sampling_defaults": {"temprature": 1}},
    "range": {"sampling_defaults": {"temperature": 99}},
    "type": {"sampling_defaults": {"max_tokens": "2"}},
    "token id": {"sampling_defaults": {"stop_token_ids": [10**7]}},
    "bad words": {"sampling_defaults": {"bad_words": [""]}},
    "half right": {"sampling_defaults": {"max_tokens": 7}, "limits": {"max_waiting": -1}},
    "other half": {"sampling_defaults": {"temperature": 99}, "limits": {"max_waiting": 7}},
    "bool": {"limits": {"max_waiting": True}},
    "list": [1],
    "text": "limits",
    "number": 3,
}


@pytest.mark.parametrize("name", WRONG_UPDATES)
async def test_a_wrong_update_changes_nothing_and_is_said(server: Replica, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, on /load and as a metric, until one comes that is right; nothing is raised, for Serve would end the replica."""
    server.reconfigure({"sampling_defaults": {"max_tokens": 2}, "limits": {"max_waiting": 5}})
    before, gauge = (server.served.context, server.now.limits), server.telemetry.series[metrics.USER_CONFIG_REFUSED]
    with caplog.at_level(logging.ERROR, logger="rayneuron"):
        server.reconfigure(WRONG_UPDATES[name])
    assert (server.served.context, server.now.limits) == before
    said = (await server.stats())["refused_user_config"]
    assert said and said in caplog.text and gauge.values[()] == 1 and b"rayneuron:user_config_refused" in server.telemetry.text()
    assert (await server.completions({"prompt": "go"}))["usage"]["completion_tokens"] == 2
    server.reconfigure({"sampling_defaults": {"max_tokens": 3}})
    assert "refused_user_config" not in await server.stats() and gauge.values[()] == 0
    assert (await server.completions({"prompt": "go"}))["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("where", ["hot", "Flights", "EngineLoop"])
async def test_whatever_open_made_is_given_back_where_it_fails(where: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **words: Any) -> None:
        raise RayNeuronError("a part of the start fails")

    made: list[Any] = []

    def opener(config: Deployment, progress: Any = None) -> Any:
        made.append(opener_of(tiny)(config, progress))
        return made[-1]

    monkeypatch.setattr(served, where, fails)
    server = Replica({"model": {"path": str(tiny)}}, opener)
    with pytest.raises(RayNeuronError, match="a part of the start fails"):
        await server.open()
    assert made[0].engine.runner.closed and server.state == "starting"
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("rayneuron-engine", "rayneuron-text"))]
    await server.close()


async def test_an_engine_nobody_waits_for_any_more_is_given_back(tiny: Path) -> None:
    """The start is cancelled while the engine loads."""
    begun, loading, made = threading.Event(), threading.Event(), []

    def slow(config: Deployment, progress: Any = None) -> Any:
        begun.set()
        assert loading.wait(PATIENCE_S)
        made.append(opener_of(tiny)(config, progress))
        return made[-1]

    server = Replica({"model": {"path": str(tiny)}}, slow)
    opening = asyncio.ensure_future(server.open())
    while not begun.is_set():
        await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    loading.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert made[0].engine.runner.closed


async def test_a_key_that_is_not_there_ends_the_start_before_anything_is_loaded(tiny: Path) -> None:
    def opener(*args: Any) -> Any:
        raise AssertionError("loaded")

    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        Replica({"model": {"path": str(tiny)}, "serving": {"api_keys": ["env:NO_SUCH_KEY"]}}, opener)


async def test_not_ready_until_warm(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Calls are refused while the engine loads, and the log says how far it is."""
    loading = threading.Event()
    open_scripted = opener_of(tiny)

    def slow(config: Deployment, progress: Any = None) -> Any:
        progress("weights", 1, 2)
        assert loading.wait(PATIENCE_S)
        return open_scripted(config, progress)

    server = Replica({"model": {"path": str(tiny), "name": "scripted"}}, slow)
    with caplog.at_level(logging.INFO, logger="rayneuron"):
        opening = asyncio.ensure_future(server.open())
        while "weights 1/2" not in caplog.text:
            await asyncio.sleep(0.01)
        with pytest.raises(NotReady):
            await server.completions({"prompt": "go"})
        loading.set()
        await opening
    assert "ready after" in caplog.text
    assert (await server.completions({"prompt": "say:x", "max_tokens": 5}))["choices"][0]["text"] == "x"
    runner = runner_of(server)
    await server.close()
    with pytest.raises(NotReady, match="shutting down"):
        await server.completions({"prompt": "go"})
    assert runner.closed


def test_threads_are_said_explicitly() -> None:
    model = {"model": {"path": "/x"}}
    assert thread_share(parse_config(model | {"threads": 3})) == 3
    assert thread_share(parse_config(model | {"serving": {"num_cpus": 6}})) == 6
    assert thread_share(parse_config(model | {"serving": {"num_cpus": 0.5}})) == thread_share(parse_config(model)) >= 1


def test_profiles() -> None:
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in profile_env("plain") and "THROUGHPUT" not in " ".join(profile_env("plain"))
    assert profile_env("fast")["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    with pytest.raises(ConfigError, match="plain, fast"):
        profile_env("quick")
