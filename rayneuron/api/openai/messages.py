"""The messages of a chat body, with texts for contents."""

from __future__ import annotations

from typing import Any

import msgspec

from rayneuron.api.fields import kind, wrong
from rayneuron.errors import RequestError

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def read_messages(value: object, most: int) -> list[dict[str, Any]]:
    """Messages with string contents, not more than `most`. RequestError names the message and the part that is wrong."""
    if not isinstance(value, list):
        if value is None:
            raise RequestError("messages is required: an array of {role, content} objects", param="messages")
        wrong("messages", "an array of {role, content} objects", value)
    if not value:
        raise RequestError("messages must hold at least one message", param="messages")
    if len(value) > most:
        raise RequestError(f"messages holds {len(value)} messages, more than the {most} tokens this model takes", param="messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(value)]


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        wrong(name, "an object with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        wrong(f"{name}.role", "a non-empty string", role)
    read = {key: value for key, value in message.items() if value is not None}
    content = read.get("content")
    if content is None and role not in ("assistant", "tool"):
        raise RequestError(f"{name}.content is required: a string or an array of text parts", param=f"{name}.content")
    read["content"] = _content(content, f"{name}.content")
    if "tool_calls" in read:
        read["tool_calls"] = _tool_calls(read["tool_calls"], f"{name}.tool_calls")
    return read


def _content(content: object, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        wrong(name, "a string or an array of text parts", content)
    return "\n".join(_part(part, f"{name}[{place}]") for place, part in enumerate(content))


def _part(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{name} must be an object with a type, got {kind(part)}", param=name)
    key = TEXT_PARTS.get(part["type"])
    if key is None:
        said = f"{name} has type {part['type']!r}; this model takes text only, so send {{type: text, text: ...}} parts"
        raise RequestError(said, param=name)
    text = part.get(key)
    if not isinstance(text, str):
        wrong(f"{name}.{key}", "a string", text)
    return text


def _tool_calls(value: object, name: str) -> list[dict[str, Any]]:
    """Earlier tool calls; templates want their arguments as objects, the API carries them as JSON text."""
    if not isinstance(value, list):
        wrong(name, "an array", value)
    calls = []
    for place, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wrong(f"{name}[{place}]", "an object with function.name and function.arguments", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments or "{}")
            except (msgspec.MsgspecError, RecursionError) as bad:
                where = f"{name}[{place}].function.arguments"
                raise RequestError(f"{where} is not valid JSON: {bad}", param=where) from bad
        calls.append({**call, "function": {**function, "arguments": arguments if arguments is not None else {}}})
    return calls
