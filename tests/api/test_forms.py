"""Forms of calls: told by chat templates, Python's literals as JSON, and the grammars of forced calls read back by the scanner."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron import metrics
from rayneuron.api.fields import Fields
from rayneuron.api.forms import FORMS, read_python, recognised
from rayneuron.api.openai.tools import read_tools
from rayneuron.api.scan import Scan, Scanner
from rayneuron.errors import RequestError
from rayneuron.text.text import Text
from tests.drawn import examples

# A telling part of the template of a family that has the form, and of some whose form is another.
TEMPLATES = {
    "return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>": "hermes",
    "{{ '[TOOL_CALLS][' }}{% for tool_call in message['tool_calls'] %}": "mistral",
    "Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name and its value}.": "llama3_json",
    "{{- '<|python_tag|>' + tool_call.name + '.call(' }}": "llama3_json",
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]": "pythonic",
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>": None,
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>": None,
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function": None,
    "{% for m in messages %}{{ m.content }}{% endfor %}": None,
}  # fmt: skip


def test_templates_tell_the_form() -> None:
    assert {text: recognised(text) for text in TEMPLATES} == TEMPLATES


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9, width=32) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b_1", "c"]), VALUES))
@examples(150)
def test_python_and_json_say_the_same(values: dict[str, Any]) -> None:
    """Arguments as Python spells them, and as JSON does; a scanner reads both letter by letter."""
    for spell in (repr, json.dumps):
        written = f"f({', '.join(f'{name}={spell(value)}' for name, value in values.items())})"
        read = read_python(written)
        assert read is not None and read[0] == "f" and json.loads(read[1]) == values
        scanner = Scanner(Scan("pythonic"))
        events = [event for letter in f"[{written}, g()]" for event in scanner.push(letter)] + scanner.push("", last=True)
        assert [(e.kind, e.name or json.loads(e.text)) for e in events] == [
            *[("call", "f"), ("arguments", values), ("call", "g"), ("arguments", {})],
        ]


@pytest.mark.parametrize(
    "text", ["f", "f(1)", "f(**a)", "f(a=b)", "f(a=b())", "f(a={1: 2})", "f(a=b'x')", "f(a=1j)", "f(a=...)", "f(a=-True)"]
    + ["f()()", "(lambda: 1)()", "f(a=1", "f(a=" + "[" * 10_000 + "]" * 10_000 + ")", "f(a=1e999)"]
    + ["f(a=f'{1}')", "f(a=1 if 1 else 2)", "f(a='\\ud800' + 'x')"],
)  # fmt: skip
def test_what_is_no_literal_is_no_call(text: str) -> None:
    assert read_python(text) is None


def tools(parameters: Any, choice: Any = "required") -> Any:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return read_tools(Fields({"tools": [tool], "tool_choice": choice}), True)


def test_a_forced_python_call_leaves_out_what_may_be_left_out(byte_level: Text) -> None:
    """Every subset of the properties that holds the required ones, in order, and nothing else, by llguidance itself."""
    pytest.importorskip("llguidance")
    from rayneuron.structured import Grammars

    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"const": "x"}}, "required": ["b"]}
    said = tools(schema).constraint(FORMS["pythonic"], byte_level)
    grammars = Grammars(byte_level, byte_level.vocab_size)
    matcher = grammars.begin(said).result()
    for written, whole in (
        *[("[f(b=True)]", True), ("[f(a=1, b=False)]", True), ("[f(a=1, b=False, c=\"x\")]", True)],
        ("[f(b=True, c=\"x\"), f(b=True)]", True),
        *[("[f()]", False), ("[f(a=1)]", False), ("[f(b=true)]", False), ("[f(b=True, a=1)]", False), ("[f(, b=True)]", False)],
        *[("[f(b=True,c=\"x\")]", False), ("[]", False)],
    ):  # fmt: skip
        ids = [*byte_level.encode(written, add_special_tokens=False), *byte_level.eos_ids]
        assert (matcher.copy().allows(ids) == len(ids)) == whole, written
    grammars.close()


def test_what_python_cannot_name_is_refused(byte_level: Text) -> None:
    for schema in ({"type": "object", "properties": {"a-b": {}}}, {"type": "object", "properties": {}, "required": ["a"]}):
        with pytest.raises(RequestError) as wrong:
            tools(schema).constraint(FORMS["pythonic"], byte_level)
        assert wrong.value.param == "tool_choice"


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": %s}]',
    "pythonic": "[f(a=%s)]",
}


@pytest.mark.parametrize("form", CALLS)
def test_a_call_that_is_chosen_is_held_to_its_schema(byte_level: Text, form: str) -> None:
    """Where a tool is strict: any text, and calls that match, one or several, by llguidance itself."""
    pytest.importorskip("llguidance")
    from rayneuron.structured import Grammars

    python = form == "pythonic"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    read = read_tools(Fields({"tools": [tool]}), True)
    assert read.strict and not read.forced
    said = read.constraint(FORMS[form], byte_level)
    right, wrong = (CALLS[form] % (1 if python else '{"a": 1}'), CALLS[form] % (3 if python else '{"b": 1}'))
    marked = not FORMS[form].bare  # else what begins otherwise is text
    grammars = Grammars(byte_level, byte_level.vocab_size)
    matcher = grammars.begin(said).result()
    for written, whole in (
        *[("", True), ("some text", True), ("1 < 2\nis so", True), (right, True), (wrong, False), (right[:-2], False)],
        *[("so: " + right, True), ("so: " + right + "\n" + right, True), ("so: " + wrong, not marked), (right + wrong, False)],
    ):
        ids = [*byte_level.encode(written, add_special_tokens=False), *byte_level.eos_ids]
        assert (matcher.copy().allows(ids) == len(ids)) == whole, written
    grammars.close()
    with pytest.raises(RequestError, match="strict must be true or false"):
        read_tools(Fields({"tools": [{**tool, "function": {**tool["function"], "strict": 1}}]}), True)


def test_limits_of_tools() -> None:
    many = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]
    assert len(read_tools(Fields({"tools": many[:128]}), True).names) == 128
    with pytest.raises(RequestError, match="tools must have at most 128 entries, got 129"):
        read_tools(Fields({"tools": many}), True)
    for name in ("", "a b", "f" * 129, "é", 'f"'):
        with pytest.raises(RequestError, match="1 to 128 letters, digits, _, - and [.]"):
            read_tools(Fields({"tools": [{"type": "function", "function": {"name": name}}]}), True)


def test_calls_of_every_form_are_counted_from_the_start() -> None:
    assert {form for form, _ in metrics.TOOL_CALLS.known} == {*FORMS}
