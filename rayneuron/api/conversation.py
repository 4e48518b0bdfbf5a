"""A conversation to token ids: its messages, checked, and whatever else of a body reaches the chat template, tools included."""

from __future__ import annotations

from typing import Any

import msgspec

from rayneuron.api.call import Context
from rayneuron.api.fields import Fields, kind, wrong
from rayneuron.errors import RequestError

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# What has its own field, or is not for a client to say at all.
OWN_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "tools", "documents", "messages", "conversation")
RENDERING = (
    *("tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length", "add_special_tokens", "tokenizer_kwargs"),
    "self",  # a word of Jinja's own
)


def render(fields: Fields, context: Context, keep: int | None = None, side: str = "left") -> tuple[list[int], str]:
    """Token ids of the body's conversation, and the role that speaks next. `keep`: the caller will cut all but so many, on that `side`."""
    messages = read_messages(fields.take("messages"), context.max_model_len)
    prompt, final = fields.flag("add_generation_prompt", True), fields.flag("continue_final_message")
    if prompt and final:
        raise RequestError("continue_final_message needs add_generation_prompt: false", param="continue_final_message")
    template = fields.string("chat_template")
    if template is not None and not context.trust_chat_template:
        raise RequestError(
            "chat_template is not accepted from clients by this server; leave it out, or set serving.trust_request_chat_template: true",
            param="chat_template",
        )
    ids = context.text.chat(
        messages,
        add_generation_prompt=prompt,
        continue_final_message=final,
        tools=_tools(fields),
        documents=_documents(fields),
        chat_template=template,
        add_special_tokens=fields.flag("add_special_tokens"),
        limit=context.max_model_len if keep is None else keep,
        side=None if keep is None else side,
        variables=_variables(fields),
    )
    if not ids:
        raise RequestError("the chat template made an empty prompt of these messages", param="messages")
    return ids, "assistant" if prompt else messages[-1]["role"]


def _variables(fields: Fields) -> dict[str, Any]:
    """Words for the template itself."""
    options: dict[str, Any] = dict(fields.table("chat_template_kwargs", {}))
    for name in (*OWN_FIELDS, *RENDERING):
        if name in options:
            said = "send it as a field of its own" if name in OWN_FIELDS else "leave it out"
            raise RequestError(f"chat_template_kwargs.{name} is not for the template; {said}", param=f"chat_template_kwargs.{name}")
    effort = fields.string("reasoning_effort")
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
    return options


def _documents(fields: Fields) -> list[dict[str, Any]] | None:
    documents = fields.take("documents")
    if documents is not None and (not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents)):
        wrong("documents", "an array of objects", documents)
    found: list[dict[str, Any]] | None = documents
    return found


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Tools to show the model: only with tool_choice none, until this server can read the calls it writes."""
    tools, choice = fields.take("tools"), fields.take("tool_choice")
    fields.flag("parallel_tool_calls", True)
    if choice is not None and not (isinstance(choice, str) and choice in ("none", "auto", "required")):
        named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(named, dict) or not isinstance(named.get("name"), str):
            wrong("tool_choice", "none, auto, required, or {type: function, function: {name}}", choice)
    if tools is None:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return None
    if not isinstance(tools, list) or not tools:
        wrong("tools", "a non-empty array of tools, or absent", tools)
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wrong(f"tools[{place}]", "{type: function, function: {name, description, parameters}}", tool)
    if isinstance(choice, dict) and all(tool["function"]["name"] != choice["function"]["name"] for tool in tools):
        raise RequestError(f"tool_choice names {choice['function']['name']!r}, which is not among tools", param="tool_choice")
    if choice != "none":
        raise RequestError("tools is not supported by this server yet; leave it out, or set tool_choice to none", param="tools")
    return tools


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
