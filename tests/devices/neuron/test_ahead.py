"""Steps begun before the one before has ended: over the stand-in, whose steps a test can hold, and over the CPU's queue."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayneuron import LLM, SamplingParams, loading
from rayneuron.config import parse
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import ConfigError
from rayneuron.types import Request, TokenDelta
from tests.devices.neuron.test_device import OPTIONS

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 9, 100, 3], list(range(20, 45)), [7], [30, 31, 32], [12] * 9)]
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=8, temperature=0.9, seed=4, top_p=0.8),
    SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=2, n=2),
    SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=12, temperature=1.5, seed=6, prompt_logprobs=1),  # rows whose nucleus was cut are sampled by the host
]


def tokens(model: Path, **options: Any) -> list[list[list[int]]]:
    with LLM(str(model), **{**OPTIONS, "buckets": {**OPTIONS["buckets"], "scores": True}}, **options) as llm:
        assert llm.engine.runner.overlaps is bool(options.get("compile", {}).get("async_mode"))
        return [[list(c.token_ids) for c in o.outputs] for o in llm.generate(PROMPTS, PARAMS)]


AHEAD = {"compile": {"async_mode": True}}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_same_tokens_with_and_without(standin: Path, tiny: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1" if ranks == 2 else "0")
    monkeypatch.setenv("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "")  # taken back at the end; the device says it itself
    monkeypatch.setenv("NEURON_RT_IO_RING_CACHE_SIZE", "")
    want = tokens(tiny)
    assert tokens(tiny, device="neuron", tensor_parallel=ranks, **AHEAD) == want
    assert os.environ["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "2"
    assert tokens(tiny, **AHEAD) == want


def test_in_a_group_of_cpu_ranks(tiny: Path) -> None:
    assert tokens(tiny, tensor_parallel=2, group={"start_s": 120, "load_s": 120}, **AHEAD) == tokens(tiny)


def test_not_with_stages() -> None:
    with pytest.raises(ConfigError, match="async_mode goes without pipeline_parallel, .*leave it out"):
        parse({"model": {"path": "x"}, "pipeline_parallel": 2, **AHEAD})


class Held:
    """Steps of the stand-in that wait for a permit each, and what was seen of them."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def __call__(self, graph: Any) -> None:
        assert self.permits.acquire(timeout=60)


@pytest.fixture
def held(standin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    from neuronx_distributed.trace.nxd_model import nxd_model

    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    monkeypatch.setenv("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "")
    monkeypatch.setenv("NEURON_RT_IO_RING_CACHE_SIZE", "")
    made = Held()
    yield made
    nxd_model.BEFORE.clear()


def begun(engine: Any) -> Callable[[int], None]:
    """A function that waits until the engine's runner was told so often to start a step."""
    counted, original = threading.Semaphore(0), engine.runner.start

    def call(plan: Any) -> Any:
        counted.release()
        return original(plan)

    engine.runner.start = call

    def wait(count: int) -> None:
        for _ in range(count):
            assert counted.acquire(timeout=60)

    wait.none = lambda: not counted.acquire(blocking=False)  # type: ignore[attr-defined]
    return wait


@pytest.mark.parametrize("ahead", [True, False])
def test_host_work_happens_while_the_device_computes(held: Held, tiny: Path, ahead: bool) -> None:
    """Step 1 is held on the device. Ahead, step 2 is planned, packed and begun meanwhile; then step 1's token is delivered while step 2
    is held. Without, step 2 begins only when step 1 has ended. No clock is involved: every wait is for an event."""
    from neuronx_distributed.trace.nxd_model import nxd_model

    engine = loading.open_engine(
        parse({"model": {"path": str(tiny)}, "device": "neuron", "compile": {"async_mode": ahead}, **OPTIONS})
    ).engine
    nxd_model.BEFORE.append(held)
    wait = begun(engine)
    heard: list[TokenDelta] = []
    told = threading.Semaphore(0)

    def deliver(deltas: list[TokenDelta]) -> None:
        heard.extend(deltas)
        told.release()

    loop = EngineLoop(engine, deliver)
    loop.submit(Request(id="a", prompt_ids=[5, 9, 100], params=SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
    if ahead:
        wait(2)  # step 2 has begun; step 1 is still held
        assert not heard
        held.permits.release()
        assert told.acquire(timeout=60)  # step 1's token is delivered; step 2 has no permit yet
        assert len(heard) == 1
        wait(1)  # and step 3 begins meanwhile
    else:
        wait(1)
        assert wait.none() and not heard  # type: ignore[attr-defined]
        held.permits.release()
        assert told.acquire(timeout=60)
        wait(1)
        assert wait.none()  # type: ignore[attr-defined]
    held.permits.release(10)
    while not (heard and heard[-1].finish_reason):
        assert told.acquire(timeout=60)
    assert sum(len(d.token_ids) for d in heard) == 4
    loop.close()


def test_a_failing_step_under_way_ends_everything(held: Held, tiny: Path) -> None:
    """The step that fails is not the one that is being begun; everybody is told, and nothing waits."""
    from neuronx_distributed.trace.nxd_model import nxd_model

    engine = loading.open_engine(parse({"model": {"path": str(tiny)}, "device": "neuron", **AHEAD, **OPTIONS})).engine

    def fails(graph: Any) -> None:
        raise RuntimeError("NRT_EXEC_HW_ERR")

    nxd_model.BEFORE.append(fails)
    ended = threading.Event()
    heard: list[TokenDelta] = []

    def deliver(deltas: list[TokenDelta]) -> None:
        heard.extend(deltas)
        ended.set()

    loop = EngineLoop(engine, deliver)
    loop.submit(Request(id="a", prompt_ids=[5], params=SamplingParams(max_tokens=4)))
    assert ended.wait(60)
    assert [d.finish_reason for d in heard] == ["error"] and "NRT_EXEC_HW_ERR" in (heard[0].error or "")
    loop.close()
    assert not loop.alive
