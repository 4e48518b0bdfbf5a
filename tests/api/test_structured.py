"""What a body says its output must match, in every dialect that has a field for it."""

from __future__ import annotations

from typing import Any

import pytest

from rayneuron.api import anthropic, lmi, openai, responses, tgi
from rayneuron.api.call import Call, Context
from rayneuron.constraints import StructuredOutputs
from rayneuron.errors import RequestError
from rayneuron.text.text import Text

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ messages[0].content }}"}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}


def read(parse: Any, body: dict[str, Any], text: Text) -> Call:
    context = Context(models=("m",), text=text, max_model_len=512, vocab_size=text.vocab_size)
    return parse(body, context, request_id="r", created=1)


def said(call: Call) -> StructuredOutputs | None:
    return call.requests[0].params.structured_outputs


BODIES: list[tuple[Any, dict[str, Any], StructuredOutputs]] = [
    (openai.parse_chat, CHAT | {"response_format": WRAPPED}, StructuredOutputs(json=SCHEMA, field="response_format")),
    (
        openai.parse_chat,
        CHAT | {"response_format": {"type": "structural_tag", **TAG}},
        StructuredOutputs(structural_tag=TAG, field="response_format"),
    ),
    (
        openai.parse_completions,
        {"prompt": "x", "structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
        StructuredOutputs(json="{}", disable_any_whitespace=True),
    ),
    (
        openai.parse_completions,
        {"prompt": "x", "guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        StructuredOutputs(json=SCHEMA, whitespace_pattern=" ?", field="guided_json"),
    ),
    (
        tgi.parse,
        {"inputs": "x", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}},
        StructuredOutputs(json=SCHEMA, field="parameters.grammar"),
    ),
    (
        tgi.parse,
        {"inputs": "x", "parameters": {"grammar": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}}},
        StructuredOutputs(json=SCHEMA, field="parameters.grammar"),
    ),
    (
        lmi.parse,
        {"inputs": "x", "parameters": {"guided_choice": ["a"]}},
        StructuredOutputs(choice=("a",), field="parameters.guided_choice"),
    ),
    (
        lmi.parse,
        {"inputs": "x", "parameters": {"response_format": WRAPPED}},
        StructuredOutputs(json=SCHEMA, field="parameters.response_format"),
    ),
    (
        responses.parse,
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        StructuredOutputs(json=SCHEMA, field="text.format"),
    ),
    (
        anthropic.parse,
        CHAT | {"max_tokens": 9, "output_format": {"type": "json_schema", "schema": SCHEMA}},
        StructuredOutputs(json=SCHEMA, field="output_format"),
    ),
    (
        anthropic.parse,
        CHAT | {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        StructuredOutputs(json=SCHEMA, field="output_format"),
    ),
]


@pytest.mark.parametrize(("parse", "body", "expected"), BODIES)
def test_a_constraint_arrives_with_the_name_it_came_by(byte_level: Text, monkeypatch: Any, parse: Any, body: Any, expected: Any) -> None:
    monkeypatch.setattr(byte_level, "chat", lambda messages, **options: [5, 6])
    assert said(read(parse, body, byte_level)) == expected


WRONG: list[tuple[Any, dict[str, Any], str, str]] = [
    (openai.parse_completions, {"prompt": "x", "response_format": WRAPPED, "guided_regex": "a"}, "guided_regex", "both constrain"),
    (openai.parse_completions, {"prompt": "x", "guided_json": {}, "guided_choice": ["a"]}, "guided_choice", "both constrain"),
    (tgi.parse, {"inputs": "x", "parameters": {"grammar": {"type": "lark", "value": "x"}}}, "parameters.grammar", "type: json"),
    (tgi.parse, {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": 5}}}, "parameters.grammar", "regular expression"),
    (responses.parse, {"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "schema"),
    (anthropic.parse, CHAT | {"max_tokens": 9, "output_format": {"type": "json"}}, "output_format", "json_schema"),
    (lmi.parse, {"inputs": "x", "parameters": {"guided_regex": 5}}, "parameters.guided_regex", "regular expression"),
]


@pytest.mark.parametrize(("parse", "body", "param", "words"), WRONG)
def test_what_is_none_is_refused_by_its_name(byte_level: Text, monkeypatch: Any, parse: Any, body: Any, param: str, words: str) -> None:
    monkeypatch.setattr(byte_level, "chat", lambda messages, **options: [5, 6])
    with pytest.raises(RequestError, match=words) as caught:
        read(parse, body, byte_level)
    assert caught.value.param is not None and caught.value.param.startswith(param)


def test_prompts_of_one_call_share_their_parameters(byte_level: Text) -> None:
    call = read(openai.parse_completions, {"prompt": ["x", "y"], "guided_regex": "a"}, byte_level)
    assert call.requests[0].params is call.requests[1].params


def test_two_kinds_or_none_are_no_constraint() -> None:
    for words in ({}, {"regex": "a", "choice": ("b",)}, {"choice": ()}, {"regex": "a", "free_tokens": 5}):
        with pytest.raises(RequestError):
            StructuredOutputs(**words)  # type: ignore[arg-type]
    assert (StructuredOutputs(json=False).kind, StructuredOutputs(json={}).kind) == ("json", "json")
