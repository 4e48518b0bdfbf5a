"""Every dialect beside OpenAI's two: bodies, replies, and streams that are the reply however the tokens fall into steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rayneuron.api import anthropic, errors, lmi, neuron_server, openai, responses, routes, sagemaker, tgi
from rayneuron.api.call import Call, Dialect, LmiOptions
from rayneuron.errors import RequestError, UnknownModel
from rayneuron.text.text import Text
from rayneuron.types import Delta
from tests.api import playing

SAMPLES = ("hi 👩‍👧!", "水は", "ab ab")
ENDS: list[dict[str, Any]] = [{"finish": "length"}, {"finish": "stop", "eos": True}]


def read(dialect: Dialect, body: Mapping[str, Any], text: Text, **server: Any) -> Call:
    body = openai.decode(json.dumps(body))
    spoken = dialect if dialect.choose is None else dialect.choose(body)
    return spoken.parse(body, playing.context(text, **server), request_id="call", created=123)


def sse(raw: bytes) -> list[tuple[str | None, dict[str, Any]]]:
    """Events as (name, content), their framing checked."""
    found = []
    for part in raw.removesuffix(b"\n\n").split(b"\n\n"):
        name, _, data = part.rpartition(b"\n")
        assert data.startswith(b"data: ") and (not name or name.startswith(b"event: "))
        found.append((name[7:].decode() or None, json.loads(data[6:])))
    return found


def joined_anthropic(raw: bytes) -> dict[str, Any]:
    """As Anthropic's SDK accumulates a message."""
    state: dict[str, Any] = {}
    order = []
    for name, event in sse(raw):
        assert name == event["type"]
        order.append(name)
        if name == "message_start":
            state = event["message"]
        elif name == "content_block_start":
            assert event["index"] == len(state["content"])
            state["content"].append(event["content_block"])
        elif name == "content_block_delta":
            assert event["delta"]["type"] == "text_delta"
            state["content"][event["index"]]["text"] += event["delta"]["text"]
        elif name == "message_delta":
            state |= event["delta"]
            state["usage"] |= event["usage"]
    assert order[0] == "message_start" and order[-2:] == ["message_delta", "message_stop"]
    return state


NEXT = {  # Responses: which event may follow which
    None: ["response.created"],
    "response.created": ["response.in_progress"],
    "response.in_progress": ["response.output_item.added"],
    "response.output_item.added": ["response.content_part.added"],
    "response.content_part.added": ["response.output_text.delta", "response.output_text.done"],
    "response.output_text.delta": ["response.output_text.delta", "response.output_text.done"],
    "response.output_text.done": ["response.content_part.done"],
    "response.content_part.done": ["response.output_item.done"],
    "response.output_item.done": ["response.completed", "response.incomplete", "response.failed"],
}


def joined_responses(raw: bytes) -> dict[str, Any]:
    """The last event's response; that it is what the events before add up to is asserted."""
    before, text, logprobs = None, "", []
    for number, (name, event) in enumerate(sse(raw)):
        assert name == event["type"] and event["sequence_number"] == number and name in NEXT[before]
        before = name
        if name == "response.output_text.delta":
            text += event["delta"]
            logprobs += event["logprobs"]
        elif name == "response.output_text.done":
            assert event["text"] == text and event["logprobs"] == logprobs
        elif name == "response.output_item.done":
            item = event["item"]
    assert event["response"]["output"] == [item] and item["content"][0]["text"] == text and before not in NEXT
    return event["response"]


def joined_tgi(raw: bytes) -> dict[str, Any]:
    events = [content for name, content in sse(raw) if name is None]
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    last = events[-1]
    details = {name: value for name, value in last["details"].items() if name != "input_length"}
    tokens = {"tokens": [event["token"] for event in events], "prefill": []}
    shown = "".join(event["token"]["text"] for event in events if not event["token"]["special"])
    assert last["generated_text"].endswith(shown)
    return {"generated_text": last["generated_text"], "details": {**details, **tokens}}


def joined_lmi(raw: bytes) -> dict[str, Any]:
    lines = [json.loads(line) for line in raw.removesuffix(b"\n").split(b"\n")]
    assert all(set(line) == {"token"} for line in lines[:-1])
    last = lines[-1]
    return {"generated_text": last["generated_text"], "details": {**last["details"], "tokens": [line["token"] for line in lines]}}


def joined_note(raw: bytes) -> dict[str, Any]:
    chunks = openai.chunks(raw)
    text = "".join(chunk.get("text", "") for chunk in chunks)
    (reason,) = [chunk["finish_reason"] for chunk in chunks if chunk.get("finish_reason")]
    return {"model": "tiny", "text": text, "generated_text": text, "finish_reason": reason, "usage": chunks[-1]["usage"]}


USER = [{"role": "user", "content": "say 水"}]
SHAPES: dict[str, tuple[Dialect, dict[str, Any], str, Callable[[bytes], dict[str, Any]], dict[str, Any]]] = {
    "anthropic": (anthropic.MESSAGES, {"messages": USER, "max_tokens": 30, "stream": True}, "stop_sequences", joined_anthropic, {}),
    "responses": (
        responses.CREATE,
        {"input": "say 水", "stream": True, "include": ["message.output_text.logprobs"]},
        "",
        joined_responses,
        {},
    ),
    "tgi": (tgi.GENERATE, {"inputs": "say 水", "stream": True, "parameters": {"details": True}}, "parameters.stop", joined_tgi, {}),
    "lmi": (
        lmi.INFERENCE,
        {"inputs": "say 水", "stream": True, "parameters": {"details": True}},
        "parameters.stop_sequences",
        joined_lmi,
        {},
    ),
    "lmi as tgi": (
        lmi.INFERENCE,
        {"inputs": "say 水", "stream": True},
        "parameters.stop",
        lambda raw: joined_lmi(b"".join(part.removeprefix(b"data: ") + b"\n" for part in raw.split(b"\n\n") if part)),
        {"lmi": LmiOptions(tgi_compat=True)},
    ),
    "note": (neuron_server.GENERATE, {"prompt": "say 水", "stream": True}, "stop", joined_note, {}),
}


def asking(body: dict[str, Any], place: str, value: object) -> dict[str, Any]:
    outer, _, inner = place.partition(".")
    return {**body, outer: {**body.get(outer, {}), inner: value} if inner else value}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("stops", [None, ["!", "b a", "は"]], ids=["plain", "stops"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_stream_is_the_reply_at_every_cut(text: Text, name: str, stops: list[str] | None, sample: str) -> None:
    dialect, body, place, join, server = SHAPES[name]
    body = asking(body, place, stops) if stops and place else body
    ids = text.encode(sample, add_special_tokens=False)[-6:]
    for end in ENDS:
        call = read(dialect, body, text, **server)
        tokens, seen = [*ids, 2] if end.get("eos") else ids, []
        for sizes in playing.cuts(len(tokens)):
            deltas = playing.assemble(call.requests[0], text, playing.play(call.requests[0], tokens, sizes, **end))
            stream = call.answer.open(call)
            raw = stream.first() + b"".join(map(stream.chunk, deltas))
            assert stream.done and not stream.failed
            seen += [call.reply(deltas), join(raw + stream.last())]
        whole = seen[0][0] if isinstance(seen[0], list) else seen[0]
        assert all((reply[0] if isinstance(reply, list) else reply) == whole for reply in seen)


def test_tokens_add_up_to_the_text_and_know_their_probabilities(byte_level: Text) -> None:
    """TGI keeps the stop string in the text; LMI, as vLLM, does not. Special tokens are named and marked."""
    ids = byte_level.encode("水 ok! more", add_special_tokens=False)
    for dialect, included, logprob in ((tgi.GENERATE, True, "logprob"), (lmi.INFERENCE, False, "log_prob")):
        body = {"inputs": "x", "parameters": {"details": True, "top_n_tokens": 2, "stop": ["k!"], "decoder_input_details": True}}
        call = read(dialect, body, byte_level)
        deltas = playing.assemble(call.requests[0], byte_level, playing.play(call.requests[0], ids, [1] * len(ids)))
        reply = call.reply(deltas)
        details = reply["details"]
        assert reply["generated_text"] == "".join(token["text"] for token in details["tokens"]) == ("水 ok!" if included else "水 o")
        assert details["finish_reason"] == "stop_sequence" and details["generated_tokens"] == len(details["tokens"])
        expected = [playing.probability(token["id"], 2, 1000).logprob for token in details["tokens"]]
        assert [token[logprob] for token in details["tokens"]] == expected
        assert [len(top) for top in details["top_tokens"]] == [2] * len(expected)
        assert [token["id"] for token in details["prefill"]] == call.requests[0].prompt_ids and details["prefill"][0]["logprob"] is None
    call = read(tgi.ROOT, {"inputs": "x", "parameters": {"details": True, "return_full_text": True}}, byte_level)
    deltas = playing.assemble(call.requests[0], byte_level, playing.play(call.requests[0], [ids[0], 2], [2], finish="stop", eos=True))
    (reply,) = call.reply(deltas)
    assert reply["details"]["tokens"][-1] == {"id": 2, "text": "</s>", "logprob": pytest.approx(-0.402), "special": True}
    assert reply["generated_text"] == "x" + byte_level.decode(ids[:1]) and reply["details"]["finish_reason"] == "eos_token"


@pytest.mark.parametrize(
    ("dialect", "given", "told"),
    [
        (tgi.GENERATE, {}, {"temperature": 0.0, "max_tokens": 100, "include_stop_str_in_output": True, "logprobs": 0}),
        (tgi.GENERATE, {"do_sample": True}, {"temperature": 1.0}),
        (
            tgi.GENERATE,
            {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 5, "repetition_penalty": 1.1},
            {"temperature": 0.5, "top_k": 3},
        ),
        (tgi.GENERATE, {"max_new_tokens": 7, "stop": ["a"], "truncate": 2}, {"max_tokens": 7, "stop": ("a",)}),
        (lmi.INFERENCE, {}, {"temperature": 0.0, "max_tokens": 30, "include_stop_str_in_output": False}),
        (lmi.INFERENCE, {"do_sample": False, "temperature": 0.7, "top_k": 5}, {"temperature": 0.0, "top_k": 0}),
        (lmi.INFERENCE, {"temperature": 0.7, "min_p": 0.1}, {"temperature": 0.7, "min_p": 0.1}),
        (lmi.INFERENCE, {"stop_token_ids": 5, "ignore_eos_token": True}, {"stop_token_ids": (5,), "ignore_eos": True}),
    ],
)
def test_parameters_mean_what_they_mean_there(byte_level: Text, dialect: Dialect, given: dict[str, Any], told: dict[str, Any]) -> None:
    params = read(dialect, {"inputs": "say hello", "parameters": given}, byte_level).requests[0].params
    assert {name: getattr(params, name) for name in told} == told


WRONG: list[tuple[Dialect, dict[str, Any], str]] = [
    (tgi.GENERATE, {}, "inputs"),
    (tgi.GENERATE, {"inputs": 5}, "inputs"),
    (tgi.GENERATE, {"inputs": "x", "parameters": []}, "parameters"),
    *(
        (dialect, {"inputs": "x", "parameters": {name: value}}, f"parameters.{name}")
        for dialect in (tgi.GENERATE, lmi.INFERENCE)
        for name, values in {
            "max_new_tokens": [0, "5", 10**9], "temperature": ["x", 9], "top_p": ["x", 5], "top_k": ["x"], "stop": [[5], ["a"] * 129],
            "repetition_penalty": [0], "seed": ["x"], "truncate": [0, "x"], "top_n_tokens": [21], "details": ["x"], "do_sample": ["x"],
            "best_of": [2], "typical_p": [0, 1.5], "grammar": [{"type": "odd", "value": "a"}], "watermark": [True], "adapter_id": ["a"],
            "return_full_text": [1], "decoder_input_details": ["x"], "num_beams": [0],
        }.items()
        for value in values
    ),
    (tgi.STREAM, {"inputs": "x", "parameters": {"decoder_input_details": True}}, "parameters.decoder_input_details"),
    (lmi.INFERENCE, {"inputs": "x", "adapters": "a"}, "adapters"),
    (lmi.INFERENCE, {"inputs": "x", "parameters": {"n": 2}}, "parameters.n"),
    (sagemaker.INVOCATIONS, {}, "inputs"),
    (anthropic.MESSAGES, {"messages": USER}, "max_tokens"),
    *(
        (anthropic.MESSAGES, {"messages": USER, "max_tokens": 5} | given, name)
        for given, name in (
            ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"), ({"system": 5}, "system"),
            ({"messages": []}, "messages"),
            ({"messages": ["x"]}, "messages[0]"), ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
            ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
            ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
            ({"stop_sequences": [5]}, "stop_sequences"), ({"stop_sequences": ["a"] * 129}, "stop_sequences"),
            ({"temperature": "x"}, "temperature"),
            ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"thinking": {"type": "x"}}, "thinking.type"), ({"stream": "x"}, "stream"), ({"top_k": "x"}, "top_k"),
        )
    ),
    *(
        (responses.CREATE, {"input": "x"} | given, name)
        for given, name in (
            ({"input": None}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": [5]}, "input[0]"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
            ({"input": [{"type": "computer_call"}]}, "input[0].type"), ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 10**9}, "max_output_tokens"), ({"store": True}, "store"), ({"background": True}, "background"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "c"}, "conversation"),
            ({"prompt": {"id": "p"}}, "prompt"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tool_choice": "required"}, "tool_choice"),
            ({"truncation": "x"}, "truncation"),
            ({"text": {"format": {"type": "odd"}}}, "text.format.type"), ({"temperature": "x"}, "temperature"),
            ({"include": "x"}, "include"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "body", "name"), WRONG, ids=lambda value: str(value)[:60] if not isinstance(value, Dialect) else "")
def test_a_wrong_field_is_named_as_it_was_written(byte_level: Text, dialect: Dialect, body: dict[str, Any], name: str) -> None:
    if dialect is tgi.GENERATE and name in ("parameters.top_k", "parameters.num_beams") and not body["parameters"]:
        return
    with pytest.raises(RequestError) as caught:
        read(dialect, body, byte_level)
    assert caught.value.param == name, caught.value.message
    assert name.split("[")[0] in caught.value.message


def test_another_model_is_unknown_in_every_dialect(byte_level: Text) -> None:
    for dialect, body, *_ in SHAPES.values():
        with pytest.raises(UnknownModel):
            read(dialect, {**body, "model": "other"}, byte_level)


def test_conversations_are_told_as_openais(byte_level: Text) -> None:
    """System words, blocks, calls of tools and their results: the same prompt as the chat that says them OpenAI's way."""

    def ids(dialect: Dialect, body: dict[str, Any]) -> list[int]:
        return read(dialect, body, byte_level).requests[0].prompt_ids

    arguments = '{"city":"Bern"}'
    called = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "wait", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "t1", "content": "warm"},
        {"role": "user", "content": "and?"},
    ]
    want = ids(openai.CHAT, {"messages": chat})
    theirs = [
        {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Bern"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "warm"}, {"type": "text", "text": "and?"}]},
    ]
    body = {"system": [{"type": "text", "text": "be brief"}], "messages": theirs, "max_tokens": 5}
    assert ids(anthropic.MESSAGES, body) == want
    assert anthropic.count_tokens(body, playing.context(byte_level)) == {"input_tokens": len(want)}
    plain = [chat[0], chat[1], {"role": "assistant", "content": "", "tool_calls": [called]}, *chat[3:]]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "t1", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "t1", "output": "warm"},
        {"type": "message", "role": "user", "content": "and?"},
    ]
    told = {"instructions": "be brief", "input": items}
    assert (prompt := ids(responses.CREATE, told)) == ids(openai.CHAT, {"messages": plain})
    counted = {"object": "response.input_tokens", "input_tokens": len(prompt)}
    assert responses.count_tokens(told, playing.context(byte_level)) == counted
    with pytest.raises(UnknownModel):
        responses.count_tokens(told | {"model": "other"}, playing.context(byte_level))


def test_the_formatter_decides_whether_lmi_streams(byte_level: Text) -> None:
    for formatter, asked, streams, kind in (
        (None, False, False, ""), (None, True, True, "application/jsonlines"), ("json", True, False, ""),
        ("jsonlines", False, True, "application/jsonlines"), ("sse", False, True, "text/event-stream"),
    ):  # fmt: skip
        call = read(lmi.INFERENCE, {"inputs": "x", "stream": asked}, byte_level, lmi=LmiOptions(formatter))
        assert call.head.stream is streams and (not streams or call.answer.open(call).content_type == kind)


def test_sagemaker_goes_by_key_path_and_header(byte_level: Text) -> None:
    words = {"request_id": "r", "created": 1}
    context = playing.context(byte_level)
    for body, prefix in (({"messages": USER}, "chatcmpl"), ({"prompt": "x"}, "cmpl"), ({"inputs": "x"}, "cmpl")):
        spoken = sagemaker.INVOCATIONS.choose(body)  # type: ignore[misc]
        assert spoken.parse(body, context, **words).id.startswith(prefix)
    head = sagemaker.INVOCATIONS.head
    assert head is not None
    assert head({"model": "tiny"}, lambda name: None) == {"model": "tiny"} and head({}, lambda name: None) == {}
    assert head({}, {"x-amzn-sagemaker-target-model": "tiny"}.get) == {"model": "tiny"}
    assert head({"model": "tiny"}, {"x-amzn-sagemaker-adapter-identifier": "a"}.get) == {"model": "tiny", "adapters": "a"}
    with pytest.raises(RequestError, match="leave X-Amzn-SageMaker"):
        head({}, {"x-amzn-sagemaker-session-id": "x"}.get)
    adapted = playing.context(byte_level, adapters=lambda: {"a": "content"})
    for body in ({"messages": USER}, {"prompt": "x"}, {"inputs": "x"}):
        spoken = sagemaker.INVOCATIONS.choose(body)  # type: ignore[misc]
        assert spoken.parse({**body, "adapters": "a"}, adapted, **words).requests[0].adapter == "content"
        with pytest.raises(UnknownModel):
            spoken.parse({**body, "adapters": "b"}, adapted, **words)


def test_tgi_tokenizes(byte_level: Text) -> None:
    context = playing.context(byte_level)
    tokens = tgi.tokenize({"inputs": "say 水"}, context)
    assert [token["id"] for token in tokens] == byte_level.encode("say 水")
    assert tokens[-1]["stop"] == len(byte_level.decode([t["id"] for t in tokens], False))
    chat = tgi.chat_tokenize({"messages": USER}, context)
    assert chat["templated_text"].endswith("<|im_start|>assistant\n")
    assert [t["id"] for t in chat["tokenize_response"]] == byte_level.chat(USER)


STATUSES = (400, 401, 404, 405, 408, 413, 415, 429, 500, 503)
TABLE: dict[str, dict[int, tuple[int, str | None]]] = {  # path -> our status -> theirs, and what its kind is called
    "/v1/chat/completions": {status: (status, errors.TYPES[status]) for status in STATUSES},
    "/v1/responses": {status: (status, errors.TYPES[status]) for status in STATUSES},
    "/v1/messages": {
        400: (400, "invalid_request_error"), 401: (401, "authentication_error"), 404: (404, "not_found_error"),
        405: (405, "invalid_request_error"), 408: (408, "timeout_error"), 413: (413, "request_too_large"),
        415: (415, "invalid_request_error"), 429: (429, "rate_limit_error"), 500: (500, "api_error"), 503: (529, "overloaded_error"),
    },
    "/generate_stream": {
        400: (422, "validation"), 401: (401, "validation"), 404: (404, "not_found"), 405: (405, "validation"), 408: (424, "generation"),
        413: (413, "validation"), 415: (415, "validation"), 429: (429, "overloaded"), 500: (424, "generation"), 503: (503, "overloaded"),
    },
    "/invocations": {
        400: (424, None), 401: (401, "BadRequestException"), 404: (404, "ModelNotFoundException"), 405: (405, "MethodNotAllowedException"),
        408: (408, "BadRequestException"), 413: (413, "BadRequestException"), 415: (415, "BadRequestException"),
        429: (503, "ServiceUnavailableException"), 500: (500, "InternalServerException"), 503: (503, "ServiceUnavailableException"),
    },
    "/models": {
        400: (400, "BadRequestException"), 401: (401, "AuthenticationError"), 404: (404, "ModelNotFoundException"),
        405: (405, "MethodNotAllowedError"), 408: (408, "RequestTimeoutError"), 413: (413, "RequestTooLargeError"),
        415: (415, "UnsupportedMediaTypeError"), 429: (429, "RateLimitError"), 500: (500, "InternalServerError"),
        503: (503, "ServiceUnavailableError"),
    },
}  # fmt: skip
SAME = {
    "/v1/completions": "/v1/chat/completions", "/generate": "/v1/chat/completions", "/": "/generate_stream", "/info": "/generate_stream",
    "/predictions/tiny": "/invocations", "/models/tiny/invoke": "/invocations", "/models/tiny": "/models",
    "/v1/models": "/v1/chat/completions", "/v1/models/tiny": "/v1/chat/completions",
    "/m/x/v1/messages": "/v1/messages", "/m/x/": "/generate_stream", "/m/x/invocations": "/invocations",
    "/v1/messages/count_tokens": "/v1/messages", "/v1/messages/": "/v1/messages", "/v1/chat/completions/": "/v1/chat/completions",
}  # fmt: skip


@pytest.mark.parametrize("path", [*TABLE, *SAME])
@pytest.mark.parametrize("status", STATUSES)
def test_each_class_of_error_in_each_dialects_own_shape(path: str, status: int) -> None:
    given = errors.error_reply(status, "what is wrong", "field", retry_after_s=2)
    theirs, body, headers = routes.shaped(given, path)
    expected, kind = TABLE[SAME.get(path, path)][status]
    assert (theirs, headers) == (expected, {"Retry-After": "2"})
    managed = {"code": expected, "type": kind, "message": "what is wrong"}
    shapes = {
        "/v1/messages": {"type": "error", "error": {"type": kind, "message": "what is wrong"}},
        "/generate_stream": {"error": "what is wrong", "error_type": kind},
        "/invocations": managed if kind else {"error": "what is wrong", "code": expected},
        "/models": managed,
    }
    assert body == shapes.get(SAME.get(path, path), given[1])


@pytest.mark.parametrize("name", SHAPES)
def test_a_stream_that_fails_ends_in_the_dialects_own_error(byte_level: Text, name: str) -> None:
    dialect, body, _, _, server = SHAPES[name]
    call = read(dialect, body, byte_level, **server)
    broken = Delta(request_id="call-0", index=0, text="", token_ids=[], finish_reason="error", error="rank 3 is gone")
    stream = call.answer.open(call)
    assert stream.first() is not None
    raw = stream.chunk(broken)
    assert (stream.done, stream.failed, stream.chunk(broken)) == (True, True, b"") and b"rank 3 is gone" in raw
    if name == "anthropic":
        assert sse(raw) == [("error", {"type": "error", "error": {"type": "api_error", "message": "rank 3 is gone"}})]
    elif name == "responses":
        ((kind, event),) = sse(raw)
        assert kind == "response.failed" and event["response"]["status"] == "failed"
    elif name == "tgi":
        assert sse(raw) == [(None, {"error": "rank 3 is gone", "error_type": "generation"})]
    elif name == "lmi":
        line = json.loads(raw)
        assert line["token"]["id"] == -1 and line["details"]["finish_reason"] == "error" and line["code"] == 500
    assert b"secret" not in call.answer.open(call).error(ValueError("secret path"))
    with pytest.raises(Exception, match="rank 3 is gone"):
        call.reply([broken])


def test_what_a_dead_replica_leaves_is_ended_for_its_reader() -> None:
    gone = errors.error_reply(503, "gone")
    assert routes.cut_off(gone, "/v1/chat/completions", "text/event-stream").endswith(b"}\n\ndata: [DONE]\n\n")
    assert routes.cut_off(gone, "/m/v1/messages", "text/event-stream").startswith(b"event: error\ndata: ")
    assert routes.cut_off(gone, "/v1/responses", "text/event-stream").startswith(b"event: error\ndata: ")
    assert sse(routes.cut_off(gone, "/generate_stream", "text/event-stream")) == [(None, {"error": "gone", "error_type": "overloaded"})]
    assert json.loads(routes.cut_off(gone, "/invocations", "application/jsonlines"))["code"] == 503
