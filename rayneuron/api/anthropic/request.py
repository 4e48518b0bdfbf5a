"""Anthropic's bodies: system, messages of blocks, tools, and what it calls the sampling parameters, told as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rayneuron.api.anthropic.reply import ANSWER
from rayneuron.api.body import read_head
from rayneuron.api.call import Call, Context, Json
from rayneuron.api.fields import Fields, wrong
from rayneuron.api.openai import chat
from rayneuron.api.retold import said_as
from rayneuron.api.structured import renamed
from rayneuron.errors import RequestError

NAMES = {"stop": "stop_sequences", "response_format": "output_format", "thinking_token_budget": "thinking.budget_tokens"}
PASSED = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt", "seed", "ignore_eos")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # Anthropic's tool_choice, OpenAI's


def parse(body: Mapping[str, Any], context: Context, *, request_id: str, created: int, client_id: str | None = None) -> Call:
    """A Messages body as a call."""
    fields = Fields(body)
    if "max_tokens" not in fields:
        raise RequestError("max_tokens is required", param="max_tokens")
    told = {name: fields.take(name) for name in PASSED if name in fields}
    told |= _conversation(fields) | {"stop": list(fields.strings("stop_sequences")) or None}
    told |= {"response_format": _format(fields)}
    told |= {name: fields.take(name) for name in fields.unknown}
    with said_as(NAMES):
        call = renamed(chat.parse(told, context, request_id=request_id, created=created), lambda name: NAMES.get(name, name))
    return call._replace(id=f"msg_{client_id or request_id}", answer=ANSWER)


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
    """How long the prompt of such a body is. UnknownModel (404) for a model that is not served here."""
    fields = Fields(body)
    read_head(fields, context)
    told = _conversation(fields)
    told.pop("thinking_token_budget", None)
    ids, _ = chat.render(Fields(told), context)
    return {"input_tokens": len(ids)}


def _conversation(fields: Fields) -> Json:
    """What reaches the chat template, as OpenAI's fields; what this server cannot do is refused by name."""
    Fields(fields.table("metadata", {}), "metadata.").string("user_id")
    for name in ("mcp_servers", "container"):
        if fields.take(name):
            raise RequestError(f"{name} is not supported by this server; leave it out", param=name)
    for name in ("service_tier", "context_management", "inference_geo"):
        fields.take(name)
    system, messages = fields.take("system"), fields.take("messages")
    if not isinstance(messages, list) or not messages:
        wrong("messages", "a non-empty array of {role, content} objects", messages)
    told = [{"role": "system", "content": _text(system, "system")}] if system else []
    told += [part for place, message in enumerate(messages) for part in _message(message, f"messages[{place}]")]
    return {"messages": told, **_tools(fields), **_thinking(fields)}


def _thinking(fields: Fields) -> Json:
    """Whether the model thinks, told to its template; and for how long."""
    kwargs, said = fields.table("chat_template_kwargs", {}), fields.table("thinking", {})
    kind = said.get("type")
    if said and kind not in ("enabled", "adaptive", "disabled"):
        wrong("thinking.type", "enabled, adaptive or disabled", kind)
    asked = {} if kind is None else {"enable_thinking": kind != "disabled"}
    budget = Fields(said, "thinking.").integer("budget_tokens", low=1) if kind == "enabled" else None
    return {"chat_template_kwargs": {**asked, **kwargs}, **({} if budget is None else {"thinking_token_budget": budget})}


def _tools(fields: Fields) -> Json:
    """`tools` and `tool_choice`."""
    tools, choice = fields.take("tools"), fields.table("tool_choice", {})
    if not isinstance(tools, list | None):
        wrong("tools", "an array of {name, description, input_schema}", tools)
    told: Json = {"tools": [_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]} if tools else {}
    kind = choice.get("type")
    if kind == "tool":
        told["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice and kind not in CHOICES:
        wrong("tool_choice.type", "auto, any, tool or none", kind)
    elif choice and (tools or kind == "any"):
        told["tool_choice"] = CHOICES[str(kind)]
    if Fields(choice, "tool_choice.").flag("disable_parallel_tool_use"):
        told["parallel_tool_calls"] = False
    return told


def _tool(tool: object, name: str) -> Json:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        wrong(name, "{name, description, input_schema}", tool)
    if tool.get("type", "custom") != "custom":
        said = f"{name} is of type {str(tool['type'])[:64]!r}, which runs on no server here; send tools with an input_schema"
        raise RequestError(said, param=f"{name}.type")
    if not isinstance(tool.get("input_schema"), dict):
        wrong(f"{name}.input_schema", "a JSON schema (an object)", tool.get("input_schema"))
    described = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["input_schema"]}}


def _message(message: object, name: str) -> list[Json]:
    """One message, after the results of tools in it, which OpenAI has as messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        wrong(name, "an object with content and the role user or assistant", message)
    role, content = message["role"], message.get("content")
    blocks = content if isinstance(content, list) else []
    calls = [_call(block, f"{name}.content[{i}]") for i, block in enumerate(blocks) if _kind(block) == "tool_use"]
    results = [_result(block, f"{name}.content[{i}]") for i, block in enumerate(blocks) if _kind(block) == "tool_result"]
    thoughts = [str(block.get("thinking") or "") for block in blocks if _kind(block) == "thinking"]
    kept = [block for block in blocks if _kind(block) not in ("tool_use", "tool_result", "thinking", "redacted_thinking")]
    if blocks and not kept and results and not calls:
        return results
    text = _text(kept if isinstance(content, list) else content, f"{name}.content")
    thought = {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
    return [*results, {"role": role, "content": text, **thought, **({"tool_calls": calls} if calls else {})}]


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
