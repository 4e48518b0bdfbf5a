"""Every field of both endpoints: taken, applied, or refused with its own name; null equals absent."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rayneuron.api import errors, neuron_server, openai
from rayneuron.api.call import Call
from rayneuron.constraints import StructuredOutputs as Said
from rayneuron.errors import ConfigError, RayNeuronError, RequestError, UnknownModel
from rayneuron.text.text import Text
from tests.api import playing
from tests.drawn import examples

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"prompt": "hello"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
HUGE = 10**30


def parse(kind: str, body: dict[str, Any], text: Text, **server: Any) -> Call:
    """Through JSON and back, as a server reads it."""
    read = openai.decode(msgspec.json.encode((TEXT if kind == "text" else CHAT) | body))
    words: dict[str, Any] = {"request_id": "r1", "created": 7}
    verb = openai.parse_completions if kind == "text" else openai.parse_chat
    return verb(read, playing.context(text, **server), **words)


BOTH: list[tuple[str, list[Any]]] = [
    ("model", [5, ["tiny"], {}]),
    ("max_tokens", [-1, "5", 2.5, True, [1], HUGE, 10**9]),
    ("min_tokens", [-1, "1", 1.5, 10**6]),
    ("temperature", [-0.1, 2.1, "hot", True, [1], HUGE]),
    ("top_p", [0, -1, 1.01, "x"]),
    ("top_k", [-2, 1.5, "x", True, 2**31, 2**63, 10**400]),
    ("min_p", [-0.1, 1.1, "x"]),
    ("presence_penalty", [-2.1, 2.1, "x"]),
    ("frequency_penalty", [-2.1, 2.1, None.__class__.__name__]),
    ("repetition_penalty", [0, -1, "x"]),
    ("no_repeat_ngram_size", [-1, "x", 0.5, 65, 2**31, 10**400]),
    ("typical_p", [0, -1, 1.01, "x"]),
    ("logprob_token_ids", [5, [10**6], ["5"], [5]]),
    ("n", [0, -1, 129, "2", 1.5, True]),
    ("seed", [2**63, -(2**63) - 1, "x", 0.5, HUGE]),
    ("stop", [5, [5], ["a", ""], "", ["a"] * 129, {"a": 1}, [["a"]], "a" * 4097, ["a" * 2049, "b" * 2048]]),
    ("stop_token_ids", [5, ["5"], [True], [-1], [10**6], [1.5]]),
    ("allowed_token_ids", [[], [10**6], "x", [None], [10**400], [5] * 100_000]),
    ("banned_token_ids", [[10**6], 3]),
    ("logit_bias", [[1], "x", {"a": 1}, {"1.5": 1}, {"3": "x"}, {"3": True}, {"999999": 1}, {"-1": 1}, {"3": None}]),
    ("bad_words", [5, [5], [""], {}, ["x"] * 1001, ["a" * 65]]),
    ("ignore_eos", ["true", 1, []]),
    ("include_stop_str_in_output", ["x", 0]),
    ("skip_special_tokens", ["x", 0]),
    ("spaces_between_special_tokens", ["x"]),
    ("prompt_logprobs", [-1, 21, "x", True, 0.5]),
    ("stream", ["true", 1]),
    ("stream_options", [{"include_usage": True}, "x", []]),
    ("stream_interval", [0, "x", -1]),
    ("truncate_prompt_tokens", [0, -2, "x", 10**6]),
    ("truncation_side", ["middle", 1]),
    ("add_special_tokens", ["x", 1]),
    ("return_token_ids", ["x"]),
    ("return_tokens_as_token_ids", [1]),
    ("priority", ["x", 1.5, 2**40, -5, 1]),
    ("request_id", [5, ["a"]]),
    ("session_id", [5]),
    ("cache_salt", [5, "x" * 257]),
    ("user", [5, {}]),
    ("response_format", ["json", {"type": "json"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "a"}}]),
    ("structured_outputs", ["x", {"regex": 5}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": "a"}, {"json": ""}, {"jsn": {}}]),
    ("structured_outputs", [{"regex": ""}, {"json": {}, "whitespace_pattern": 5}, {"json": {}, "disable_additional_properties": True}]),
    ("guided_json", [5, [1]]),
    ("guided_regex", [5]),
    ("guided_choice", ["a", [1]]),
    ("guided_json_object", ["x"]),
    ("guided_decoding", [{"json": {}}]),
    ("kv_transfer_params", [{"do_remote_decode": True}]),
    ("logits_processors", [["x"]]),
    ("use_beam_search", ["x"]),
    ("num_beams", [0, 129, "x"]),
    ("early_stopping", ["x", True]),
    ("length_penalty", ["x", 2.0]),
]
ONLY_TEXT: list[tuple[str, list[Any]]] = [
    ("prompt", [None, "", [], 5, {}, [[]], [1.5], ["a", 5], [5, "a"], [[5], "a"], [[5, "a"]], [True], [-1], [10**6], [[5], [10**6]]]),
    ("prompt", [["a", ""]]),
    ("max_tokens", [0]),
    ("logprobs", [-1, 21, True, "x", 1.5]),
    ("echo", ["x", 1]),
    ("suffix", [5]),
    ("prompt_embeds", ["AAAA"]),
]
ONLY_CHAT: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0]),
    ("max_completion_tokens", [0, -1, "5", 10**9]),
    ("logprobs", [1, "x"]),
    ("top_logprobs", [1, -1, 21, "x"]),
    ("messages", [None, [], "hello", {}, 5]),
    ("tools", [{}, "x", [5], [{"type": "x"}], [FUNCTION]]),
    ("tool_choice", ["auto", "required", "sometimes", {"type": "function"}, {"type": "function", "function": {"name": "f"}}, 5]),
    ("parallel_tool_calls", ["x"]),
    ("add_generation_prompt", ["x", 1]),
    ("continue_final_message", ["x", True]),
    ("chat_template", [5, "{% broken", "{{ raise_exception('no') }}"]),
    ("chat_template_kwargs", ["x", []]),
    ("documents", ["x", ["a"]]),
    ("reasoning_effort", [5]),
    ("include_reasoning", ["x"]),
    ("thinking_token_budget", [5, -2, "x"]),
    ("modalities", [["text", "audio"], "x"]),
]
WRONG = [("text", *row) for row in BOTH + ONLY_TEXT] + [("chat", *row) for row in BOTH + ONLY_CHAT]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, name, values in WRONG for value in values],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_a_400_that_names_its_field(byte_level: Text, kind: str, name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse(kind, {name: value}, byte_level)
    status, body, _ = errors.error_body(caught.value)
    expected = 404 if isinstance(caught.value, UnknownModel) else 400
    assert (status, body["error"]["code"]) == (expected, expected)
    assert body["error"]["type"] == ("NotFoundError" if expected == 404 else "BadRequestError")
    assert (body["error"]["param"] or "").split(".")[0].split("[")[0] == name
    assert name in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"messages": [{"role": "user", "content": "x"}] * 513}, "messages"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"tools": [FUNCTION], "tool_choice": "none"}, "tools"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_place_is_named(byte_level: Text, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse("chat", body, byte_level)
    assert caught.value.param == param


NAMES = sorted({name for _, name, _ in WRONG} - {"prompt", "messages"})


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_null_equals_absent(byte_level: Text, kind: str) -> None:
    plain = parse(kind, {}, byte_level)
    for name in NAMES:
        assert parse(kind, {name: None}, byte_level) == plain, name


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_unknown_fields_are_reported_and_change_nothing(byte_level: Text, kind: str) -> None:
    extra = {"zeta": [1], "metadata": {"a": "b"}, "store": True}
    call = parse(kind, extra, byte_level)
    assert call.unknown == tuple(extra)
    assert call.requests == parse(kind, {}, byte_level).requests


# Real calls of other servers' clients; every one was answered with free text once.
FOREIGN: list[tuple[str, Any]] = [
    *[("functions", [{"name": "f"}]), ("function_call", "auto"), ("audio", {"voice": "x"}), ("verbosity", "low")],
    *[("regex", "a"), ("json_schema", {}), ("json_schema", "{}"), ("ebnf", "root ::= x"), ("grammar", "root ::= x"), ("lora_path", "p")],
    *[("adapter_id", "a"), ("lora_request", {"lora_name": "a"}), ("length_penalty", 2.0), ("early_stopping", True), ("num_beam_groups", 2)],
    *[("repeat_penalty", 1.3), ("n_predict", 64), ("tfs_z", 0.5), ("mirostat", 2), ("dry_multiplier", 0.8), ("xtc_probability", 0.5)],
    *[("do_sample", False), ("max_new_tokens", 9), ("stop_sequences", ["x"]), ("watermark", True), ("return_full_text", True)],
    ("system", "x"),
    *[("random_seed", 5), ("extra_body", {"top_k": 5}), ("sampling_params", {"top_k": 5}), ("no_stop_trim", True), ("top_a", 0.2)],
]
HARMLESS: list[tuple[str, Any]] = [
    *[("best_of", 1), ("functions", []), ("function_call", "none"), ("guided_regex", ""), ("watermark", False), ("suffix", "")],
    *[("length_penalty", 1.0), ("early_stopping", False), ("num_beams", 1), ("repeat_penalty", 1), ("typical_p", 1.0), ("mirostat", 0)],
    *[("do_sample", True), ("stop_sequences", []), ("return_full_text", False), ("lora_path", ""), ("sampling_params", {})],
    *[("top_n_sigma", -1), ("guided_json", None), ("json_schema", None), ("max_new_tokens", None)],
]


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_known_field_that_is_not_served_is_refused_by_name(byte_level: Text, kind: str) -> None:
    """Nothing that would change the answer is passed over; what asks for nothing passes, and is not called unknown."""
    for name, value in FOREIGN:
        with pytest.raises(RequestError, match=f"^{name} is not supported by this server: ") as caught:
            parse(kind, {name: value}, byte_level)
        assert caught.value.param == name
    plain = parse(kind, {}, byte_level)
    assert [name for name, value in HARMLESS if parse(kind, {name: value}, byte_level) != plain] == []
    assert parse(kind, {"n": 3, "best_of": 3}, byte_level).requests[0].params.n == 3
    with pytest.raises(RequestError, match="best_of"):
        parse(kind, {"n": 3, "best_of": True}, byte_level)


def test_a_field_of_the_other_endpoint_is_refused(byte_level: Text) -> None:
    for kind, field in (
        *[("text", {"max_completion_tokens": 5}), ("text", {"messages": CHAT["messages"]}), ("text", {"tools": [FUNCTION]})],
        *[("text", {"top_logprobs": 2}), ("text", {"suffix": "end"}), ("chat", {"prompt": "x"}), ("chat", {"echo": True})],
    ):
        with pytest.raises(RequestError) as caught:
            parse(kind, field, byte_level)
        assert caught.value.param == next(iter(field))


SETS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1}, {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1}),
    ({"typical_p": 0.3}, {"typical_p": 0.3}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.001}, {"temperature": 0.01}),
    ({"top_k": -1, "top_p": 1, "repetition_penalty": 1.2}, {"top_k": -1, "top_p": 1.0, "repetition_penalty": 1.2}),
    ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
    ({"n": 4, "seed": -5}, {"n": 4, "seed": -5}),
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"stop": ["x", "yy"], "include_stop_str_in_output": True}, {"stop": ("x", "yy"), "include_stop_str_in_output": True}),
    ({"stop_token_ids": [5, 6], "ignore_eos": True, "min_tokens": 2}, {"stop_token_ids": (5, 6), "ignore_eos": True, "min_tokens": 2}),
    ({"allowed_token_ids": [5], "banned_token_ids": [6]}, {"allowed_token_ids": (5,), "banned_token_ids": (6,)}),
    ({"logit_bias": {"5": 1e300, "6": -100.5, "7": 3}}, {"logit_bias": {5: 100.0, 6: -100.0, 7: 3.0}}),
    ({"no_repeat_ngram_size": 3, "skip_special_tokens": False}, {"no_repeat_ngram_size": 3, "skip_special_tokens": False}),
    ({"prompt_logprobs": 3}, {"prompt_logprobs": 3}),
    ({"max_tokens": 5.0}, {"max_tokens": 5}),
    ({"response_format": {"type": "text"}, "structured_outputs": {}, "use_beam_search": False}, {}),
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": Said(json_object=True, field="response_format")}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"structured_outputs": Said(choice=("a", "b"))}),
    ({"guided_json": {}}, {"structured_outputs": Said(json={}, field="guided_json")}),
    ({"guided_regex": "a+", "guided_json": None}, {"structured_outputs": Said(regex="a+", field="guided_regex")}),
]


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize(("body", "expected"), SETS, ids=lambda value: " ".join(value))
def test_values_arrive(byte_level: Text, kind: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    params = parse(kind, body, byte_level).requests[0].params
    plain = msgspec.structs.asdict(parse(kind, {}, byte_level).requests[0].params)
    assert msgspec.structs.asdict(params) == plain | expected


def test_logprobs_of_each_endpoint(byte_level: Text) -> None:
    assert [parse("text", {"logprobs": k}, byte_level).requests[0].params.logprobs for k in (0, 5, None)] == [0, 5, None]
    chats = (({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4), ({"logprobs": False, "top_logprobs": 0}, None))
    for body, count in chats:
        assert parse("chat", body, byte_level).requests[0].params.logprobs == count
    both = parse("text", {"logprobs": 2, "echo": True, "prompt_logprobs": 4}, byte_level)
    assert (both.requests[0].params.prompt_logprobs, both.logprobs, both.prompt_logprobs) == (4, 2, 4)


def test_bad_words_in_both_spellings(byte_level: Text, byte_fallback: Text) -> None:
    for text in (byte_level, byte_fallback):
        ids = parse("text", {"bad_words": ["the", " x"]}, text).requests[0].params.bad_words_ids
        encode = text.tokenizer.backend.encode
        assert tuple(encode("the", add_special_tokens=False).ids) in ids
        for word in ids:
            assert text.decode(word).strip() in ("the", "x")
    spaced = tuple(byte_level.encode(" the", add_special_tokens=False))
    if len(spaced) == len(byte_level.encode("the", add_special_tokens=False)):
        assert spaced in parse("text", {"bad_words": ["the"]}, byte_level).requests[0].params.bad_words_ids


def test_lengths(byte_level: Text) -> None:
    """Three defaults, what fits, and both numbers in a refusal."""
    size = len(parse("chat", {}, byte_level).requests[0].prompt_ids)
    words: dict[str, Any] = {"max_model_len": size + 8}

    def tokens(kind: str, body: dict[str, Any], **server: Any) -> int | None:
        return parse(kind, body, byte_level, **(words | server)).requests[0].params.max_tokens

    assert parse("text", {}, byte_level).requests[0].params.max_tokens == 16
    assert parse("text", {"max_tokens": None}, byte_level).requests[0].params.max_tokens == 16
    assert tokens("chat", {}) == 8, "chat: as many as fit"
    assert tokens("chat", {}, defaults={"max_tokens": 5}) == 5 and tokens("chat", {}, defaults={"max_tokens": 500}) == 8
    assert tokens("text", {"prompt": [5] * (size + 3)}) == 5, "the default is cut to what fits"
    assert tokens("chat", {"max_tokens": 3}) == 3 and tokens("chat", {"max_tokens": 3, "max_completion_tokens": 4}) == 4
    for kind, body, param, numbers in (
        ("chat", {"max_tokens": 9}, "max_tokens", (9, size, size + 8)),
        ("chat", {"max_completion_tokens": 9}, "max_completion_tokens", (9, size, size + 8)),
        ("text", {"prompt": [5] * size, "max_tokens": 9}, "max_tokens", (9, size, size + 8)),
        ("text", {"prompt": [5] * (size + 9)}, "input_tokens", (size + 9, size + 8)),
        ("text", {"prompt": [5] * (size + 8)}, "input_tokens", (size + 8,)),
        ("text", {"prompt": ["a", [5] * 3]}, "prompt", ()),
    ):
        with pytest.raises(RequestError) as caught:
            parse(kind, body, byte_level, **words)
        assert caught.value.param == param and all(str(number) in caught.value.message for number in numbers)
    assert tokens("text", {"prompt": [5] * (size + 8), "max_tokens": 0, "echo": True}) == 0, "scoring a prompt that fills the model"
    note = neuron_server.parse({"prompt": "x"}, playing.context(byte_level), request_id="r", created=1)
    assert note.requests[0].params.max_tokens == 100


def test_prompts_in_four_forms(byte_level: Text) -> None:
    hello, world = byte_level.encode("hello"), byte_level.encode("world")
    for prompt, expected in (
        ("hello", [hello]),
        (["hello", "world"], [hello, world]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["hello"], [hello]),
    ):
        call = parse("text", {"prompt": prompt}, byte_level)
        assert [request.prompt_ids for request in call.requests] == expected
        assert [request.id for request in call.requests] == [f"r1-{place}" for place in range(len(expected))]
        assert [*openai.prompts(call).values()] == list(range(len(expected)))
    assert parse("text", {"add_special_tokens": False}, byte_level).requests[0].prompt_ids == hello[1:]
    with pytest.raises(RequestError, match="at most 3 prompts, got 4"):
        parse("text", {"prompt": ["a"] * 4}, byte_level, max_prompts=3)
    assert parse("text", {"prompt": [5, 6], "echo": True}, byte_level).echo == (byte_level.decode([5, 6]),)


def test_truncation(byte_level: Text) -> None:
    ids = list(range(10, 30))
    for body, expected in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": 50}, ids),
        ({"truncate_prompt_tokens": -1, "max_tokens": 56}, ids[-8:]),
    ):
        call = parse("text", {"prompt": ids} | body, byte_level, max_model_len=64)
        assert call.requests[0].prompt_ids == expected
    whole = parse("chat", {}, byte_level).requests[0].prompt_ids
    assert parse("chat", {"truncate_prompt_tokens": 4}, byte_level).requests[0].prompt_ids == whole[-4:]


def test_chat_reaches_the_template(byte_level: Text) -> None:
    """Parts, roles, kwargs, a template of the client's, tools shown with tool_choice none."""
    template = "{% for m in messages %}({{ m['role'] }}:{{ m['content'] }}){% endfor %}{{ mood }}{{ reasoning_effort }}"
    template += "{{ documents or '' }}"

    def rendered(**body: Any) -> str:
        return byte_level.decode(parse("chat", {"chat_template": template} | body, byte_level).requests[0].prompt_ids, False)

    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert rendered(messages=[{"role": "user", "content": parts}]) == "(user:one\ntwo)"
    assert rendered(chat_template_kwargs={"mood": "!"}, reasoning_effort="low", documents=[{"a": "b"}]) == "(user:hello)!low[{'a': 'b'}]"
    for asked, mood in ({}, "?"), ({"chat_template_kwargs": {"mood": "!"}}, "!"):  # where the deployment says one, and a body another
        call = parse("chat", {"chat_template": template} | asked, byte_level, template_kwargs={"mood": "?"})
        assert byte_level.decode(call.requests[0].prompt_ids, False) == f"(user:hello){mood}"
    tools = "{{ tools[0]['function']['name'] }}{{ messages[0]['content'] }}"
    assert rendered(chat_template=tools, tools=[FUNCTION], tool_choice="none") == "fhello"
    called = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}]
    calls = "{{ messages[0].content }}{{ messages[1].tool_calls[0].function.name }}{{ messages[1].tool_calls[0].function.arguments.a + 1 }}"
    assert rendered(chat_template=calls, messages=called) == "xf2"
    with pytest.raises(RequestError, match="not accepted from clients"):
        parse("chat", {"chat_template": template}, byte_level, trust_chat_template=False)


def test_continue_the_final_message(byte_level: Text) -> None:
    told = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one,"}]
    body = {"messages": told, "add_generation_prompt": False, "continue_final_message": True}
    assert byte_level.decode(parse("chat", body, byte_level).requests[0].prompt_ids, False).endswith("assistant\none,")
    assert parse("chat", {"add_generation_prompt": False}, byte_level).role == "user"


def test_head(byte_level: Text) -> None:
    body = {"priority": -3, "cache_salt": "team", "stream": True, "stream_options": {"continuous_usage_stats": True}, "session_id": "s"}
    call = parse("chat", body, byte_level, client_priority=True)
    assert (call.requests[0].priority, call.requests[0].cache_salt) == (-3, "team")
    assert (call.head.include_usage, call.head.continuous_usage) == (False, False), "no usage unless include_usage"
    assert parse("text", {"model": "tiny"}, byte_level).head.model == "tiny"
    with pytest.raises(UnknownModel) as caught:
        parse("text", {"model": "gpt-4"}, byte_level)
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert caught.value.message == "The model `gpt-4` does not exist. There are: tiny"


def test_ids_of_replies(byte_level: Text) -> None:
    context, words = playing.context(byte_level), {"request_id": "own", "created": 1}
    for body, client, expected in (
        ({}, None, "chatcmpl-own"),
        ({}, "theirs", "chatcmpl-theirs"),
        ({"request_id": "body"}, "theirs", "chatcmpl-body"),
    ):
        call = openai.parse_chat(CHAT | body, context, client_id=client, **words)
        assert (call.id, call.requests[0].id) == (expected, "own-0"), "the engine's key is never the client's"
    assert openai.clean_id("a" * 300) == "a" * 256
    assert openai.clean_id("id\r\nX-Evil: 1\tü") == "id_X-Evil:_1_"
    assert openai.clean_id("  ") is None and openai.clean_id(None) is None and openai.clean_id("") is None


def test_defaults_of_the_model(byte_level: Text) -> None:
    """generation_config.json, then the deployment, then the body; a wrong default is the deployment's error, at start."""
    file = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "eos_token_id": 2, "max_new_tokens": 40, "do_sample": True, "min_p": None}
    defaults = openai.sampling_defaults(file, {"top_p": 0.8, "stop": ["END"]})
    assert defaults == {"temperature": 0.6, "top_p": 0.8, "top_k": 50, "max_tokens": 40, "stop": ["END"]}
    for kind in ("text", "chat"):
        params = parse(kind, {"top_k": 7}, byte_level, defaults=defaults).requests[0].params
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.stop) == (0.6, 0.8, 7, 40, ("END",))
    for overrides in ({"temperatur": 1}, {"temperature": 9}, {"logprobs": 1}, {"top_k": "x"}, {"stop": ["x"] * 129}):
        with pytest.raises(ConfigError, match=next(iter(overrides))):
            openai.sampling_defaults(file, overrides)
    with pytest.raises(ConfigError, match="temperature"):
        openai.sampling_defaults({"temperature": -1})


def test_escaped_surrogate_pairs_are_characters() -> None:
    assert openai.decode(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\N{GRINNING FACE}"}


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[]", b'"x"', b"5", b"null", b"[" * 10**5),
        *(b'{"a": NaN}', b'{"a": 1e400}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a": 1}}'),
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        openai.decode(raw)
    assert errors.error_body(caught.value)[0] == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"inputs": "x"}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
    ],
)
def test_the_note_refuses(byte_level: Text, body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        neuron_server.parse(body, playing.context(byte_level), request_id="r", created=1)
    assert caught.value.param == param


def test_the_note_takes_a_chat(byte_level: Text) -> None:
    assert neuron_server.parse(CHAT, playing.context(byte_level), request_id="r", created=1).id == "chatcmpl-r"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@examples(500, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["text", "chat"]), body=st.dictionaries(st.sampled_from([*NAMES, "prompt", "messages"]), JSON, max_size=4))
def test_no_body_is_a_server_error(byte_level: Text, kind: str, body: dict[str, Any]) -> None:
    """Whatever JSON a field holds: a call whose every value is finite and legal, or a 4xx."""
    try:
        call = parse(kind, body, byte_level)
    except RayNeuronError as wrong:
        assert 400 <= errors.error_body(wrong)[0] < 500
        return
    for request in call.requests:
        assert request.prompt_ids and all(0 <= token_id < byte_level.vocab_size for token_id in request.prompt_ids)
        assert request.params.max_tokens is not None and math.isfinite(request.params.temperature)
        assert len(request.prompt_ids) + request.params.max_tokens <= 512
