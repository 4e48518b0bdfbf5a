"""Adapters as clients see them: chosen by name in every dialect, loaded and unloaded while others stream, refused with the reason."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rayneuron import metrics
from tests.models import adapters as made
from tests.serve.real import Server, serving

IDS = list(range(20, 50))


@pytest.fixture(scope="module")
def root(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(("a", "b", "c", "wide")):
        made.write(root / name, tiny, r=20 if name == "wide" else 4, seed=i, size=0.2)
    return root


def words(root: Path, *names: str, **more: Any) -> dict[str, Any]:
    modules = {name: str(root / name) for name in names}
    lora = {"lora_modules": modules, "max_loras": 2, "directory": str(root), "allow_runtime_updating": True}
    return {"max_model_len": 256, "dtype": "fp32", "lora": lora | more}


async def post(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    status, reply = await server.post(path, json.dumps(body).encode())
    return status, json.loads(reply) if reply.startswith((b"{", b"[")) else reply


async def tokens(server: Server, model: str | None = None, **more: Any) -> list[int]:
    named = {} if model is None else {"model": model}
    body = {"prompt": IDS, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **named, **more}
    status, reply = await post(server, "/v1/completions", **body)
    assert status == 200, reply
    assert model is None or reply["model"] == model
    return reply["choices"][0]["token_ids"]


async def change(server: Server, name: str, path: str | None = None, **more: Any) -> tuple[int, Any]:
    verb = "unload" if path is None else "load"
    return await post(server, f"/v1/{verb}_lora_adapter", lora_name=name, **({} if path is None else {"lora_path": path}), **more)


def lora(server: Server) -> tuple[dict[tuple[str, ...], float], list[tuple[str, ...]]]:
    """What /metrics says: slots by state, and the labels of who runs and waits."""
    server.server.telemetry.refresh()
    series = server.server.telemetry.series
    return dict(series[metrics.LORA_SLOTS].values), list(series[metrics.LORA_REQUESTS].values)


async def test_every_dialect_names_adapters(tiny: Path, root: Path) -> None:
    async with serving(tiny, **words(root, "a", "b")) as server:
        base, a, b = await tokens(server), await tokens(server, "a"), await tokens(server, "b")
        assert len({tuple(t) for t in (base, a, b)}) == 3
        assert await tokens(server, adapters="a") == await tokens(server, adapters=["a"]) == await tokens(server, adapter_id="a") == a
        text = {"inputs": "some words", "parameters": {"max_new_tokens": 5, "do_sample": False}}
        plain = {name: (await post(server, path, **text))[1] for name, path in (("tgi", "/generate"), ("lmi", "/invocations"))}
        assert (await post(server, "/invocations", **text, adapters="a"))[1] != plain["lmi"]
        with_b = {**text, "parameters": {**text["parameters"], "adapter_id": "b"}}
        assert (await post(server, "/generate", **with_b))[1] != plain["tgi"]
        said = {"max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}
        chats = [await post(server, "/v1/chat/completions", model=m, **said) for m in ("a", "b")]
        assert [status for status, _ in chats] == [200, 200] and chats[0][1]["choices"] != chats[1][1]["choices"]
        vectors = [(await post(server, "/v1/embeddings", model=m, input="hello"))[1]["data"] for m in ("a", "b", "a")]
        assert vectors[0] == vectors[2] != vectors[1]
        cards = server.server.now.cards()
        assert [(card["id"], card["parent"]) for card in cards[-2:]] == [("a", cards[0]["id"]), ("b", cards[0]["id"])]
        for wrong, status, param in (
            ({"model": "x"}, 404, "model"), ({"adapters": "x"}, 404, "adapters"), ({"adapters": ["a", "b"]}, 400, "adapters"),
            ({"model": "a", "adapters": "b"}, 400, "adapters"), ({"adapter_id": 3}, 400, "adapter_id"),
            ({"lora_path": "/x"}, 400, "lora_path"),
        ):  # fmt: skip
            found, reply = await post(server, "/v1/completions", prompt="a", **wrong)
            assert (found, reply["error"]["param"]) == (status, param), reply
        server.server.served.engine.engine.check_ledger()


async def test_adapters_come_and_go(tiny: Path, root: Path) -> None:
    async with serving(tiny, **words(root)) as server:
        base = await tokens(server)
        assert (await change(server, "x", str(root / "a")))[0] == 200
        a = await tokens(server, "x")
        status, reply = await change(server, "x", "b")
        assert status == 400 and "load_inplace" in reply["error"]["message"]
        assert await change(server, "x", "b", load_inplace=True) == (200, b"Success: LoRA adapter 'x' added successfully.")
        b = await tokens(server, "x")
        assert (await change(server, "other", "b"))[0] == 200  # the same under another name: it is kept once
        assert len({tuple(t) for t in (base, a, b)}) == 3 and await tokens(server, "other") == b
        assert len(server.server.served.engine.engine.runner.shelf.kept) == 1
        assert await change(server, "x") == (200, b"Success: LoRA adapter 'x' removed successfully.")
        assert await tokens(server, "other") == b
        for name in ("x", "never"):
            assert (await change(server, name))[0] == 404
            assert (await post(server, "/v1/completions", model=name, prompt="a"))[0] == 404
        assert (await change(server, "other"))[0] == 200
        assert server.server.served.engine.engine.runner.shelf.kept == frozenset() and await tokens(server) == base


async def test_who_streams_ends_with_what_it_began_with(tiny: Path, root: Path) -> None:
    """Unloaded, and replaced, in the middle of streams; nothing is kept afterwards."""
    async with serving(tiny, **words(root, "a", "b") | {"max_model_len": 1024}) as server:
        wanted = [await tokens(server, name, max_tokens=400) for name in ("a", "b")]
        replaced = await tokens(server, "b")
        begun = asyncio.Event()
        body = {"prompt": IDS, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}

        async def stream(model: str) -> list[int]:
            status, reply = await server.post("/v1/completions", json.dumps(body | {"model": model}).encode(), lambda part: begun.set())
            assert status == 200 and b'"error"' not in reply
            events = [json.loads(line[6:]) for line in reply.split(b"\n") if line.startswith(b"data: {")]
            return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]

        streams = [asyncio.create_task(stream(name)) for name in ("a", "b")]
        await begun.wait()
        slots, (asked,) = lora(server)
        assert asked[0] == str(sum(slots.values())) and {*",".join(asked[1:]).split(",")} - {""} <= {"a", "b"} and slots["used",] > 0
        assert (await change(server, "a"))[0] == 200
        assert (await change(server, "b", "c", load_inplace=True))[0] == 200
        assert not any(task.done() for task in streams)
        assert await tokens(server, "b") != replaced  # once a slot is free
        assert [await task for task in streams] == wanted
        await server.settle()
        slots, asked = lora(server)
        assert slots["used",] == 0 and [labels[1:] for labels in asked] == [("", "")]
        assert len(server.server.served.engine.engine.runner.shelf.kept) == 1
        server.server.served.engine.engine.check_ledger()


async def test_what_may_not_be_loaded(tiny: Path, root: Path, tmp_path: Path) -> None:
    """Each with its reason, and the engine goes on."""
    made.write(tmp_path / "outside", tiny)
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "inside").mkdir()
    (root / "inside" / "adapter_config.json").symlink_to(tmp_path / "outside" / "adapter_config.json")
    async with serving(tiny, **words(root, "a")) as server:
        base = server.server.now.cards()[0]["id"]
        rows = (
            ("x", str(tmp_path / "outside"), "lora.directory"), ("x", "../outside", "lora.directory"), ("x", "link", "lora.directory"),
            ("x", "inside", "lora.directory"), ("x", ".", "lora.directory"), ("x", "a/../../etc", "lora.directory"),
            ("x", "nowhere", "is no directory here"),
            ("x", "wide", "rank 20"), (base, "a", "model's own name"), ("", "a", "lora_name"), ("x\n", "a", "lora_name"),
            ("x", "a\0", "lora_path"),
        )  # fmt: skip
        for name, path, why in rows:
            status, reply = await change(server, name, path)
            assert status == 400 and why in reply["error"]["message"], (path, reply)
        assert (await post(server, "/v1/load_lora_adapter", lora_name="x"))[0] == 400
        assert await tokens(server, "a") == await tokens(server, "a")
    async with serving(tiny, **words(root, "a", allow_runtime_updating=False)) as server:
        status, reply = await change(server, "x", "b")
        assert status == 400 and "allow_runtime_updating" in reply["error"]["message"]
        assert (await change(server, "a"))[0] == 400 and len(await tokens(server, "a")) == 6
    async with serving(tiny, max_model_len=256) as server:
        assert (await change(server, "x", "b"))[0] == 400
        status, reply = await post(server, "/v1/completions", prompt="a", adapters="a")
        assert status == 400 and "no adapters" in reply["error"]["message"]


async def test_where_there_is_no_room(tiny: Path, root: Path) -> None:
    async with serving(tiny, **words(root, "a", "b", max_cpu_loras=2)) as server:
        status, reply = await change(server, "c", "c")
        assert status == 503 and "max_cpu_loras" in reply["error"]["message"]
        assert server.said["retry-after"] == "5"
        assert len(server.server.served.engine.engine.runner.shelf.kept) == 2
        assert (await change(server, "a"))[0] == 200 and (await change(server, "c", "c"))[0] == 200
        assert len(await tokens(server, "c")) == 6


async def test_lmi_registers_adapters(tiny: Path, root: Path) -> None:
    """By LMI's routes, with and without the model, and SageMaker's; no room is a 507 there, one that is there a 409."""
    async with serving(tiny, **words(root, "a", max_cpu_loras=3)) as server:
        name = server.server.now.cards()[0]["id"]
        wanted = await tokens(server, "a")
        paths = ("/adapters", f"/models/{name}/adapters", "/adapters/a", "/adapters/b", "/models/x/adapters")
        told = [await server.post(path, b"", method="GET") for path in paths]
        assert [status for status, _ in told] == [200, 200, 200, 404, 404]
        assert [json.loads(reply) for _, reply in told[:3]] == [{"adapters": [{"name": "a"}]}] * 2 + [{"name": "a"}]
        assert json.loads(told[3][1])["code"] == 404
        assert await post(server, f"/models/{name}/adapters?name=b&src=b&pin=true") == (200, {"status": "Adapter b registered"})
        assert (await post(server, "/adapters", name="c", src="c"))[0] == 200
        assert len({tuple(await tokens(server, each)) for each in "abc"}) == 3
        status, reply = await post(server, "/adapters", name="c", src="c")
        assert (status, reply["type"]) == (409, "ConflictStatusException")
        made.write(root / "d", tiny, r=4, seed=9, size=0.2)
        status, reply = await post(server, "/adapters", name="d", src="d")
        assert (status, reply["code"]) == (507, 507) and "max_cpu_loras" in reply["message"]
        status, reply = await post(server, "/v1/load_lora_adapter", lora_name="d", lora_path="d")
        assert status == 503 and "max_cpu_loras" in reply["error"]["message"]
        status, reply = await post(server, "/adapters", name="d", src="../outside")
        assert status == 400 and reply["message"].startswith("src ")
        assert (await server.post(f"/models/{name}/adapters/b", b"", method="DELETE"))[0] == 200
        assert (await server.post("/adapters/b", b"", method="DELETE"))[0] == 404
        assert (await post(server, "/adapters/c/update?src=a"))[0] == 200
        assert await tokens(server, "c") == wanted
