"""Bodies of /v1/responses: instructions and items told as a chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rayneuron.api.call import Call, Context, Json
from rayneuron.api.fields import Fields, wrong
from rayneuron.api.openai import chat
from rayneuron.api.responses.reply import answer
from rayneuron.api.retold import said_as
from rayneuron.api.structured import renamed
from rayneuron.errors import NotFound, RequestError

NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
PASSED = ("model", "temperature", "top_p", "stream", "user", "parallel_tool_calls", "cache_salt")
KEPT_NOWHERE = "this server keeps no responses; "
IGNORED = ("service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "max_tool_calls", "stream_options")


def parse(body: Mapping[str, Any], context: Context, *, request_id: str, created: int, client_id: str | None = None) -> Call:
    """A Responses body as a call."""
    fields = Fields(body)
    _refuse(fields)
    instructions, metadata, most = fields.string("instructions"), fields.table("metadata", {}), fields.integer("max_output_tokens", low=1)
    told = {name: fields.take(name) for name in PASSED if name in fields}
    shown = fields.integer("top_logprobs", low=0, high=20)
    wanted = "message.output_text.logprobs" in _included(fields)
    told |= {"max_completion_tokens": most, "messages": _conversation(fields.take("input"), instructions), "tool_choice": None}
    told |= {"logprobs": True, "top_logprobs": shown or 0} if wanted else {}
    told |= {"reasoning_effort": fields.table("reasoning", {}).get("effort"), "response_format": _format(fields.table("text", {}))}
    if fields.string("truncation", "disabled", among=("disabled", "auto")) == "auto":
        told["truncate_prompt_tokens"] = -1
    for name in IGNORED:
        fields.take(name)
    told |= {name: fields.take(name) for name in fields.unknown}
    with said_as(NAMES):
        call = chat.parse(told, context, request_id=request_id, created=created)
    call = renamed(call, lambda name: NAMES.get(name, name))
    shell = {"instructions": instructions, "metadata": metadata, "max_output_tokens": most}
    return dataclasses.replace(call, id=f"resp_{client_id or request_id}", answer=answer(shell))


def unknown(name: str) -> NotFound:
    """Nothing is kept that could be asked for later."""
    return NotFound(f"there is no response {name[:64]!r}: this server keeps none", param="response_id")


def _refuse(fields: Fields) -> None:
    """What this server cannot do, by name."""
    for name, instead in (
        ("previous_response_id", KEPT_NOWHERE + "send the earlier items in input"),
        ("conversation", KEPT_NOWHERE + "send the earlier items in input"),
        ("store", KEPT_NOWHERE + "send store: false, or leave it out"),
        ("background", KEPT_NOWHERE + "send background: false, or leave it out"),
        ("prompt", "this server has no stored prompts; send instructions and input"),
    ):
        if fields.take(name):
            raise RequestError(f"{name} is not supported: {instead}", param=name)
    if fields.take("tools"):
        raise RequestError("tools is not supported by this server yet; leave it out", param="tools")
    if fields.take("tool_choice", "auto") not in ("auto", "none"):
        raise RequestError("tool_choice needs tools, which are not supported by this server yet; leave it out", param="tool_choice")


def _included(fields: Fields) -> list[Any]:
    included = fields.take("include", [])
    if not isinstance(included, list):
        wrong("include", "an array of strings", included)
    return included


def _format(text: Json) -> object:
    """`text.format` as response_format, where a schema stands one level deeper."""
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}
    return wanted


def _conversation(given: object, instructions: str | None) -> list[Json]:
    told: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str) and given:
        return [*told, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        wrong("input", "a text that is not empty, or an array of items", given)
    return told + [item for place, each in enumerate(given) for item in _item(each, f"input[{place}]")]


def _item(item: object, name: str) -> list[Json]:
    """One item as messages: reasoning that is passed back is none."""
    if not isinstance(item, dict):
        wrong(name, "an object", item)
    kind = item.get("type", "message")
    if kind == "reasoning":
        return []
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
        return [{"role": role, "content": item.get("content")}]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}]
    raise RequestError(f"{name} is of type {kind!r}, which this server cannot take; send messages of text", param=f"{name}.type")
