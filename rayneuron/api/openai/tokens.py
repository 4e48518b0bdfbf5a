"""Models and tokens as JSON: /v1/models, /tokenize, /detokenize, /tokenizer_info, /version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayneuron.api.body import read_head
from rayneuron.api.call import Context, Json
from rayneuron.api.fields import Fields, token_ids
from rayneuron.api.openai.chat import render
from rayneuron.errors import RequestError, UnknownModel


def model_card(name: str, max_model_len: int, created: int, root: str | None = None, parent: str | None = None) -> Json:
    """One entry of /v1/models. `root`: where the weights came from; `parent`: the base model of an adapter."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "rayneuron",
        "root": root or name,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


def models_list(cards: Iterable[Json]) -> Json:
    """/v1/models."""
    return {"object": "list", "data": list(cards)}


def find_model(name: str, cards: Iterable[Json]) -> Json:
    """/v1/models/{name}; UnknownModel (404) where it is not served."""
    there = {card["id"]: card for card in cards}
    if name not in there:
        raise UnknownModel.named(name, there)
    return there[name]


def tokenize(body: Mapping[str, Any], context: Context) -> Json:
    """/tokenize: the ids of `prompt`, or of `messages` through the chat template. Texts far beyond what the model takes are refused."""
    fields = Fields(body)
    read_head(fields, context)
    strings = fields.flag("return_token_strs")
    if "messages" in fields:
        ids, _ = render(fields, context)
    else:
        prompt = fields.string("prompt")
        if prompt is None:
            raise RequestError("prompt or messages is required", param="prompt")
        ids = context.text.encode(prompt, fields.flag("add_special_tokens", True), context.max_model_len)
    reply: Json = {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids}
    if strings:
        reply["token_strs"] = [context.text.token(token_id) for token_id in ids]
    return reply


def detokenize(body: Mapping[str, Any], context: Context) -> Json:
    """/detokenize: the text of `tokens`, special tokens included."""
    fields = Fields(body)
    read_head(fields, context)
    if context.text.wordless:
        raise RequestError("this server has no tokenizer (model.skip_tokenizer_init)", param="tokens")
    tokens = fields.take("tokens")
    if tokens is None:
        raise RequestError("tokens is required: an array of token ids", param="tokens")
    ids: Sequence[int] = token_ids("tokens", tokens, context.vocab_size, context.most_ids)
    return {"prompt": context.text.decode(ids, skip_special_tokens=False)}


def tokenizer_info(context: Context) -> Json:
    """/tokenizer_info: the content of tokenizer_config.json, its named tokens as plain strings."""
    return dict(context.text.config)


def version(number: str) -> Json:
    """/version."""
    return {"version": number}
