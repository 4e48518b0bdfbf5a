"""`/v1/chat/completions`: messages through the chat template, and the chat.completion object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rayneuron.api.call import Answer, Call, Context, Json
from rayneuron.api.choices import Choice, chat_logprobs, gather, prompt_table
from rayneuron.api.conversation import render
from rayneuron.api.fields import Fields, read_head, refuse_formats, reply_id, wrong
from rayneuron.api.sampling import cut, fit, read_logprobs, read_sampling, truncate
from rayneuron.api.stream import ChoiceState, ChunkFormat, Events
from rayneuron.api.unserved import CHAT, refuse_unserved
from rayneuron.errors import RequestError
from rayneuron.types import Delta, Request, SamplingParams, TokenLogprobs


def parse(body: Mapping[str, Any], context: Context, *, request_id: str, created: int, client_id: str | None = None) -> Call:
    """A chat body as a call; RequestError names the wrong field."""
    fields = Fields(body)
    head = read_head(fields, context)
    refuse_unserved(fields, CHAT)
    refuse_formats(fields)
    fields.refuse("use_beam_search")
    fields.refuse("thinking_token_budget")
    fields.string("user")
    fields.flag("include_reasoning", True)
    modalities = fields.take("modalities", ["text"])
    if modalities != ["text"]:
        wrong("modalities", '["text"]; this model writes text only', modalities)
    words = read_sampling(fields, context)
    shown = words.get("prompt_logprobs")
    if shown is not None and head.stream:
        raise RequestError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
    logprobs = _read_logprobs(fields)
    if logprobs is not None:
        words["logprobs"] = logprobs
    asked, name = _max_tokens(fields)
    keep, side = truncate(fields, context, asked or 1)
    ids, role = render(fields, context, keep, side)
    ids = cut(ids, keep, side)
    tokens = fit(words, len(ids), asked, context.defaults.get("max_tokens"), context.max_model_len, name)
    params = SamplingParams(**words, max_tokens=tokens)
    return Call(
        id=reply_id("chatcmpl", head, client_id, request_id),
        created=created,
        head=head,
        requests=[Request(id=f"{request_id}-0", prompt_ids=ids, params=params, priority=head.priority, cache_salt=head.cache_salt)],
        text=context.text,
        answer=ANSWER,
        logprobs=logprobs,
        prompt_logprobs=shown,
        role=role,
        unknown=fields.unknown,
    )


def _read_logprobs(fields: Fields) -> int | None:
    """Alternatives a token: logprobs switches them on, top_logprobs counts them."""
    on, top = fields.flag("logprobs"), read_logprobs(fields, "top_logprobs")
    if top and not on:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if on else None


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    """The length asked for, and the field that asked; the newer name wins."""
    old, new = fields.integer("max_tokens", low=1), fields.integer("max_completion_tokens", low=1)
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _reply(call: Call, deltas: Iterable[Delta]) -> Json:
    gathered = gather(call, deltas)
    reply: Json = {
        "id": call.id,
        "object": "chat.completion",
        "created": call.created,
        "model": call.head.model,
        "choices": [_finished(call, choice) for choice in gathered.choices],
        "usage": gathered.usage,
        "system_fingerprint": None,
    }
    if call.prompt_logprobs is not None:
        prompt = gathered.prompt_logprobs.get(0)
        reply["prompt_logprobs"] = None if prompt is None else prompt_table(call, prompt)
    if call.head.return_token_ids:
        reply["prompt_token_ids"] = call.requests[0].prompt_ids
    return reply


def _finished(call: Call, choice: Choice) -> Json:
    written: Json = {
        "index": choice.index,
        "message": {"role": call.role, "content": choice.text, "refusal": None},
        "logprobs": None if call.logprobs is None else chat_logprobs(call, choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if call.head.return_token_ids:
        written["token_ids"] = choice.token_ids
    return written


def _chunk(call: Call, progress: ChoiceState, delta: Delta, echoed: list[TokenLogprobs | None] | None) -> Json:
    written: Json = {
        "index": progress.index,
        "delta": {"content": delta.text} if delta.text else {},
        "logprobs": None if call.logprobs is None else chat_logprobs(call, delta.logprobs or ()),
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason is not None:
        written["stop_reason"] = delta.stop_reason
    if call.head.return_token_ids:
        written["token_ids"] = delta.token_ids
    return written


def _roles(call: Call) -> list[Json]:
    """The chunk each choice begins with."""
    opening = {"role": call.role, "content": ""}
    return [{"index": index, "delta": opening, "logprobs": None, "finish_reason": None} for index in range(call.choices)]


def _wrap(call: Call, choices: list[Json]) -> Json:
    chunk: Json = {
        "id": call.id,
        "object": "chat.completion.chunk",
        "created": call.created,
        "model": call.head.model,
        "choices": choices,
    }
    if call.head.return_token_ids and any("role" in choice["delta"] for choice in choices):
        chunk["prompt_token_ids"] = call.requests[0].prompt_ids
    if call.head.include_usage:
        chunk["usage"] = None  # the last chunk says it
    return chunk


def _open(call: Call) -> Events:
    return Events(call, SHAPE)


SHAPE = ChunkFormat(wrap=_wrap, opening=_roles, choice=_chunk)
ANSWER = Answer(reply=_reply, open=_open)
