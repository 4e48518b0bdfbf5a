"""`tools` and `tool_choice` of a chat: what the model is shown, and the form its answer must have where a call is forced."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from rayneuron.api.call import Encoder, Json
from rayneuron.api.fields import Fields, wrong
from rayneuron.api.forms import FORMS, CallForm
from rayneuron.api.scan import Scan
from rayneuron.constraints import StructuredOutputs
from rayneuron.errors import RequestError

FORCED = "hermes"  # the form of a call that is forced where the model's own is not known: it is written whatever the model is used to

MOST_TOOLS = 128  # as OpenAI takes
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # of OpenAI, Anthropic and MCP
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps does it, and who learnt from it


class Tools(NamedTuple):
    """Tools to show the model; which of them it may call (`names`), and whether it must; whether more than once. `strict`: a call that it
    chooses to write must have its tool's form as well."""

    shown: list[Json] | None = None
    names: tuple[str, ...] = ()
    forced: bool = False
    many: bool = True
    strict: bool = False

    def form(self, scan: Scan) -> str | None:
        """How calls look that are to be read out of the answer; None where none are."""
        return (scan.tools or FORCED) if self.forced else scan.tools if self.names else None

    def constraint(self, form: CallForm, text: Encoder) -> StructuredOutputs:
        """What an answer must match that is calls in the model's own `form`, or where none is forced, any text and calls."""
        named = bool(form.named) and text.special(form.named[0]) is not None
        before, opening, between, closing, behind = ("", form.begin, "", "", "") if named else form.around
        field = "tool_choice" if self.forced else "tools"
        rules: list[str] = []
        for place, name in enumerate(self.names):
            function = next(tool["function"] for tool in self.shown or () if tool["function"]["name"] == name)
            parameters = dict(function.get("parameters") or {"type": "object"})
            if not form.keys:
                rules += _python(f"c{place}", name, parameters, field)
            elif named:
                rules.append(f"c{place}: {_quoted(name, text)} {_quoted(form.named[0], text)} {_schema(parameters)}")
            else:
                shared = {key: parameters.pop(key) for key in DEFINED if key in parameters}  # they are named from the root
                call: Json = {"type": "object", "properties": {"name": {"const": name}, form.keys[0]: parameters}}
                rules.append(f"c{place}: {_schema(call | {'required': ['name', form.keys[0]], 'additionalProperties': False, **shared})}")
        each = " | ".join(f"c{place}" for place in range(len(self.names)))
        more = f"({_quoted(between + opening, text)} body)*" if self.many else ""
        free = not (self.forced or form.bare)
        mark = form.begin if free and text.special(form.begin) is None else ""  # as text it is met while free text is read
        first = (before + opening).removeprefix(mark)
        start = ["start: calls"] if self.forced else _free(form.bare, mark, self.many)
        calls = [f"calls: {_quoted(first, text)} body {more} {_quoted(behind, text)}", f"body: ({each}) {_quoted(closing, text)}"]
        lark = "\n".join([*start, *calls, *rules])
        return StructuredOutputs(grammar=lark, field=field)


DEFINED = ("$defs", "definitions")


def _free(bare: str, mark: str, many: bool) -> list[str]:
    """Rules of an answer that may have calls: it begins with what is `bare` then, or there is a marker, `mark` where that is text."""
    if bare:
        return ["start: calls TAIL | FREE", r"TAIL: /\s*/", rf"FREE: /\s*([^\s{re.escape(bare)}](.|\n)*)?/"]
    each = "(upto calls)" if mark else "(FREE calls)"
    upto = [rf"upto[lazy]: /(.|\n)*{re.escape(mark)}/"] if mark else []
    return [f"start: {each}{'*' if many else '?'} FREE", *upto, r"FREE: /(.|\n)*/"]


def _quoted(said: str, text: Encoder) -> str:
    """A text in Lark's words, in which a special token stands for itself: as text no token would spell it."""
    parts = re.split("(" + "|".join(re.escape(mark) for form in FORMS.values() for mark in form.marks) + ")", said)
    found = [(part, text.special(part)) for part in parts if part]
    return " ".join(json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>" for part, token in found)


def _schema(schema: Json) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': WRITTEN})}"


def _python(rule: str, name: str, parameters: Json, field: str) -> list[str]:
    """Rules of a call as Python writes it: the properties by name and in order, those that are not required left out or not."""
    shared = {key: parameters[key] for key in DEFINED if key in parameters}
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    if not isinstance(properties, dict) or not isinstance(required, list | tuple):
        raise RequestError(f"{field}: of the parameters of {name!r} properties must be an object, and required an array", param=field)
    if any(not key.isidentifier() for key in properties) or not all(key in properties for key in map(str, required)):
        said = f"{field}: the parameters of {name!r} cannot be written as Python's; name properties as Python names things"
        raise RequestError(said, param=field)
    rules = [f'{rule}: "{name}(" {rule}a0 ")"']
    for place, (key, schema) in enumerate(properties.items()):
        logical = isinstance(schema, dict) and schema.get("type") == "boolean" and not {"enum", "const"} & set(schema)
        value = '("True" | "False")' if logical else _schema({**(schema if isinstance(schema, dict) else {}), **shared})
        rules += [f'{rule}v{place}: "{key}=" {value}']
        for kind, comma in (("a", '""'), ("b", '", "')):  # before the first that is written, and behind it
            left_out = "" if key in required else f" | {rule}{kind}{place + 1}"
            rules.append(f"{rule}{kind}{place}: {comma} {rule}v{place} {rule}b{place + 1}{left_out}")
    return [*rules, *(f'{rule}{kind}{len(properties)}: ""' for kind in "ab")]


def read_tools(fields: Fields, heard: bool) -> Tools:
    """The tools of a body; `heard`: whether this server can read the calls that a model chooses to write."""
    tools, choice = fields.take("tools"), fields.take("tool_choice")
    many = fields.flag("parallel_tool_calls", True)
    allowed, choice = _allowed(choice)
    named = _named(choice)
    if tools is None or tools == []:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return Tools()
    names = _names(tools)
    if (absent := next((name for name in (*allowed, named) if name is not None and name not in names), None)) is not None:
        raise RequestError(f"tool_choice names {absent!r}, which is not among tools", param="tool_choice")
    if choice in (None, "auto") and not heard:
        said = "tools needs a server that knows how its model calls them: the chat template shows none of the forms read here, and the"
        said += f" file says no serving.tool_call_parser ({', '.join(FORMS)}); leave tools out, or set tool_choice to none or required"
        raise RequestError(said, param="tools")
    if choice == "none":
        return Tools(tools)
    forced = choice not in (None, "auto")
    strict = not forced and (bool(allowed) or any(tool["function"].get("strict") for tool in tools))
    return Tools(tools, (allowed or tuple(names)) if named is None else (named,), forced, many and named is None, strict)


def _allowed(choice: Any) -> tuple[tuple[str, ...], Any]:
    """The names in a tool_choice that allows some of the tools, and the choice among those."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return (), choice
    said = choice.get("allowed_tools")
    tools, mode = (said.get("tools"), said.get("mode")) if isinstance(said, dict) else (None, None)
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        wrong("tool_choice", "with allowed_tools: {mode: auto or required, tools: [{type: function, function: {name}}, ...]}", said)
    return tuple(_named(tool) or "" for tool in tools), mode


def _named(choice: Any) -> str | None:
    """The name in a tool_choice that is an object."""
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return None
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        wrong("tool_choice", "none, auto, required, {type: function, function: {name}}, or of type allowed_tools", choice)
    name: str = named["name"]
    return name


def _names(tools: Any) -> list[str]:
    if not isinstance(tools, list) or not tools:
        wrong("tools", "an array of tools", tools)
    if len(tools) > MOST_TOOLS:
        raise RequestError(f"tools must have at most {MOST_TOOLS} entries, got {len(tools)}", param="tools")
    names: list[str] = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wrong(f"tools[{place}]", "{type: function, function: {name, description, parameters}}", tool)
        if function["name"] in names:
            raise RequestError(
                f"tools[{place}] has the name {function['name']!r}, as one before it; give it another", param=f"tools[{place}]"
            )
        if NAME.fullmatch(function["name"]) is None:
            wrong(f"tools[{place}].function.name", "1 to 128 letters, digits, _, - and .", function["name"])
        if not isinstance(function.get("strict", False), bool | None):
            wrong(f"tools[{place}].function.strict", "true or false", function["strict"])
        if not isinstance(function.get("parameters", {}), dict | None):
            wrong(f"tools[{place}].function.parameters", "a JSON schema", function["parameters"])
        names.append(function["name"])
    return names
