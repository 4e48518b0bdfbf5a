"""Which dialect each route speaks: the one row a dialect needs beside its folder."""

from __future__ import annotations

import re
from typing import Final

from rayneuron.api import anthropic, neuron_server, openai, responses, sagemaker, tgi
from rayneuron.api.call import Dialect, Json
from rayneuron.api.errors import Triple, encode, same
from rayneuron.api.stream import DONE, event, named_event


def _generate(body: Json) -> Dialect:
    """`/generate` has two owners, told apart by key."""
    return tgi.GENERATE if body.get("inputs") is not None else neuron_server.GENERATE


# What generates, by POST.
SPOKEN: Final[dict[str, Dialect]] = {
    "/v1/chat/completions": openai.CHAT,
    "/v1/completions": openai.COMPLETIONS,
    "/v1/embeddings": openai.EMBEDDINGS,
    "/v1/responses": responses.CREATE,
    "/v1/messages": anthropic.MESSAGES,
    "/pooling": openai.POOLING,
    **dict.fromkeys(("/score", "/v1/score"), openai.SCORE),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), openai.RERANK),
    "/generate": neuron_server.GENERATE._replace(choose=_generate),
    "/": tgi.ROOT,
    "/generate_stream": tgi.STREAM,
    "/invocations": sagemaker.INVOCATIONS,
    "/predictions/{model:name}": sagemaker.INVOCATIONS,
    "/models/{model:name}/invoke": sagemaker.INVOCATIONS,
}
ADAPTERS: Final = ("/adapters", "/adapters/{adapter:name}", "/adapters/{adapter:name}/update")  # of LMI and SageMaker
# Errors of what does not generate, where they are not OpenAI's.
_BESIDE = {
    "/v1/messages/{any:name}": anthropic.error,
    "/info": tgi.error,
    "/chat_tokenize": tgi.error,
    "/models": sagemaker.error,
    "/models/{model:name}": sagemaker.error,
    **{prefix + path: sagemaker.error for prefix in ("", "/models/{model:name}") for path in ADAPTERS},
}
_SHAPES = [
    (re.compile(("" if path.startswith("/v1/") else "(?<!/v1)") + re.sub(r"\{\w+:name\}", ".+", path) + "$"), shape)
    for path, shape in (*((path, dialect.error) for path, dialect in SPOKEN.items() if path != "/"), *_BESIDE.items())
]


def shaped(triple: Triple, path: str, method: str = "POST") -> Triple:
    """An OpenAI error as whoever calls `path` reads it, whatever prefix the path has."""
    root = tgi.error if method == "POST" and path.endswith("/") else same
    return next((shape for pattern, shape in _SHAPES if pattern.search(path.rstrip("/"))), root)(triple)


def cut_off(triple: Triple, path: str, content_type: str) -> bytes:
    """How a stream ends whose replica has died, for whoever reads that of `path`."""
    body = shaped(triple, path)[1]
    if content_type.startswith("application/jsonlines"):
        return encode(body) + b"\n"
    if path.endswith("/v1/messages"):
        return named_event("error", body)
    if path.endswith("/v1/responses"):
        said = {"type": "error", "code": "server_error", "message": body["error"]["message"], "param": None, "sequence_number": 0}
        return named_event("error", said)
    return event(body) + (b"" if "error_type" in body else DONE)
