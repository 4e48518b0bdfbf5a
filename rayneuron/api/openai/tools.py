"""`tools` and `tool_choice` of a chat: what the model is shown, and the form its answer must have where a call is forced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rayneuron.api.call import Json
from rayneuron.api.fields import Fields, wrong
from rayneuron.api.scan import TOOLS, Scan
from rayneuron.constraints import StructuredOutputs
from rayneuron.errors import RequestError

FORCED = "hermes"  # the form of a call that is forced where the file names none: it is written whatever the model is used to

WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps does it, and who learnt from it


class Tools(NamedTuple):
    """Tools to show the model; which of them it may call (`names`), and whether it must; whether more than once."""

    shown: list[Json] | None = None
    names: tuple[str, ...] = ()
    forced: bool = False
    many: bool = True

    def form(self, scan: Scan) -> str | None:
        """How calls look that are to be read out of the answer; None where none are."""
        return (scan.tools or FORCED) if self.forced else scan.tools if self.names else None

    def constraint(self, after: Sequence[int]) -> StructuredOutputs:
        """What an answer must match that is calls, behind the marker `after`."""
        opened, closed = TOOLS[FORCED]
        rules = []
        for place, name in enumerate(self.names):
            function = next(tool["function"] for tool in self.shown or () if tool["function"]["name"] == name)
            parameters = dict(function.get("parameters") or {"type": "object"})
            shared = {key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters}  # they are named from the root
            call: Json = {"type": "object", "properties": {"name": {"const": name}, "arguments": parameters}}
            call |= {"required": ["name", "arguments"], "additionalProperties": False, "x-guidance": WRITTEN, **shared}
            rules.append(f"c{place}: %json {json.dumps(call)}")
        each = " | ".join(f"c{place}" for place in range(len(rules)))
        more = ' ("\\n" call)*' if self.many else ""
        start = f'start: call{more}\ncall: "{opened}\\n" ({each}) "\\n{closed}"'
        return StructuredOutputs(grammar="\n".join([start, *rules]), after=tuple(after), field="tool_choice")


def read_tools(fields: Fields, heard: bool) -> Tools:
    """The tools of a body; `heard`: whether this server can read the calls that a model chooses to write."""
    tools, choice = fields.take("tools"), fields.take("tool_choice")
    many = fields.flag("parallel_tool_calls", True)
    named = _named(choice)
    if tools is None:
        if choice not in (None, "none"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return Tools()
    names = _names(tools)
    if named is not None and named not in names:
        raise RequestError(f"tool_choice names {named!r}, which is not among tools", param="tool_choice")
    if choice in (None, "auto") and not heard:
        said = "tools needs a server whose file says serving.tool_call_parser; leave it out, or set tool_choice to none or required"
        raise RequestError(said, param="tools")
    if choice == "none":
        return Tools(tools)
    return Tools(tools, tuple(names) if named is None else (named,), choice not in (None, "auto"), many and named is None)


def _named(choice: Any) -> str | None:
    """The name in a tool_choice that is an object."""
    if choice is None or (isinstance(choice, str) and choice in ("none", "auto", "required")):
        return None
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str):
        wrong("tool_choice", "none, auto, required, or {type: function, function: {name}}", choice)
    name: str = named["name"]
    return name


def _names(tools: Any) -> list[str]:
    if not isinstance(tools, list) or not tools:
        wrong("tools", "a non-empty array of tools, or absent", tools)
    names: list[str] = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wrong(f"tools[{place}]", "{type: function, function: {name, description, parameters}}", tool)
        if function["name"] in names:
            raise RequestError(
                f"tools[{place}] has the name {function['name']!r}, as one before it; give it another", param=f"tools[{place}]"
            )
        if not isinstance(function.get("parameters", {}), dict | None):
            wrong(f"tools[{place}].function.parameters", "a JSON schema", function["parameters"])
        names.append(function["name"])
    return names
