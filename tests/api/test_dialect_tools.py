"""Tools and reasoning of the dialects beside OpenAI's chat: streams are replies, and what was answered can be passed back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from rayneuron.api import anthropic, openai, responses
from rayneuron.api.call import Call, Dialect
from rayneuron.api.scan import Scan
from rayneuron.errors import RequestError, UnknownModel
from rayneuron.text.text import Text
from rayneuron.types import Delta
from tests.api import playing
from tests.api.test_dialects import sse

WHY, CALL = "<think>why 水</think>", '<tool_call>\n{"name": "f", "arguments": {"a": 1.0,  "b": "}<"}}\n</tool_call>'
OTHER = '<tool_call>{"arguments": {}, "name": "g"}</tool_call>'
WRITTEN = ["hi", WHY, WHY + "hm " + CALL + OTHER, CALL, CALL + " done", WHY + CALL + "so" + OTHER, "<tool_call>no", CALL[:50], ""]
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
# A template that says all there is in a conversation.
TEMPLATE = (
    "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content or '' }}|{{ m.content }}|"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{{ c.id }}{% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}"
)
SAID: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "anthropic": (
        anthropic.MESSAGES,
        {
            "messages": [{"role": "user", "content": "ab"}],
            "tools": [{"name": "f", "input_schema": SCHEMA}, {"name": "g", "input_schema": {}}],
        },
    ),
    "responses": (
        responses.CREATE,
        {"input": "ab", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}, {"type": "function", "name": "g"}]},
    ),
}


BOTH = Scan("hermes", "qwen3")


def parse(name: str, text: Text, scan: Scan = BOTH, **more: Any) -> Call:
    dialect, body = SAID[name]
    said = {"max_tokens" if name == "anthropic" else "max_output_tokens": 90, "chat_template": TEMPLATE, **body, **more}
    return dialect.parse(openai.decode(json.dumps(said)), playing.context(text, scan=scan), request_id="call", created=1)


def cuts(call: Call, written: str, why: Any) -> Iterable[list[Delta]]:
    for size in (1, 3, 11, len(written) or 1):
        told = [Delta(call.requests[0].id, 0, written[i : i + size], [5]) for i in range(0, len(written), size)]
        told = told or [Delta(call.requests[0].id, 0, "", [5])]
        told[-1].finish_reason = why
        yield told


def accumulated_anthropic(raw: bytes) -> dict[str, Any]:
    """As Anthropic's SDK does it: blocks open and close one after another."""
    state: dict[str, Any] = {}
    is_open = False
    for name, event in sse(raw):
        if name == "message_start":
            state = event["message"]
        elif name == "content_block_start":
            assert not is_open and event["index"] == len(state["content"])
            is_open = True
            state["content"].append(event["content_block"])
            assert state["content"][-1].get("input", {}) == {}
            said = ""
        elif name == "content_block_delta":
            assert is_open and event["index"] == len(state["content"]) - 1
            block, delta = state["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                said += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                assert key in block and delta["type"] == {"text": "text_delta"}.get(block["type"], delta["type"])
                block[key] += delta[key]
        elif name == "content_block_stop":
            assert is_open and event["index"] == len(state["content"]) - 1
            is_open = False
            if state["content"][-1]["type"] == "tool_use":
                try:
                    state["content"][-1]["input"] = json.loads(said)
                except ValueError:
                    assert "}" not in said
        elif name == "message_delta":
            assert not is_open
            state |= event["delta"]
            state["usage"] |= event["usage"]
    return state


INSIDE = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def accumulated_responses(raw: bytes) -> dict[str, Any]:
    """The output as its events say it, each item opened, filled and closed before the next; it is the last event's."""
    items: list[dict[str, Any]] = []
    text, stage = "", "closed"
    events = sse(raw)
    for number, (name, event) in enumerate(events):
        assert name == event["type"] and event["sequence_number"] == number
        what = name.removeprefix("response.")
        if what == "output_item.added":
            assert stage == "closed" and event["output_index"] == len(items)
            items.append(event["item"])
            text, stage = "", "opened" if event["item"]["type"] != "function_call" else "filled"
            assert event["item"]["status"] == "in_progress" and event["item"].get("content", event["item"].get("arguments")) in ([], "")
            continue
        if what in ("created", "in_progress", "completed", "incomplete"):
            assert stage == "closed"
            continue
        item = items[-1]
        assert event["output_index"] == len(items) - 1 and event.get("item_id", item["id"]) == item["id"]
        if what == "content_part.added":
            assert stage == "opened" and event["part"]["text"] == ""
            stage = "filled"
        elif what == f"{INSIDE[item['type']]}.delta":
            assert stage == "filled"
            text += event["delta"]
        elif what == f"{INSIDE[item['type']]}.done":
            assert stage == "filled" and event.get("text", event.get("arguments")) == text
            stage = "ended" if item["type"] != "function_call" else "left"
        elif what == "content_part.done":
            assert stage == "ended" and event["part"]["text"] == text
            stage = "left"
        else:
            assert what == "output_item.done" and stage == "left"
            items[-1], stage = event["item"], "closed"
    response = events[-1][1]["response"]
    assert response["output"] == items
    return response


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("why", ["stop", "length"])
@pytest.mark.parametrize("written", WRITTEN, ids=range(len(WRITTEN)))
def test_a_stream_is_the_reply(byte_level: Text, name: str, written: str, why: str) -> None:
    call = parse(name, byte_level)
    for told in cuts(call, written, why):
        stream = call.answer.open(call)
        raw = stream.first() + b"".join(map(stream.chunk, told)) + stream.last()
        reply = call.reply(told)
        assert (accumulated_anthropic if name == "anthropic" else accumulated_responses)(raw) == reply
    calls = [each for each in reply.get("content", reply.get("output")) if each["type"] in ("tool_use", "function_call")]
    whole = written.count("</tool_call>")
    assert len(calls) == whole + (written == CALL[:50])
    if name == "anthropic":
        assert reply["stop_reason"] == ("max_tokens" if why == "length" else "tool_use" if whole else "end_turn")
        assert all(block["input"] == ({"a": 1.0, "b": "}<"} if block["name"] == "f" else {}) for block in calls if whole)
    else:
        assert reply["status"] == ("incomplete" if why == "length" else "completed")
        assert all(item["arguments"] == ('{"a": 1.0,  "b": "}<"}' if item["name"] == "f" else "{}") for item in calls if whole)
    assert len({each["id"] for each in calls}) == len(calls)


def test_the_order_of_parts_is_the_models(byte_level: Text) -> None:
    written = WHY + "hm " + CALL + OTHER
    call = parse("anthropic", byte_level)
    (told,) = list(cuts(call, written, "stop"))[-1:]
    content = call.reply(told)["content"]
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert content[0] == {"type": "thinking", "thinking": "why 水", "signature": ""} and content[1]["text"] == "hm "
    call = parse("responses", byte_level)
    output = call.reply(told)["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "why 水"}]


def prompt(name: str, text: Text, **more: Any) -> list[int]:
    return parse(name, text, **more).requests[0].prompt_ids


def test_a_turn_with_tools_is_passed_back(byte_level: Text) -> None:
    """As each dialect says it, it is the prompt that OpenAI's chat makes of the same turn."""
    written = WHY + "hm " + CALL + OTHER
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}], "chat_template": TEMPLATE, "max_tokens": 90}
    for name in SAID:
        call = parse(name, byte_level)
        (told,) = list(cuts(call, written, "stop"))[-1:]
        reply = call.reply(told)
        if name == "anthropic":
            ids = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": each, "content": [{"type": "text", "text": f"is {each}"}]} for each in ids]
            turn = [{"role": "assistant", "content": reply["content"]}]
            turn += [{"role": "user", "content": [*results, {"type": "text", "text": "go"}]}]
            ours = prompt(name, byte_level, messages=[*SAID[name][1]["messages"], *turn])
            tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
            tools += [{"type": "function", "function": {"name": "g", "parameters": {}}}]
        else:
            ids = [item["call_id"] for item in reply["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": each, "output": f"is {each}"} for each in ids]
            items = [{"role": "user", "content": "ab"}, *reply["output"], *results, {"role": "user", "content": "go"}]
            ours = prompt(name, byte_level, input=items)
            tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}, {"type": "function", "function": {"name": "g"}}]
        calls = [
            {"id": ids[0], "type": "function", "function": {"name": "f", "arguments": '{"a": 1.0, "b": "}<"}'}},
            {"id": ids[1], "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ]
        said = {"role": "assistant", "content": "hm ", "reasoning_content": "why 水", "tool_calls": calls}
        back = [{"role": "tool", "tool_call_id": each, "content": f"is {each}"} for each in ids]
        body = {**chat, "messages": [*chat["messages"], said, *back, {"role": "user", "content": "go"}], "tools": tools}
        theirs = openai.parse_chat(body, playing.context(byte_level, scan=Scan("hermes")), request_id="call", created=1)
        assert byte_level.decode(ours) == byte_level.decode(theirs.requests[0].prompt_ids)


def test_choices_of_tools_and_thinking(byte_level: Text) -> None:
    for name, choice, names, forced in (
        ("anthropic", {"type": "any", "disable_parallel_tool_use": True}, ("f", "g"), True),
        ("anthropic", {"type": "tool", "name": "g"}, ("g",), True),
        ("anthropic", {"type": "auto"}, (), False),
        ("responses", "required", ("f", "g"), True),
        ("responses", {"type": "function", "name": "g"}, ("g",), True),
        ("responses", "auto", (), False),
    ):
        call = parse(name, byte_level, tool_choice=choice)
        said = call.requests[0].params.structured_outputs
        assert (said is not None) == forced and call.scan.tools == "hermes"
        assert said is None or [n for n in ("f", "g") if json.dumps({"const": n}) in (said.grammar or "")] == list(names)
        assert call.scan.many == ("'g'" not in str(choice) and "disable" not in str(choice))
        assert parse(name, byte_level, tool_choice={"type": "none"} if name == "anthropic" else "none").scan.tools is None
    budget = parse("anthropic", byte_level, thinking={"type": "enabled", "budget_tokens": 7}).requests[0].params.structured_outputs
    assert budget is not None and budget.free_tokens == 7 and budget.field == "thinking.budget_tokens"
    template = "{{ tools }}{{ messages[0].content }}{{ enable_thinking }}"
    for said, shown in (({"type": "adaptive"}, "True"), ({"type": "disabled"}, "False"), (None, "")):
        assert byte_level.decode(prompt("anthropic", byte_level, thinking=said, chat_template=template)).endswith("ab" + shown)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_allowed(byte_level: Text, mode: str) -> None:
    """The model is shown all of them and can call those alone, in Responses and in a chat."""
    call = parse("responses", byte_level, tool_choice={"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "g"}]})
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "g"}}]}
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg"]
    body = {"messages": [{"role": "user", "content": "ab"}], "tools": tools, "chat_template": TEMPLATE, "max_tokens": 9}
    body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    for each in (call, openai.parse_chat(body, playing.context(byte_level, scan=BOTH), request_id="call", created=1)):
        said = each.requests[0].params.structured_outputs
        assert said is not None and '"g"' in (said.grammar or "") and '"f"' not in (said.grammar or "") and each.scan.many
        assert (said.field == "tools") == (mode == "auto") and "'f'" in byte_level.decode(each.requests[0].prompt_ids)
    body["tool_choice"]["allowed_tools"]["tools"][0]["function"]["name"] = "h"
    with pytest.raises(RequestError, match="names 'h', which is not among tools"):
        openai.parse_chat(body, playing.context(byte_level, scan=BOTH), request_id="call", created=1)
    none = openai.parse_chat(body | {"tools": [], "tool_choice": None}, playing.context(byte_level), request_id="call", created=1)
    assert none.requests[0].params.structured_outputs is None and none.scan.tools is None


def test_count_tokens_counts_tools(byte_level: Text) -> None:
    body = SAID["anthropic"][1] | {"thinking": {"type": "enabled", "budget_tokens": 7}}
    context = playing.context(byte_level, scan=Scan("hermes", "qwen3"))
    with pytest.raises(RequestError) as wrong:  # the tokenizer's own template has no place for tools
        anthropic.count_tokens(body, context)
    assert wrong.value.param == "tools"
    with pytest.raises(UnknownModel):
        anthropic.count_tokens(body | {"model": "other"}, context)


@pytest.mark.parametrize(
    ("name", "more", "scan", "param"),
    [
        ("anthropic", {}, Scan(), "tools"),
        ("responses", {}, Scan(), "tools"),
        ("anthropic", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, Scan("hermes"), "tools[0].type"),
        ("anthropic", {"tools": [{"name": "f"}]}, Scan("hermes"), "tools[0].input_schema"),
        ("anthropic", {"tool_choice": {"type": "tool", "name": "x"}}, Scan("hermes"), "tool_choice"),
        ("anthropic", {"tool_choice": {"type": "often"}}, Scan("hermes"), "tool_choice.type"),
        ("anthropic", {"tools": None, "tool_choice": {"type": "any"}}, Scan("hermes"), "tool_choice"),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 5}}, Scan("hermes"), "thinking.budget_tokens"),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 0}}, Scan("hermes", "qwen3"), "thinking.budget_tokens"),
        ("anthropic", {"thinking": {"type": "on"}}, Scan("hermes", "qwen3"), "thinking.type"),
        ("responses", {"tools": [{"type": "web_search"}]}, Scan("hermes"), "tools[0].type"),
        ("responses", {"tool_choice": {"type": "function", "name": "x"}}, Scan("hermes"), "tool_choice"),
        ("responses", {"tool_choice": {"type": "allowed_tools"}}, Scan("hermes"), "tool_choice"),
        ("responses", {"include": ["message.output_text.logprobs"]}, Scan("hermes"), "include"),
    ],
)
def test_what_is_wrong_is_named(byte_level: Text, name: str, more: dict[str, Any], scan: Scan, param: str) -> None:
    with pytest.raises(RequestError) as wrong:
        parse(name, byte_level, scan, **more)
    assert wrong.value.param == param, wrong.value.message
