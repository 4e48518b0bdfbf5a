"""`/v1/embeddings` (OpenAI's), `/pooling`, `/score` and `/rerank` (vLLM's): vectors of texts, and how near they are to each other."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, cast

from rayneuron.api.body import cut, read_head, reply_id, truncate
from rayneuron.api.call import Answer, Call, Context, Head, Json
from rayneuron.api.fields import Fields
from rayneuron.api.openai.chat import render
from rayneuron.api.openai.completions import read_prompts
from rayneuron.api.stream import prompts
from rayneuron.api.vectors import Form, cosine
from rayneuron.errors import RayNeuronError, RequestError
from rayneuron.types import Delta, Request, SamplingParams

Reply = Callable[[Call, list[bytes]], Json]
PARAMS = SamplingParams(max_tokens=0, temperature=0.0)
PAIRS = "text_1 and text_2, or queries and documents: texts, or lists of texts of which the first has one or as many as the second"


def parse_embeddings(body: Mapping[str, Any], context: Context, **made: Any) -> Call:
    """A body of `input` or `messages` as a call."""
    return _parse(body, context, "embd", _embeddings, **made)


def parse_pooling(body: Mapping[str, Any], context: Context, **made: Any) -> Call:
    """The same, whose vectors keep their length where nothing else is said."""
    return _parse(body, context, "pool", _pooling, normalize=False, **made)


def _parse(body: Mapping[str, Any], context: Context, prefix: str, reply: Any, normalize: bool | None = None, **made: Any) -> Call:
    fields = Fields(body)
    head = _head(fields, context)
    encoded = fields.string("encoding_format", "float", among=("float", "base64")) == "base64"
    if fields.string("embed_dtype", "float32") != "float32":
        raise RequestError("embed_dtype must be float32; other numbers are not sent here", param="embed_dtype")
    default = context.pooling.normalize if normalize is None else normalize
    said = [fields.flag(name, default) for name in ("use_activation", "normalize") if name in fields]
    form = Form(fields.integer("dimensions", low=1), said[-1] if said else default)
    fields.string("user")
    if "messages" in fields:
        keep, side = truncate(fields, context, 0)
        texts = [cut(render(fields, context)[0], keep, side)]
    else:
        texts = [ids for _, ids in read_prompts(fields, context, 0, "input")]
    return _call(fields, head, context, texts, prefix, partial(reply, form, encoded), **made)


def parse_score(body: Mapping[str, Any], context: Context, **made: Any) -> Call:
    """Pairs of texts as a call: one against each, or one against one."""
    fields = Fields(body)
    head = _head(fields, context)
    names = next((pair for pair in (("text_1", "text_2"), ("queries", "documents")) if pair[0] in fields and pair[1] in fields), None)
    if names is None:
        raise RequestError(f"two kinds of texts are needed: {PAIRS}", param="text_1")
    first, second = (_texts(fields, name) for name in names)
    if len(first) not in (1, len(second)):
        raise RequestError(f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; send {PAIRS}", param=names[0])
    texts = _encoded(fields, context, first + second, names[1])
    return _call(fields, head, context, texts, "score", partial(_score, len(first)), **made)


def parse_rerank(body: Mapping[str, Any], context: Context, **made: Any) -> Call:
    """A query and documents as a call."""
    fields = Fields(body)
    head = _head(fields, context)
    query, documents = fields.string("query"), _texts(fields, "documents")
    if not query:
        raise RequestError("query is required: a text", param="query")
    top = fields.integer("top_n", len(documents), low=0) or len(documents)
    shown = documents if fields.flag("return_documents", True) else None
    texts = _encoded(fields, context, [query, *documents], "documents")
    return _call(fields, head, context, texts, "rerank", partial(_rerank, shown, top), **made)


def _head(fields: Fields, context: Context) -> Head:
    head = read_head(fields, context)
    if head.stream:
        raise RequestError("vectors come whole; leave stream out", param="stream")
    return head


def _texts(fields: Fields, name: str) -> list[str]:
    """Texts, each as it is or as Cohere and Jina write a document: {"text": ...}."""
    given = fields.take(name)
    texts: Any = [given] if isinstance(given, str) else given
    if isinstance(texts, list):
        texts = [text["text"] if isinstance(text, dict) and text.keys() == {"text"} else text for text in texts]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} must be a text or a list of texts, none of them empty", param=name)
    return cast("list[str]", texts)


def _encoded(fields: Fields, context: Context, texts: list[str], name: str) -> list[list[int]]:
    keep = fields.take("truncate_prompt_tokens")
    words = {"input": texts, "truncate_prompt_tokens": keep}
    try:
        return [ids for _, ids in read_prompts(Fields(words), context, 0, "input")]
    except RequestError as wrong:
        raise RequestError(wrong.message.replace("input", name, 1), param=name if wrong.param == "input" else wrong.param) from None


def _call(
    fields: Fields, head: Head, context: Context, texts: Sequence[list[int]], prefix: str, reply: Reply, *, request_id: str, created: int,
    client_id: str | None = None,
) -> Call:  # fmt: skip
    kind = cast(Literal["last", "mean"], context.pooling.kind)  # the engine refuses another
    for ids in texts:
        if len(ids) > context.max_model_len:
            said = f"the input has {len(ids)} tokens, but this model takes at most {context.max_model_len}; send truncate_prompt_tokens: -1"
            raise RequestError(said, param="input")
    common: dict[str, Any] = {"priority": head.priority, "cache_salt": head.cache_salt, "adapter": head.adapter}
    requests = [
        Request(id=f"{request_id}-{i}", prompt_ids=ids, params=PARAMS, pooling=kind, **common)
        for i, ids in enumerate(texts)
    ]
    return Call(
        id=reply_id(prefix, head, client_id, request_id),
        created=created,
        head=head,
        n=1,
        choices=len(requests),
        requests=requests,
        text=context.text,
        answer=Answer(partial(_reply, reply), _never),
        unknown=fields.unknown,
    )


def _never(call: Call) -> NoReturn:
    raise RequestError("vectors come whole; leave stream out", param="stream")


def _reply(write: Reply, call: Call, deltas: Iterable[Delta]) -> Json:
    places, found = prompts(call), [b""] * len(call.requests)
    for delta in deltas:
        if delta.error is not None:
            raise RayNeuronError(delta.error)
        if delta.finish_reason == "error":
            raise RayNeuronError(str(delta.stop_reason))
        found[places[delta.request_id]] = delta.pooled
    tokens = sum(len(request.prompt_ids) for request in call.requests)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    return {"id": call.id, "object": "list", "created": call.created, "model": call.head.model, **write(call, found), "usage": usage}


def _embeddings(form: Form, encoded: bool, call: Call, found: list[bytes]) -> Json:
    made = [form.of(pooled) for pooled in found]
    return {"data": [{"index": i, "object": "embedding", "embedding": _written(vector, encoded)} for i, vector in enumerate(made)]}


def _pooling(form: Form, encoded: bool, call: Call, found: list[bytes]) -> Json:
    return {"data": [{"index": i, "object": "pooling", "data": _written(form.of(pooled), encoded)} for i, pooled in enumerate(found)]}


def _written(vector: array[float], encoded: bool) -> list[float] | str:
    if not encoded:
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()


def _score(queries: int, call: Call, found: list[bytes]) -> Json:
    first, second = found[:queries], found[queries:]
    near = [cosine(first[i if queries > 1 else 0], other) for i, other in enumerate(second)]
    return {"data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(near)]}


def _rerank(documents: list[str] | None, top: int, call: Call, found: list[bytes]) -> Json:
    near = sorted(((cosine(found[0], other), -i) for i, other in enumerate(found[1:])), reverse=True)[:top]
    return {"results": [
        {"index": -i, **({} if documents is None else {"document": {"text": documents[-i]}}), "relevance_score": score} for score, i in near
    ]}  # fmt: skip
