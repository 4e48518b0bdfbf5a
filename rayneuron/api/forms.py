"""The forms in which models write calls of tools, as data: how each begins and ends, how it is forced, how a chat template tells it."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from typing import Any, NamedTuple

import msgspec


class CallForm(NamedTuple):
    """One way of writing calls. `begin`, `end`: markers around a call or a list of calls; `bare`: what else an answer begins with that is
    calls. `listed`: calls stand in brackets, after a comma; `between`: else, what is between them. `keys`: names of the arguments in an
    object that is a call, the first is written; none: calls are Python's. `named`: a name may stand before its arguments, with these
    markers between them. `around`: how calls are written where they are forced: before all, before each, between, behind each, behind all.
    """

    begin: str
    around: tuple[str, str, str, str, str]
    keys: tuple[str, ...] = ("arguments",)
    end: str = ""
    bare: str = ""
    listed: bool = False
    between: str = ""
    named: tuple[str, ...] = ()
    short_ids: bool = False  # of nine letters and digits, which the model's template asks for

    @property
    def marks(self) -> tuple[str, ...]:
        """Its markers, which may be special tokens."""
        return tuple(mark for mark in (self.begin, self.end, *self.named) if mark)


BOTH = ("parameters", "arguments")
# Names are vLLM's.
FORMS: dict[str, CallForm] = {
    "hermes": CallForm("<tool_call>", ("", "<tool_call>\n", "\n", "\n</tool_call>", ""), end="</tool_call>"),
    "llama3_json": CallForm("<|python_tag|>", ("", "", "; ", "", ""), BOTH, bare="{", between=";"),
    "mistral": CallForm(
        "[TOOL_CALLS]", ("[TOOL_CALLS][", "", ", ", "", "]"), listed=True, named=("[ARGS]", "[CALL_ID]"), short_ids=True
    ),
    "pythonic": CallForm("<|python_start|>", ("[", "", ", ", "", "]"), (), end="<|python_end|>", bare="[", listed=True),
}  # fmt: skip
THINK, THOUGHT = "<think>", "</think>"

# What only templates of one form say; the first that is found. None: of a form that is not read here.
_TELLING: tuple[tuple[str, str | None], ...] = (
    (r"<function=|<arg_key>|<\|tool▁calls?▁begin\|>|<\|tool_call>|<function_calls>|functools\[", None),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<tool_call>", "hermes"),
    (r"\[\w+\(\w+=\w+", "pythonic"),
    (r"<\|python_tag\|>|\"parameters\": dictionary of argument name", "llama3_json"),
)


def recognised(template: str) -> str | None:
    """The form whose calls a chat template shows to the model; None where it is not sure."""
    return next((name for pattern, name in _TELLING if re.search(pattern, template)), None)


def read_python(text: str) -> tuple[str, str] | None:
    """A call as Python writes it, of literals by name: what is called, and the arguments as JSON. None for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, (ast.Name, ast.Attribute)):
            return None
        found = {str(word.arg): _value(word.value, text) for word in call.keywords if word.arg is not None}
        whole = len(found) == len(call.keywords)
        return (ast.unparse(call.func), json.dumps(found, ensure_ascii=False, allow_nan=False)) if whole else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, text: str) -> Any:
    """A literal; what is JSON is read as that. ValueError for what is neither."""
    try:
        return msgspec.json.decode(ast.get_source_segment(text, node) or "")
    except (msgspec.MsgspecError, UnicodeError):
        return _literal(node)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) for key in node.keys if key is not None]
        if len(keys) == len(node.values) and all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if type(value) in (int, float) and math.isfinite(value):
            return -value
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    raise ValueError("no literal")
