"""Prompts computed by a Neuron replica and gone on with by another, over the stand-in and real sockets and memory: the CPU device's tokens,
and not one prompt token computed where it is decoded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rayneuron import loading
from rayneuron.config import parse
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import ConfigError
from rayneuron.preflight import inspect
from rayneuron.serve import pools
from rayneuron.types import Request, SamplingParams
from tests.devices.neuron.conftest import STANDIN
from tests.devices.neuron.test_device import cores
from tests.models import adapters
from tests.serve.scripted import eventually
from tests.transfer.pair import Heard
from tests.transfer.test_pools import prompt

TOKEN, ROOT = "t" * 32, Path(__file__).parents[3]
SMALL: dict[str, Any] = {
    "max_model_len": 64, "max_num_seqs": 4, "prefill_chunk_tokens": 16, "dtype": "fp32", "threads": 1, "block_size": 16,
    "buckets": {"context_encoding": [16], "token_generation": [64], "batch": [4]},
}  # fmt: skip
LENGTHS = (3, 16, 17, 32, 45)


def requests(names: Mapping[str, str] = MappingProxyType({})) -> list[Request]:
    """Where there are adapters, the first has none and each other the next of them."""
    drawn = SamplingParams(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True, n=2)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    own = [None, *names.values()]
    params = [drawn if n == 17 else greedy for n in LENGTHS]
    return [
        Request(id=str(n), prompt_ids=prompt(n, n), params=params[i], adapter=own[i % len(own)]) for i, n in enumerate(LENGTHS)
    ]  # fmt: skip


def tokens(heard: Heard, loop: EngineLoop) -> dict[tuple[str, int], list[int]]:
    asked = requests(loop.engine.adapters.names)
    for request in asked:
        loop.submit(request)
    heard.wait(asked, 120)
    return {key: [token for delta in deltas for token in delta.token_ids] for key, deltas in heard.out.items()}


@contextmanager
def prefilling(config: dict[str, Any], folder: Path, ranks: int) -> Iterator[subprocess.Popen[str]]:
    """The prefill pool's replica of a deployment, on `ranks` cores of a machine of its own."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{STANDIN}:{ROOT}", "STANDIN_CORES": str(folder / "there"),
        "NEURON_RT_VISIBLE_CORES": f"0-{ranks - 1}" if ranks > 1 else "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.devices.neuron.prefill_process", json.dumps(config), TOKEN]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def asked(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdin is not None and child.stdout is not None
    print(file=child.stdin, flush=True)
    said: dict[str, Any] = json.loads(child.stdout.readline())
    return said


@pytest.fixture(scope="module")
def want(wide: Path) -> dict[tuple[str, int], list[int]]:
    """What the CPU says alone."""
    return alone(wide)


def alone(model: Path, **words: Any) -> dict[tuple[str, int], list[int]]:
    engine, heard = loading.open_engine(parse({"model": {"path": str(model)}, **SMALL, **words})).engine, Heard()
    loop = EngineLoop(engine, heard)
    try:
        return tokens(heard, loop)
    finally:
        loop.close()


NEURON = {"device": "neuron"}
POOLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # those who decode, and what is said of those who prefill
    "2 ranks to 1, memory": (NEURON, {**NEURON, "tensor_parallel": 2}),
    "2 ranks to 1, sockets": ({**NEURON, "pools": {"transport": "sockets"}}, {**NEURON, "tensor_parallel": 2}),
    "1 rank to 1, a block a row": ({**NEURON, "block_size": 64}, NEURON),
    "1 rank to 2, steps ahead": ({**NEURON, "tensor_parallel": 2, "compile": {"async_mode": True}}, {"tensor_parallel": 1}),
    "cpu to 2 ranks": ({**NEURON, "tensor_parallel": 2}, {"device": "cpu", "tensor_parallel": 1}),
    "2 ranks to cpu": ({}, {**NEURON, "tensor_parallel": 2}),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", POOLS)
def test_tokens_are_the_cpus(
    name: str, standin: Path, wide: Path, want: dict[tuple[str, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(POOLS[name], standin, wide, want, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["2 ranks to 1, memory", "2 ranks to cpu"])
def test_adapters_are_in_both_pools(name: str, standin: Path, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes a prompt with the adapter it was asked with, known to both by its content."""
    modules = {each: str(adapters.write(tmp_path / each, wide, r=2 + i, seed=i, size=0.4)) for i, each in enumerate("ab")}
    lora = {"lora": {"lora_modules": modules, "max_lora_rank": 4}}
    want, plain = alone(wide, **lora), alone(wide)
    assert [key for key in want if want[key] != plain[key]] and want["3", 0] == plain["3", 0]
    here, there = POOLS[name]
    check(({**here, **lora}, there), standin, wide, want, monkeypatch)


def check(
    pair: tuple[dict[str, Any], dict[str, Any]], standin: Path, wide: Path, want: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    here, there = pair
    said = {"local_tokens": 0, "prefill": there, **here.get("pools", {})}
    words = {"model": {"path": str(wide)}, **SMALL, **here, "pools": said}
    config = parse(words)
    cores(monkeypatch, config.tensor_parallel)
    with prefilling(words, standin, there.get("tensor_parallel", 1)) as child:
        opened, heard = loading.open_engine(config), Heard()
        pulls = pools.borrow(config, opened, TOKEN.encode())
        loop = EngineLoop(opened.engine, heard)
        try:
            assert child.stdout is not None
            pulls.meet({"p": json.loads(child.stdout.readline())})
            eventually(lambda: pulls.ready == ["p"], 60, lambda: pulls.ready)
            assert tokens(heard, loop) == want
            asked_for, room = pulls.prefills["remote", "long"], pulls.prefills["local", "room"]
            assert pulls.counts["adopted"] == asked_for and not pulls.fallbacks and (room or asked_for == len(LENGTHS))
            assert asked_for >= 2, "half of the blocks are for what comes"
            assert room or all(deltas[0].remote for deltas in heard.out.values()), "first tokens of the other"
            eventually(lambda: not (asked(child)["pinned"] or asked(child)["calls"]), 30, lambda: asked(child))
            assert not asked(child)["staged"], "no copy of a block is kept"
        finally:
            loop.close()


def test_who_cannot_is_refused_at_once() -> None:
    """KV that several processes hold of one stage, or in parts of positions, is not handed over; which pool, and what to leave out."""
    model = {"path": "/nowhere/model"}
    flash = {"tensor_parallel": 16, "shard_over_sequence": True, "instance": "cores:16"}
    for more in ({"pipeline_parallel": 2, "instance": "cores:2"}, flash):
        with pytest.raises(ConfigError, match="the prefill pool: .*leave nodes, pipeline_parallel and shard_over_sequence out, or pools"):
            inspect(parse({"model": model, "device": "neuron", "pools": {}, **more}), able=False)
