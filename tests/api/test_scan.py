"""What a model writes, told apart: expected events by hand, every cut of the text, stream against reply."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.api import openai
from rayneuron.api.call import Call
from rayneuron.api.forms import FORMS
from rayneuron.api.scan import Event, Scan, Scanner
from rayneuron.api.stream import chunks
from rayneuron.errors import RequestError
from rayneuron.text.text import Text
from rayneuron.types import Delta
from tests.api import playing
from tests.drawn import examples

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1.0,  "b": "}<"}}\n</tool_call>'
OTHER = '<tool_call>{"arguments":{},"name":"g"}</tool_call>'
ARGUMENTS = '{"a": 1.0,  "b": "}<"}'
HERMES, R1, QWEN, BOTH = Scan("hermes"), Scan(None, "deepseek_r1"), Scan(None, "qwen3"), Scan("hermes", "qwen3")
LLAMA, MISTRAL, PYTHON = Scan("llama3_json"), Scan("mistral"), Scan("pythonic")
Told = list[tuple[str, str, str]]


def called(name: str, arguments: str) -> Told:
    return [("call", "", name), *([("arguments", arguments, "")] if arguments else [])]


FIRST, SECOND = called("f", ARGUMENTS), called("g", "{}")


def content(text: str) -> tuple[str, str, str]:
    return ("content", text, "")


def thought(text: str) -> tuple[str, str, str]:
    return ("reasoning", text, "")


BROKEN = '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'
TABLE: list[tuple[Scan, str, Told]] = [
    (HERMES, "", []),
    (HERMES, "plain <tool> <tool_cal", [content("plain <tool> <tool_cal")]),
    (HERMES, CALL, FIRST),
    (HERMES, "I ask.\n" + CALL, [content("I ask.\n"), *FIRST]),
    (HERMES, CALL + "\n" + OTHER + "\n", FIRST + SECOND),
    (HERMES, CALL.removesuffix("_call>"), FIRST),
    (HERMES, CALL.removesuffix("/tool_call>") + OTHER, [*FIRST, content("<"), *SECOND]),
    (HERMES, CALL + " done", [*FIRST, content("done")]),
    (HERMES, CALL.removesuffix("\n</tool_call>"), FIRST),
    (HERMES, CALL.removesuffix("}\n</tool_call>") + OTHER, FIRST + SECOND),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a', called("f", '{"a')),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\\', called("f", '{"a": "\\')),
    (HERMES, '<tool_call>{"name": "f", "arg', [content('<tool_call>{"name": "f", "arg')]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "na', [content('<tool_call>{"arguments": {"a": 1}, "na')]),
    (HERMES, "<tool_call>no</tool_call>" + OTHER, [content("<tool_call>no</tool_call>"), *SECOND]),
    (HERMES, BROKEN, [content(BROKEN)]),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', [content('<tool_call>{"name": 5}</tool_call>')]),
    (HERMES, '<tool_call>{"name": "h"}</tool_call>', called("h", "{}")),
    (HERMES, '<tool_call>{"name": "h", "arguments": null}</tool_call>', called("h", "{}")),
    (HERMES, '<tool_call>{"id": [1, "}"], "name": "h", "x": -1.5 , "arguments": {} , "y": {"}": 1}}</tool_call>z',
     [*called("h", "{}"), content("z")]),
    (HERMES, '<tool_call>{"name": "水", "arguments": {"ü": "😀\\""}}</tool_call>', called("水", '{"ü": "😀\\""}')),
    (HERMES, "<think>x</think>y", [content("<think>x</think>y")]),
    (HERMES._replace(many=False), CALL + OTHER, FIRST),
    (LLAMA, '{"name": "f", "parameters": {"a": [1, {"b": 2}]}}', called("f", '{"a": [1, {"b": 2}]}')),
    (LLAMA, ' <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', [content(" "), *called("f", "{}")]),
    (LLAMA, '{"name": "f", "arguments": {}}; {"name": "g", "parameters": {}} ', called("f", "{}") + SECOND),
    (LLAMA, '{"name": "f", "parameters": {}}; ok', [*called("f", "{}"), content("; ok")]),
    (LLAMA, '{"name": "Ada", "age": 36}', [content('{"name": "Ada", "age": 36}')]),
    (LLAMA, 'See {"name": "f", "parameters": {}}', [content('See {"name": "f", "parameters": {}}')]),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]', called("f", '{"a": "]"}') + SECOND),
    (MISTRAL, 'hm[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g{}', [content("hm"), *called("f", '{"a": {}}'), *SECOND]),
    (MISTRAL, "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", called("f", "{}")),
    (MISTRAL, "[TOOL_CALLS]no call", [content("[TOOL_CALLS]no call")]),
    (MISTRAL, "[TOOL_CALLS] [1, 2]", [content("[TOOL_CALLS] [1, 2]")]),
    (PYTHON, '[f(a=1.0, b="}<")]', called("f", '{"a": 1.0, "b": "}<"}')),
    (PYTHON, "<|python_start|>[f(), m.g(d={'k': (True, None, -2)}, e=[false, 'it\\'s)'])]<|python_end|>",
     called("f", "{}") + called("m.g", '{"d": {"k": [true, null, -2]}, "e": [false, "it\'s)"]}')),
    (PYTHON, "[link](there)", [content("[link](there)")]),
    (PYTHON, "[f(1)]", [content("[f(1)]")]),
    (PYTHON, "[f(a=__import__('os').name)]", [content("[f(a=__import__('os').name)]")]),
    (PYTHON, "[f(a=1e999)]", [content("[f(a=1e999)]")]),
    (PYTHON, "[f(**{})]", [content("[f(**{})]")]),
    (PYTHON, "[f(a=1), g(b=", [*called("f", '{"a": 1}'), content(", g(b=")]),
    (R1, "x</think>y", [thought("x"), content("y")]),
    (R1, "<think>\nx</think>\n\ny", [thought("\nx"), content("\n\ny")]),
    (R1, "never ends </thin", [thought("never ends </thin")]),
    (R1._replace(shown=False), "x</think>y", [content("y")]),
    (QWEN, "no thought</think>", [content("no thought</think>")]),
    (QWEN, "\n<think>x</think>y<think>z", [thought("x"), content("y<think>z")]),
    (QWEN, "<thin", [content("<thin")]),
    (QWEN, " ", [content(" ")]),
    (QWEN._replace(opened=True), "x</think>y", [thought("x"), content("y")]),
    (BOTH, "<think>a " + CALL + "</think>b" + OTHER, [thought("a " + CALL), content("b"), *SECOND]),
    (R1._replace(tools="llama3_json"), 'x</think>\n{"name": "g", "parameters": {}}', [thought("x"), *SECOND]),
    (Scan(), CALL, [content(CALL)]),
]  # fmt: skip


def read(scan: Scan, parts: list[str]) -> Told:
    """Events of the parts, neighbours of one kind joined; calls are never joined."""
    scanner, joined = Scanner(scan), Told()
    for place, part in enumerate(parts, start=1):
        for event in scanner.push(part, last=place == len(parts)):
            if joined and joined[-1][0] == event.kind != "call":
                joined[-1] = (event.kind, joined[-1][1] + event.text, "")
            else:
                joined.append(tuple(event))
    return joined


@pytest.mark.parametrize(("scan", "text", "expected"), TABLE)
def test_every_cut(scan: Scan, text: str, expected: Told) -> None:
    """Whole, letter by letter, and cut at every pair of places."""
    assert read(scan, [text]) == expected
    assert read(scan, [*text, ""]) == expected
    for a, b in itertools.combinations(range(len(text) + 1), 2):
        assert read(scan, [text[:a], text[a:b], text[b:]]) == expected


WORDS = st.sampled_from([
    *("<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '{"a": "x"}', "}", "{", '"', "\\", ", ", "; ", "\n", "水", " "),
    *("[TOOL_CALLS]", "[ARGS]"), *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "f(", "a='b'", ")", "<think>", "</think>"),
    *('"parameters": ', CALL, OTHER, '"name": "g"', "null", ":", "[", "]", "z" * 200),
])  # fmt: skip


@given(st.data(), st.sampled_from([None, *FORMS]), st.sampled_from([None, "deepseek_r1", "qwen3"]), st.booleans())
@examples(300)
def test_any_cut_of_any_text(data: st.DataObject, tools: str | None, reasoning: str | None, many: bool) -> None:
    """The same events, and nothing but white space and what is written around calls is lost."""
    text = "".join(data.draw(st.lists(WORDS, max_size=12)))
    scan = Scan(tools, reasoning, many=many)
    whole = read(scan, [text])
    assert read(scan, [*text, ""]) == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert read(scan, [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]) == whole
    if not any(kind == "call" for kind, _, _ in whole) and many:
        said = "".join(part for _, part, _ in whole)
        assert "".join(said.split()) == "".join(text.split()) or reasoning is not None


def test_nothing_of_the_arguments_is_held_back() -> None:
    """They go out as they come, so that reading costs what the text does and not its square."""
    scanner = Scanner(HERMES)
    scanner.push('<tool_call>{"name": "f", "arguments": {"a": "')
    assert all(scanner.push("word ") == [Event("arguments", "word ")] for _ in range(2000))
    assert scanner.push("\\") == [] and scanner.push('"') == [Event("arguments", '\\"')]
    assert scanner.push('"}}</tool_call>', last=True) == [Event("arguments", '"}')]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
TEMPLATE = "{{ tools }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def parse(text: Text, scan: Scan = BOTH, **more: Any) -> Call:
    body = {"messages": [{"role": "user", "content": "ab"}], "tools": TOOLS, "chat_template": TEMPLATE, "max_tokens": 9, **more}
    return openai.parse_chat(body, playing.context(text, scan=scan), request_id="call", created=1)


def deltas(call: Call, parts: list[str], why: Any = "stop") -> list[Delta]:
    told = [Delta(call.requests[0].id, 0, part, [1]) for part in parts]
    told[-1].finish_reason = why
    return told


def streamed(call: Call, told: list[Delta]) -> tuple[dict[str, Any], str]:
    """The message and finish reason a client's accumulator makes of the stream."""
    writer = call.answer.open(call)
    message: dict[str, Any] = {"content": None, "refusal": None}
    why = ""
    for chunk in chunks(writer.first() + b"".join(map(writer.chunk, told)) + writer.last()):
        choice = chunk["choices"][0]
        why = choice["finish_reason"] or why
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                calls = message.setdefault("tool_calls", [])
                for each in value:
                    if each.pop("index") == len(calls):
                        assert each["id"] and each["function"]["name"]
                        calls.append(each)
                    else:
                        assert set(each) == {"function"} and set(each["function"]) == {"arguments"}
                        calls[-1]["function"]["arguments"] += each["function"]["arguments"]
            else:
                message[key] = (message.get(key) or "") + value
    return message | {"content": message["content"] or None}, why


@pytest.mark.parametrize("written", ["hi", "<think>why</think>hm " + CALL + OTHER, CALL, "<tool_call>no"])
@pytest.mark.parametrize("why", ["stop", "length"])
def test_stream_is_reply(byte_level: Text, written: str, why: str) -> None:
    """Message and finish reason; a call is made only where the model stopped."""
    call = parse(byte_level)
    for size in (1, 2, 7, len(written)):
        told = deltas(call, [written[i : i + size] for i in range(0, len(written), size)], why)
        choice = call.reply(told)["choices"][0]
        assert streamed(call, told) == (choice["message"], choice["finish_reason"])
        calls = choice["message"].get("tool_calls", [])
        assert len(calls) == (0 if CALL not in written else 2 if OTHER in written else 1)
        assert choice["finish_reason"] == ("tool_calls" if calls and why == "stop" else why)
        assert len({each["id"] for each in calls}) == len(calls)


def test_what_is_asked(byte_level: Text) -> None:
    """tool_choice none reads no call; include_reasoning and parallel_tool_calls; reasoning under both names."""
    written = "<think>why</think>" + CALL + OTHER

    def message(**more: Any) -> dict[str, Any]:
        call = parse(byte_level, **more)
        return call.reply(deltas(call, [written]))["choices"][0]["message"]

    told = message(parallel_tool_calls=False)
    assert [each["function"] for each in told["tool_calls"]] == [{"name": "f", "arguments": ARGUMENTS}]
    assert told["reasoning"] == told["reasoning_content"] == "why"
    assert told["content"] is None
    quiet = message(tool_choice="none", include_reasoning=False)
    assert "reasoning" not in quiet and quiet["content"] == CALL + OTHER and "tool_calls" not in quiet


@pytest.mark.parametrize(
    ("more", "scan", "param"),
    [
        ({}, QWEN, "tools"),
        ({"tools": TOOLS * 2}, BOTH, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, BOTH, "tools[0].function.parameters"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, BOTH, "tool_choice"),
        ({"chat_template": "{{ messages[0]['content'] }}"}, BOTH, "tools"),
    ],
)
def test_wrong(byte_level: Text, more: dict[str, Any], scan: Scan, param: str) -> None:
    """Named by field."""
    with pytest.raises(RequestError) as wrong:
        parse(byte_level, scan, **more)
    assert wrong.value.param == param
