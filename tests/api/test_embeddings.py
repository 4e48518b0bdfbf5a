"""Vectors over HTTP, through the real engine: OpenAI's forms against transformers' hidden states, scores and ranks against arithmetic."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.serve.real import Server, serving


@pytest.fixture
async def server(tiny: Path) -> AsyncIterator[Server]:
    async with serving(tiny, max_model_len=128, dtype="fp32") as served:
        yield served


async def ask(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    status, reply = await server.post(path, json.dumps(body).encode())
    return status, json.loads(reply)


def wanted(tiny: Path, *texts: str) -> np.ndarray[Any, Any]:
    """Of each text the last hidden state with length 1, [n,E]."""
    model, tokenizer = AutoModel.from_pretrained(tiny, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)
    with torch.inference_mode():
        states = [model(tokenizer(text, return_tensors="pt").input_ids).last_hidden_state[0, -1] for text in texts]
    return torch.stack([state / state.norm() for state in states]).numpy()


async def test_openais_forms(server: Server, tiny: Path) -> None:
    texts = ["hello there", "x", "a longer text of some words"]
    status, reply = await ask(server, "/v1/embeddings", model="tiny", input=texts)
    vectors = np.array([entry["embedding"] for entry in reply["data"]], np.float32)
    assert status == 200 and reply["object"] == "list" and reply["model"] == "tiny"
    assert [(entry["index"], entry["object"]) for entry in reply["data"]] == [(i, "embedding") for i in range(3)]
    np.testing.assert_allclose(vectors, wanted(tiny, *texts), atol=1e-5)
    ids = (await ask(server, "/tokenize", prompt=texts[0]))[1]["tokens"]
    tokens = sum([(await ask(server, "/tokenize", prompt=text))[1]["count"] for text in texts])
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == tokens
    for form in (texts[0], ids, [ids]):
        (entry,) = (await ask(server, "/v1/embeddings", input=form, encoding_format="base64"))[1]["data"]
        assert np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") == pytest.approx(vectors[0], abs=1e-6)
    (cut,) = (await ask(server, "/v1/embeddings", input=texts[0], dimensions=8))[1]["data"]
    assert cut["embedding"] == pytest.approx(vectors[0][:8] / np.linalg.norm(vectors[0][:8]), abs=1e-6)
    (plain,) = (await ask(server, "/pooling", input=texts[0]))[1]["data"]
    assert np.array(plain["data"]) / np.linalg.norm(plain["data"]) == pytest.approx(vectors[0], abs=1e-6)
    assert np.linalg.norm(plain["data"]) != pytest.approx(1, abs=1e-3)
    chat = [{"role": "user", "content": "hello there"}]
    assert (await ask(server, "/v1/embeddings", messages=chat))[0] == 200
    await server.settle()


async def test_scores_and_ranks(server: Server, tiny: Path) -> None:
    texts = ["what is red", "a rose", "the sea", "what is red"]
    near = wanted(tiny, *texts) @ wanted(tiny, texts[0])[0]
    for words in ({"text_1": texts[0], "text_2": texts[1:]}, {"queries": [texts[0]], "documents": texts[1:]}):
        status, reply = await ask(server, "/v1/score", **words)
        assert status == 200 and [entry["score"] for entry in reply["data"]] == pytest.approx(near[1:], abs=1e-5)
    pairs = (await ask(server, "/score", text_1=texts[:2], text_2=[texts[0], texts[1]]))[1]["data"]
    assert [entry["score"] for entry in pairs] == pytest.approx([1, 1], abs=1e-6)
    status, reply = await ask(server, "/rerank", query=texts[0], documents=[texts[1], *({"text": text} for text in texts[2:])], top_n=2)
    order = np.argsort(-near[1:], kind="stable")[:2]
    assert [entry["index"] for entry in reply["results"]] == order.tolist() and reply["results"][0]["document"] == {"text": texts[0]}
    assert [entry["relevance_score"] for entry in reply["results"]] == pytest.approx(near[1:][order], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/embeddings", {}, "input", "input is required"),
        ("/v1/embeddings", {"input": ""}, "input", "input is empty"),
        ("/v1/embeddings", {"input": ["a", [1]]}, "input", "input must be a string"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ("/v1/embeddings", {"input": "a", "dimensions": 4096}, "dimensions", "dimensions must be at most"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream", "vectors come whole"),
        ("/v1/embeddings", {"input": "word " * 400}, "input", "at most 128; send truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "model": "another"}, "model", "does not exist"),
        ("/v1/score", {"text_1": "a"}, "text_1", "two kinds of texts are needed"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "text_1 has 2 texts and text_2 3"),
        ("/rerank", {"documents": ["a"]}, "query", "query is required"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents must be a text or a list of texts"),
        ("/rerank", {"query": "a", "documents": ["a", 3]}, "documents", "documents must be a text or a list of texts"),
        ("/rerank", {"query": "a", "documents": [{"text": "a", "title": "b"}]}, "documents", "documents must be a text or a list of texts"),
        ("/rerank", {"query": "a", "documents": [{"text": 3}]}, "documents", "documents must be a text or a list of texts"),
    ],
)
async def test_what_is_wrong_is_named(server: Server, path: str, body: dict[str, Any], param: str, says: str) -> None:
    status, reply = await ask(server, path, **body)
    assert status == (404 if param == "model" else 400) and reply["error"]["param"] == param and says in reply["error"]["message"], reply
    await server.settle()
