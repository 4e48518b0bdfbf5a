"""Every dialect through a gateway, beside a replica alone: the same replies, streams and errors, at / and under /m/<name>/."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron import loading
from rayneuron.api.routes import SPOKEN
from rayneuron.gateway.routes import application
from rayneuron.serve.ingress import application as alone
from tests.gateway.fleet import House, house, scripted
from tests.gateway.test_remote import client, single
from tests.serve.real import serving
from tests.serve.test_dialects import ASK

__all__ = ["single"]

TOLD = ("text", "content", "delta", "generated_text", "output_text", "arguments")  # what a stream tells in pieces, however it is cut
OWN = re.compile(r"^(x-request-id|id|item_id|request_id|created|created_at|completed_at|sequence_number)$|_time$|^time_|^rayneuron$")
VECTORS: dict[str, dict[str, Any]] = {  # routes without text, of which the scripted model has none to give
    "/v1/embeddings": {"input": [[5, 6, 7, 8], [9]], "encoding_format": "base64"},
    "/pooling": {"input": "hello there"},
    "/score": {"text_1": "hello", "text_2": ["hello there", "x"]},
    "/rerank": {"query": "hello", "documents": ["a", "hello you", "c"], "top_n": 2},
}
ASIDE = ("/info", "/models", "/models/scripted", "/v1/models/scripted", "/tokenizer_info", "/version")
READ: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hello there"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/chat_tokenize": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses/input_tokens": {"input": "hello"},
}
WRONG: dict[str, bytes] = {
    "no JSON": b"{nope", "no object": b"[]", "empty": b"{}", "field": b'{"prompt": 5, "inputs": 5, "messages": 5, "input": 5}',
    "deep": b"[" * 3000, "number": b'{"inputs": "a", "prompt": "a", "parameters": {"temperature": 99}, "temperature": 99, "max_tokens": 3}',
}  # fmt: skip


@pytest.fixture
async def two(tiny: Path) -> AsyncIterator[House]:
    async with house({"scripted": scripted(tiny)}) as made:
        yield made


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every value in a document with where it stands, without what differs from call to call."""
    if isinstance(value, dict):
        return [leaf for key, each in value.items() if not OWN.search(key) for leaf in leaves(each, f"{path}.{key}")]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each, f"{path}[]")]
    return [(path, value)]


def folded(body: bytes, stream: bool = False) -> dict[str, Any]:
    """A reply or a stream, however it was cut: its words put together, and of all else what it came to be, in order."""
    out: dict[str, Any] = {}
    for line in body.decode().splitlines():
        said = line.removeprefix("data:").strip()
        if said[:1] not in ("{", "["):
            out.setdefault("lines", []).extend([line] if line and line not in out.get("lines", ()) else [])
            continue
        try:
            document = json.loads(said)
        except ValueError:
            document = said  # "[DONE]"
        for path, value in leaves(document):
            if isinstance(value, str) and path.rpartition(".")[2] in TOLD:
                out[path + " told"] = out.get(path + " told", "") + value
            elif (value is not None or not stream) and value not in (seen := out.setdefault(path, [])):
                seen.append(value)
    return out


async def both(made: House, single: Any, path: str, name: str = "scripted", **asked: Any) -> list[httpx.Response]:
    """What the gateway says at / and below the model's name, and what a replica alone says."""
    method = "POST" if asked else "GET"
    async with client(application(made.catalogue)) as through, client(alone(single)) as direct:
        named = f"/m/{name}{path}"
        return [
            await through.request(method, path, **asked),
            await through.request(method, named, **asked),
            await direct.request(method, path, **asked),
        ]


def streaming(path: str) -> dict[str, Any]:
    """A body of a route, as it asks for a stream."""
    return ASK[path] if path == "/generate_stream" else ASK[path] | {"stream": True}


def test_every_route_that_generates_is_asked_here() -> None:
    asked = {re.sub("scripted", "{model}", path) for path in ASK}
    spoken = {re.sub(r"{\w+:name}", "{model}", path) for path in SPOKEN if not path.endswith(tuple(VECTORS))}
    assert spoken <= asked, "a dialect's route has no body in ASK"


@pytest.mark.parametrize("path", ASK)
async def test_a_reply_a_stream_and_errors_are_those_of_a_replica(two: House, single: Any, path: str) -> None:
    for body, stream in ((ASK[path], False), (streaming(path), True)):
        said = await both(two, single, path, json=body)
        assert {reply.status_code for reply in said} == {200}, [reply.text for reply in said]
        assert said[0].headers["content-type"] == said[1].headers["content-type"] == said[2].headers["content-type"]
        assert folded(said[0].content, stream) == folded(said[1].content, stream) == folded(said[2].content, stream)
    for kind, wrong in WRONG.items():
        said = await both(two, single, path, content=wrong, headers={"content-type": "application/json"})
        assert said[0].status_code == said[1].status_code == said[2].status_code >= 400, (kind, [reply.text for reply in said])
        assert said[0].content == said[1].content == said[2].content, kind
    await two.settle()


async def test_what_is_read_beside_is_that_of_a_replica(two: House, single: Any) -> None:
    for path in (*ASIDE, *READ):
        said = await both(two, single, path, **({"json": READ[path]} if path in READ else {}))
        assert said[1].status_code == said[2].status_code == 200, said[1].text
        assert folded(said[1].content) == folded(said[2].content)
        if path not in ("/models", "/models/scripted"):  # at / they are all models', by every name
            assert folded(said[0].content) == folded(said[2].content)


async def test_vectors_are_those_of_a_replica_and_survive_one(tiny: Path) -> None:
    args = {"model": {"path": str(tiny), "name": "tiny"}, "max_model_len": 64, "max_num_seqs": 4, "threads": 1, "dtype": "fp32"}
    async with house({"tiny": [(args, loading.open_engine)] * 2}) as made, serving(tiny, **args) as alone:
        for path, body in VECTORS.items():
            said = await both(made, alone.server, path, "tiny", json=body)
            assert [reply.status_code for reply in said] == [200] * 3, said[0].text
            assert folded(said[0].content) == folded(said[1].content) == folded(said[2].content)
            said = await both(made, alone.server, path, "tiny", json=body | {"stream": True})
            assert [reply.status_code for reply in said] == [400] * 3 and said[0].json()["error"]["param"] == "stream"
            long = {name: ["a " * 200] if isinstance(value, list) else "a " * 200 for name, value in body.items() if name != "top_n"}
            said = await both(made, alone.server, path, "tiny", json=long | {"encoding_format": "float"})
            assert [reply.status_code for reply in said] == [400] * 3 and said[0].json() == said[2].json()
        async with client(application(made.catalogue)) as through:
            many = {"input": [f"text number {i} of some more" for i in range(24)]}
            want = (await through.post("/v1/embeddings", json=many)).json()["data"]
            call = asyncio.ensure_future(through.post("/v1/embeddings", json=many))
            await made.until(lambda: made.engine.books.placed)
            made.members[0].die()
            assert (await call).json()["data"] == want
