"""Anthropic's bodies: system, messages of blocks, and what it calls the sampling parameters, told as a chat."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from rayneuron.api.anthropic.reply import ANSWER
from rayneuron.api.call import Call, Context, Json
from rayneuron.api.fields import Fields, wrong
from rayneuron.api.openai import chat
from rayneuron.api.retold import said_as
from rayneuron.api.structured import renamed
from rayneuron.errors import RequestError

NAMES = {"stop": "stop_sequences", "response_format": "output_format"}
PASSED = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt", "chat_template_kwargs", "seed", "ignore_eos")


def parse(body: Mapping[str, Any], context: Context, *, request_id: str, created: int, client_id: str | None = None) -> Call:
    """A Messages body as a call."""
    fields = Fields(body)
    if "max_tokens" not in fields:
        raise RequestError("max_tokens is required", param="max_tokens")
    told = {name: fields.take(name) for name in PASSED if name in fields}
    told |= {"messages": _messages(fields), "stop": list(fields.strings("stop_sequences")) or None}
    told |= {"response_format": _format(fields)}
    told |= {name: fields.take(name) for name in fields.unknown}
    with said_as(NAMES):
        call = renamed(chat.parse(told, context, request_id=request_id, created=created), lambda name: NAMES.get(name, name))
    return dataclasses.replace(call, id=f"msg_{client_id or request_id}", answer=ANSWER)


def _format(fields: Fields) -> Json | None:
    """`output_config.format`, or the older `output_format`, as response_format."""
    config = fields.table("output_config", {})
    said = config.get("format", fields.take("output_format"))
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("type") != "json_schema" or not isinstance(said.get("schema"), dict):
        wrong("output_format", "{type: json_schema, schema: an object}", said)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": said["schema"]}}


def count_tokens(body: Mapping[str, Any], context: Context) -> Json:
    """How long the prompt of such a body is."""
    fields = Fields(body)
    ids, _ = chat.render(Fields({"messages": _messages(fields)}), context)
    return {"input_tokens": len(ids)}


def _messages(fields: Fields) -> list[Json]:
    """The conversation as OpenAI tells it; what a server without tools and thinking cannot do is refused by name."""
    thinking, metadata = fields.table("thinking", {}), fields.table("metadata", {})
    if thinking.get("type", "disabled") != "disabled":
        raise RequestError("thinking is not supported by this server yet; send {type: disabled}, or leave it out", param="thinking")
    Fields(metadata, "metadata.").string("user_id")
    for name in ("tools", "mcp_servers", "container"):
        if fields.take(name):
            raise RequestError(f"{name} is not supported by this server yet; leave it out", param=name)
    if fields.table("tool_choice", {}).get("type", "none") not in ("none", "auto"):
        raise RequestError("tool_choice needs tools, which are not supported by this server yet; leave it out", param="tool_choice")
    for name in ("service_tier", "context_management", "inference_geo"):
        fields.take(name)
    system, messages = fields.take("system"), fields.take("messages")
    if not isinstance(messages, list) or not messages:
        wrong("messages", "a non-empty array of {role, content} objects", messages)
    told = [{"role": "system", "content": _text(system, "system")}] if system else []
    return told + [part for place, message in enumerate(messages) for part in _message(message, f"messages[{place}]")]


def _message(message: object, name: str) -> list[Json]:
    """One message, after the results of tools in it, which OpenAI has as messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        wrong(name, "an object with content and the role user or assistant", message)
    role, content = message["role"], message.get("content")
    blocks = content if isinstance(content, list) else []
    calls = [_call(block, f"{name}.content[{i}]") for i, block in enumerate(blocks) if _kind(block) == "tool_use"]
    results = [_result(block, f"{name}.content[{i}]") for i, block in enumerate(blocks) if _kind(block) == "tool_result"]
    kept = [block for block in blocks if _kind(block) not in ("tool_use", "tool_result", "thinking", "redacted_thinking")]
    if blocks and not kept and results and not calls:
        return results
    text = _text(kept if isinstance(content, list) else content, f"{name}.content")
    return [*results, {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}]


def _kind(block: object) -> object:
    return block.get("type") if isinstance(block, dict) else None


def _call(block: Json, name: str) -> Json:
    if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
        wrong(name, "a tool_use block {type, id, name, input}", block)
    arguments = msgspec.json.encode(block["input"]).decode()
    return {"id": block.get("id"), "type": "function", "function": {"name": block["name"], "arguments": arguments}}


def _result(block: Json, name: str) -> Json:
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content") or "", f"{name}.content")}


def _text(content: object, name: str) -> str:
    """A text, or the texts of blocks one after another."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        wrong(name, "a string or an array of text blocks", content)
    return "".join(_block(block, f"{name}[{place}]") for place, block in enumerate(content))


def _block(block: object, name: str) -> str:
    kind = _kind(block)
    if kind != "text":
        said = f"{name} has type {kind!r}; this model takes text only, so send {{type: text, text: ...}} blocks"
        raise RequestError(said, param=name)
    text = block.get("text")  # type: ignore[attr-defined]
    if not isinstance(text, str):
        wrong(f"{name}.text", "a string", text)
    return text
