"""Other weights in a running server: who comes before ends with the old ones, who comes after has the new ones, to the bit."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayneuron import demo
from rayneuron.devices.base import Reweighs
from rayneuron.devices.cpu.device import Cpu
from rayneuron.devices.neuron.device import Neuron
from rayneuron.errors import NotReady
from tests.models import adapters as made
from tests.serve.real import Server, serving

PROMPT = list(range(20, 60))
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"compile": {"async_mode": True}},
    "int8": {"quantization": "int8"},
    "two ranks": {"tensor_parallel": 2},
    "two stages": {"pipeline_parallel": 2},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of other weights of the same model, of another model, and of weights that are none."""
    root = tmp_path_factory.mktemp("weights")
    demo.random("tiny", seed=1, dtype="fp32", out=root / "new")
    for name in ("short", "nan", "longer", "empty"):
        shutil.copytree(root / "new", root / name)
    (root / "empty" / "model.safetensors").unlink()
    held = load_file(root / "new" / "model.safetensors")
    name = next(name for name in held if name.endswith("down_proj.weight"))
    save_file({**held, name: held[name][:, :-8].contiguous()}, root / "short" / "model.safetensors")
    save_file({**held, name: held[name] * torch.nan}, root / "nan" / "model.safetensors")
    config = json.loads((root / "new" / "config.json").read_text())
    (root / "longer" / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    return root


async def post(server: Server, path: str, /, **body: Any) -> tuple[int, Any]:
    status, reply = await server.post(path, json.dumps(body).encode())
    return status, json.loads(reply)


async def said(server: Server) -> list[Any]:
    """Tokens and log-probabilities of two prompts, the second begins as the first."""
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": 3}
    status, reply = await post(server, "/v1/completions", prompt=[PROMPT, PROMPT[:33]], **body)
    assert status == 200, reply
    return [(choice["token_ids"], choice["logprobs"]["top_logprobs"]) for choice in reply["choices"]]


@pytest.mark.parametrize("way", [*("plain", "async", "int8", "two ranks"), pytest.param("two stages", marks=pytest.mark.slow)])
async def test_who_was_there_ends_with_the_old_and_who_comes_has_the_new(tiny: Path, root: Path, way: str) -> None:
    words = {"max_model_len": 256, **WAYS[way]}
    async with serving(root / "new", **words) as server:
        new = await said(server)
    async with serving(tiny, serving={"weights_directory": str(root)}, **words) as server:
        old = await said(server)
        assert old != new
        alone = [await server.stream(number, 90) for number in range(3)]
        begun = [asyncio.Event() for _ in range(3)]
        streams = [asyncio.create_task(server.stream(i, 90, lambda part, i=i: begun[i].set())) for i in range(3)]
        await asyncio.gather(*(each.wait() for each in begun))
        change = asyncio.create_task(post(server, "/admin/weights", path="new"))
        engine = server.server.served.engine
        while not change.done() and engine._turn is None:
            await asyncio.sleep(0)
        assert not any(stream.done() for stream in streams)
        late = asyncio.create_task(said(server))
        gone = asyncio.create_task(server.stream(7, 90))
        await asyncio.sleep(0)
        gone.cancel()
        assert await asyncio.gather(*streams) == alone
        status, reply = await change
        assert status == 200 and reply["path"] == str(root / "new") and reply["fingerprint"]
        assert await late == new == await said(server)
        await server.settle()
        for name in ("short", "nan", "longer", "empty", "nothing"):
            status, wrong = await post(server, "/admin/weights", path=name)
            assert (status, wrong["error"]["param"]) == (400, "path"), wrong
            assert await said(server) == new, name
        assert "down_proj" in (await post(server, "/admin/weights", path="short"))[1]["error"]["message"]
        assert "rope" in (await post(server, "/admin/weights", path="longer"))[1]["error"]["message"]
        assert await server.server.load_weights(str(tiny)) and await said(server) == old
        await server.settle()


@pytest.fixture
async def server(tiny: Path, root: Path) -> AsyncIterator[Server]:
    async with serving(tiny, max_model_len=128, serving={"weights_directory": str(root)}) as made:
        yield made


async def test_who_may_not(tiny: Path, root: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("..", str(tiny), ".", ""):
        status, reply = await post(server, "/admin/weights", path=path)
        assert (status, reply["error"]["param"]) == (400, "path") and "weights_directory" in reply["error"]["message"]
    monkeypatch.setattr(server.server.served.opened.engine.runner, "swap", None)
    status, reply = await post(server, "/admin/weights", path="new")
    assert status == 400 and "this device's graphs hold the weights" in reply["error"]["message"]
    assert issubclass(Cpu, Reweighs) and not issubclass(Neuron, Reweighs)
    async with serving(tiny, max_model_len=128) as other:
        status, reply = await post(other, "/admin/weights", path="new")
        assert status == 400 and "serving.weights_directory" in reply["error"]["message"]
    made.write(root / "adapter", tiny, r=4, seed=1, size=0.2)
    lora = {"lora_modules": {"a": str(root / "adapter")}}
    async with serving(tiny, max_model_len=128, serving={"weights_directory": str(root)}, lora=lora) as other:
        status, reply = await post(other, "/admin/weights", path="new")
        assert status == 400 and "(lora)" in reply["error"]["message"]


async def test_a_second_change_is_told_to_come_again_and_one_that_nobody_waits_for_is_none(server: Server, root: Path) -> None:
    old, begun, gate = await said(server), asyncio.Event(), threading.Event()
    stream = asyncio.create_task(server.stream(1, 90, lambda part: begun.set()))
    await begun.wait()
    engine = server.server.served.engine
    held = engine.ask(lambda engine: gate.wait())  # between two steps
    while not held.running():
        await asyncio.sleep(0)
    changes = []
    for path in ("new", "new"):
        changes.append(asyncio.create_task(server.server.load_weights(str(root / path))))
        while len(engine._commands) < len(changes):
            await asyncio.sleep(0)
    changes[0].cancel()
    gate.set()
    with pytest.raises(NotReady, match="another change waits"):
        await changes[1]
    await stream
    assert await said(server) == old
    await server.settle()
