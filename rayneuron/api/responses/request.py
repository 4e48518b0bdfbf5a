"""Bodies of /v1/responses: instructions and items told as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayneuron.api.body import read_head
from rayneuron.api.call import Call, Context, Json
from rayneuron.api.fields import Fields, wrong
from rayneuron.api.openai import chat
from rayneuron.api.responses.stages import answer
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
    given, chosen = fields.peek("tools"), fields.peek("tool_choice")
    instructions, metadata, most = fields.string("instructions"), fields.table("metadata", {}), fields.integer("max_output_tokens", low=1)
    told = {name: fields.take(name) for name in PASSED if name in fields}
    shown = fields.integer("top_logprobs", low=0, high=20)
    wanted = "message.output_text.logprobs" in _included(fields)
    if wanted and (context.scan.reasoning is not None or fields.peek("tools")):
        said = "message.output_text.logprobs is given of answers that are one text; leave it out with tools, or where the model reasons"
        raise RequestError(f"include: {said}", param="include")
    told |= {"max_completion_tokens": most, "messages": _conversation(fields.take("input"), instructions), **_tools(fields)}
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
    shell |= {"tools": given or [], "tool_choice": chosen or "auto", "parallel_tool_calls": call.scan.many}
    return call._replace(id=f"resp_{client_id or request_id}", answer=answer(shell))


def count_tokens(body: Mapping[str, Any], context: Context) -> Json:
    """How long the prompt of such a body is. UnknownModel (404) for a model that is not served here."""
    fields = Fields(body)
    _refuse(fields)
    read_head(fields, context)
    told = {"messages": _conversation(fields.take("input"), fields.string("instructions")), **_tools(fields)}
    with said_as(NAMES):
        ids, _ = chat.render(Fields(told), context)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


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


def _tools(fields: Fields) -> Json:
    """`tools` and `tool_choice` as a chat has them: what they say stands one level deeper there."""
    tools, choice = fields.take("tools"), fields.take("tool_choice")
    if not isinstance(tools, list | None):
        wrong("tools", "an array of {type: function, name, parameters}", tools)
    told: Json = {}
    for place, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            said = f"tools[{place}] is of type {str(kind)[:64]!r}, which runs on no server here; send tools of type function"
            raise RequestError(said, param=f"tools[{place}].type")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        told.setdefault("tools", []).append({"type": "function", "function": function})
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = [_named(tool) for tool in choice.get("tools") or ()]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    else:
        choice = _named(choice)
    return told | ({} if choice is None or (choice == "auto" and not tools) else {"tool_choice": choice})


def _named(choice: Any) -> Any:
    """A function that is named, as a chat names it."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


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
    for place, each in enumerate(given):
        _add(told, each, f"input[{place}]")
    return told


def _add(told: list[Json], item: object, name: str) -> None:
    """One item more: what an assistant thought, said and called in one turn is one message."""
    if not isinstance(item, dict):
        wrong(name, "an object", item)
    kind = item.get("type", "message")
    last = told[-1] if told and told[-1].get("role") == "assistant" else None
    if kind == "reasoning":
        texts = [part.get("text") for part in item.get("content") or item.get("summary") or () if isinstance(part, dict)]
        told.append({"role": "assistant", "content": "", "reasoning_content": "".join(text for text in texts if isinstance(text, str))})
    elif kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
        if role == "assistant" and last is not None and not last["content"] and "tool_calls" not in last:
            last["content"] = item.get("content")
        else:
            told.append({"role": role, "content": item.get("content")})
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function"}
        call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
        if last is None:
            told.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        told.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    else:
        raise RequestError(f"{name} is of type {kind!r}, which this server cannot take; send messages of text", param=f"{name}.type")
