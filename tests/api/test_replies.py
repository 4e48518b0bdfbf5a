"""Replies as clients read them: the official client in strict mode, log-probabilities, offsets, models, tokens, error bodies."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai as client
import pytest

from rayneuron.api import errors, openai
from rayneuron.api.call import Context
from rayneuron.config import parse
from rayneuron.errors import Busy, ConfigError, NotReady, RayNeuronError, RequestError, RequestTimeout, UnknownModel, WorkerLost
from rayneuron.text.text import Text
from rayneuron.text.wordless import Wordless
from rayneuron.types import TokenLogprobs
from tests.api import playing

Respond = Callable[[httpx2.Request], httpx2.Response]


def talk(context: Context, answer: str = "It is 水 👍🏽!", fail: BaseException | None = None) -> client.OpenAI:
    """The official client in strict mode over a server that is only our parse, Assembler and reply."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        try:
            if request.url.path.endswith("/models"):
                return httpx2.Response(200, json=openai.models_list([openai.model_card("tiny", 512, 5)]))
            body = openai.decode(request.read())
            verb = openai.parse_chat if "chat" in request.url.path else openai.parse_completions
            call = verb(body, context, request_id="abc", created=1700000000)
            if fail is not None:
                raise fail
        except RayNeuronError as wrong:
            status, reply, headers = errors.error_body(wrong)
            return httpx2.Response(status, json=reply, headers=headers)
        text: Any = context.text
        deltas = []
        for engine_request in call.requests:
            for index in range(call.n):
                ids = [*text.encode(answer, add_special_tokens=False), 2]
                played = playing.play(engine_request, ids, [1] * len(ids), index=index, finish="stop", eos=True, vocab_size=400)
                deltas += playing.assemble(engine_request, text, played)
        if not call.head.stream:
            return httpx2.Response(200, content=errors.encode(call.reply(deltas)), headers={"content-type": "application/json"})
        stream = call.answer.open(call)
        raw = stream.first() + b"".join(map(stream.chunk, deltas)) + stream.last()
        return httpx2.Response(200, content=raw, headers={"content-type": stream.content_type})

    transport = httpx2.Client(transport=httpx2.MockTransport(respond))
    return client.OpenAI(api_key="none", base_url="http://x/v1", http_client=transport, max_retries=0, _strict_response_validation=True)


CHAT: Any = [{"role": "user", "content": "What is it?"}]


def test_strict_client_unary(text: Text) -> None:
    said = talk(playing.context(text))
    assert [model.id for model in said.models.list()] == ["tiny"]
    chat = said.chat.completions.create(model="tiny", messages=CHAT, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content.lstrip() for choice in chat.choices if choice.message.content] == ["It is 水 👍🏽!"] * 2
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    spelled = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content[:-1])
    assert spelled.decode().lstrip() == "It is 水 👍🏽!", "the true bytes of every token, EOS left out"
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * len(logprobs.content)
    assert (chat.choices[1].finish_reason, chat.id, chat.created) == ("stop", "chatcmpl-abc", 1700000000)
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    done = said.completions.create(model="tiny", prompt=["a", "b"], logprobs=1, max_tokens=60, stop=["👍"])
    seen = [(choice.index, choice.text.lstrip(), choice.finish_reason) for choice in done.choices]
    assert seen == [(0, "It is 水 ", "stop"), (1, "It is 水 ", "stop")]
    assert done.choices[0].stop_reason == "👍"  # type: ignore[attr-defined]


def test_a_prediction_is_read_and_what_came_of_it_is_told(byte_level: Text) -> None:
    context = playing.context(byte_level)
    for content in ("It is 水", [{"type": "text", "text": "It is "}, {"type": "text", "text": "水"}]):
        body = {"model": "tiny", "messages": CHAT, "prediction": {"type": "content", "content": content}}
        call = openai.parse_chat(body, context, request_id="abc", created=1)
        assert byte_level.decode(call.requests[0].prediction or []) == "It is 水" and not call.unknown
        played = playing.play(call.requests[0], [40, 41, 42, 43], [2, 2])
        played[0].predicted, played[1].predicted = (1, 0), (1, 3)  # so far
        made = list(playing.assemble(call.requests[0], byte_level, played))
        details = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 3}
        assert call.reply(made)["usage"]["completion_tokens_details"] == details
    plain = openai.parse_chat({"model": "tiny", "messages": CHAT}, context, request_id="abc", created=1)
    assert "completion_tokens_details" not in plain.reply(playing.assemble(plain.requests[0], byte_level, played))["usage"]


@pytest.mark.parametrize("said", [{"type": "text", "content": "a"}, {"type": "content"}, {"type": "content", "content": [{"type": "x"}]}])
def test_a_wrong_prediction_is_refused_by_name(byte_level: Text, said: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": CHAT, "prediction": said}
    with pytest.raises(RequestError, match="content") as wrong:
        openai.parse_chat(body, playing.context(byte_level), request_id="abc", created=1)
    assert wrong.value.param in ("prediction.type", "prediction.content")


def test_strict_client_streams(text: Text) -> None:
    said = talk(playing.context(text))
    options: Any = {"include_usage": True}
    chunks = list(said.chat.completions.create(model="tiny", messages=CHAT, stream=True, stream_options=options, logprobs=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert joined.lstrip() == "It is 水 👍🏽!"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 5
    with said.chat.completions.stream(model="tiny", messages=CHAT) as stream:
        assert (stream.get_final_completion().choices[0].message.content or "").lstrip() == "It is 水 👍🏽!"


@pytest.mark.parametrize(
    ("fail", "kind", "retry"),
    [
        (Busy("full", retry_after_s=2.3), client.RateLimitError, "3"),
        (Busy("full"), client.RateLimitError, "1"),
        (NotReady("loading"), client.InternalServerError, "1"),
        (WorkerLost("rank 3 is gone"), client.InternalServerError, "1"),
        (RequestError("bad", param="n"), client.BadRequestError, None),
        (UnknownModel("no", param="model"), client.NotFoundError, None),
        (RequestTimeout("late"), client.APIStatusError, None),
    ],
)
def test_client_sees_the_right_error(byte_level: Text, fail: RayNeuronError, kind: type[client.APIStatusError], retry: str | None) -> None:
    with pytest.raises(kind) as caught:
        talk(playing.context(byte_level), fail=fail).completions.create(model="tiny", prompt="x")
    wrong = caught.value
    assert (wrong.status_code, wrong.param, wrong.code) == (fail.status, fail.param, str(fail.status))
    assert wrong.response.headers.get("retry-after") == retry
    body = wrong.response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"} and body["code"] == fail.status


def test_error_bodies() -> None:
    kinds = {RequestError: "BadRequestError", UnknownModel: "NotFoundError", NotReady: "ServiceUnavailableError", Busy: "RateLimitError"}
    for kind, name in kinds.items():
        assert errors.error_body(kind("m"))[1]["error"]["type"] == name
    assert errors.error_body(ConfigError("m"))[0] == 400
    status, body, headers = errors.error_body(KeyError("/secret/path"))
    assert (status, headers) == (500, {}) and "secret" not in json.dumps(body) and body["error"]["type"] == "InternalServerError"
    assert errors.error_reply(401, "no key")[1]["error"] == {"message": "no key", "type": "AuthenticationError", "param": None, "code": 401}
    assert errors.error_reply(418, "x")[1]["error"]["type"] == "BadRequestError"


def completion(text: Text, body: dict[str, Any], answer: list[int], **words: Any) -> dict[str, Any]:
    call = openai.parse_completions(body, playing.context(text), request_id="c", created=1)
    deltas = playing.assemble(call.requests[0], text, playing.play(call.requests[0], answer, [1] * len(answer), **words))
    choice: dict[str, Any] = call.reply(deltas)["choices"][0]
    return choice


@pytest.mark.parametrize("sample", ["plain words", "水は", "a 👩‍👩‍👧‍👦 b", "ďд"])
@pytest.mark.parametrize("echo", [True, False])
def test_text_offsets_point_into_the_text(text: Text, sample: str, echo: bool) -> None:
    """Every offset is where the token's text begins; a token inside a character has that character's place."""
    ids = text.encode(sample, add_special_tokens=False)
    choice = completion(text, {"prompt": "q: 水 ", "logprobs": 1, "echo": echo, "max_tokens": 400}, ids)
    told = [*text.encode("q: 水 "), *ids] if echo else ids
    logprobs, raw = choice["logprobs"], b""
    assert {len(items) for items in logprobs.values()} == {len(told)}
    whole = choice["text"]
    for token_id, offset in zip(told, logprobs["text_offset"], strict=True):
        before = raw.decode("utf-8", "ignore")
        assert offset == len(before), (offset, before)
        piece = b"" if token_id in text.special_ids else text.token_bytes(token_id)
        raw += piece.removeprefix(b" ") if not raw and not whole.startswith(" ") else piece
    assert raw.decode() == whole


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": "q: <|im_start|>水 </s>x"}, "q: <|im_start|>水 </s>x"),
        ({"prompt": "<s>水 x<tool>"}, "<s>水 x<tool>"),
        ({"prompt": [3, 4, 70, 5, 71]}, None),
        ({"prompt": "one two three four", "truncate_prompt_tokens": 3}, None),
        ({"prompt": "one two three four", "truncate_prompt_tokens": 3, "truncation_side": "right"}, None),
        ({"prompt": "q: </s>one 水", "skip_special_tokens": False, "truncate_prompt_tokens": 5}, None),
        ({"prompt": "水" * 300, "truncate_prompt_tokens": 4}, None),
    ],
)
def test_echo_is_what_was_fed_and_offsets_index_it(byte_level: Text, body: dict[str, Any], told: str | None) -> None:
    """Whatever was cut off or written with special tokens: the echo is what the model read, and each token stands at its offset."""
    skip = body.get("skip_special_tokens", True)
    ids = byte_level.encode("ab </s>c", add_special_tokens=False)
    choice = completion(byte_level, {"logprobs": 1, "echo": True, "max_tokens": 20, "return_token_ids": True} | body, ids)
    fed, places = choice["prompt_token_ids"], choice["logprobs"]["text_offset"]
    echo = told or byte_level.decode(fed, skip_special_tokens=skip)
    assert choice["text"] == echo + byte_level.decode(ids, skip_special_tokens=skip)
    assert places == sorted(places) and places[len(fed)] == len(echo)
    for token_id, place in zip([*fed, *ids], places, strict=True):
        piece = byte_level.token(token_id)
        shown = token_id not in byte_level.special_ids or choice["text"].startswith(piece, place)
        assert "\ufffd" in piece or not shown or choice["text"].startswith(piece, place), (piece, place)
    assert completion(byte_level, {"echo": True} | body, [])["text"] == echo


def test_completion_logprobs_by_hand(byte_level: Text) -> None:
    """Chosen token always listed, -inf as -9999.0, equal spellings keep the likelier, no more alternatives than asked for."""
    call = openai.parse_completions({"prompt": "x", "logprobs": 2}, playing.context(byte_level), request_id="c", created=1)
    halves = [token_id for token_id in range(byte_level.vocab_size) if byte_level.token(token_id) == "\ufffd"][:2]
    chosen = byte_level.encode("a", add_special_tokens=False)[0]
    entry = TokenLogprobs(chosen, -3.0, 9, ((halves[0], -0.5), (halves[1], -0.7), (7, -0.9)))
    [delta] = playing.assemble(call.requests[0], byte_level, playing.play(call.requests[0], [chosen], [1]))
    delta.logprobs = [entry]
    logprobs = call.reply([delta])["choices"][0]["logprobs"]
    assert logprobs == {"tokens": ["a"], "token_logprobs": [-3.0], "top_logprobs": [{"a": -3.0, "\ufffd": -0.5}], "text_offset": [0]}
    delta.logprobs = [TokenLogprobs(chosen, -math.inf, 9, ((7, math.nan),))]
    logprobs = call.reply([delta])["choices"][0]["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-9999.0], [{"a": -9999.0, byte_level.token(7): -9999.0}])
    assert b"null" not in errors.encode(logprobs)


def test_tokens_as_ids_and_token_ids(byte_level: Text) -> None:
    ids = byte_level.encode("ab", add_special_tokens=False)
    body = {"prompt": [5, 6], "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = completion(byte_level, body, ids)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    assert all(name.startswith("token_id:") for table in choice["logprobs"]["top_logprobs"] for name in table)
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, [5, 6])


def test_prompt_logprobs(byte_level: Text) -> None:
    choice = completion(byte_level, {"prompt": [5, 6, 7], "prompt_logprobs": 1}, [8])
    told = choice["prompt_logprobs"]
    assert told[0] is None and choice["logprobs"] is None
    assert told[1]["6"] == {"logprob": pytest.approx(-0.406), "rank": 2, "decoded_token": byte_level.token(6)}
    assert told[1]["7"]["rank"] == 1 and len(told) == 3


def test_without_a_tokenizer(tmp_path: Path) -> None:
    """Replies and streams hold the ids unasked; whatever needs words is refused by name."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512, "eos_token_id": [2, 3]}))
    text = Wordless(tmp_path)
    choice = completion(text, {"prompt": [5, 6], "logprobs": 1}, [8, 9])
    assert (choice["text"], choice["token_ids"], choice["logprobs"]["tokens"]) == ("", [8, 9], ["token_id:8", "token_id:9"])
    call = openai.parse_completions({"prompt": [5, 6], "stream": True}, playing.context(text), request_id="c", created=1)
    played = playing.assemble(call.requests[0], text, playing.play(call.requests[0], [8, 9, 10], [1, 1, 1]))
    assert [chunk["choices"][0]["token_ids"] for chunk in playing.events(call, played)] == [[8], [9], [10]]
    context = playing.context(text)
    for verb, body, param in (
        (openai.parse_completions, {"prompt": "x"}, "prompt"),
        (openai.parse_completions, {"prompt": [5], "bad_words": ["x"]}, "bad_words"),
        (openai.parse_chat, {"messages": CHAT}, "messages"),
    ):
        with pytest.raises(RequestError, match="skip_tokenizer_init") as caught:
            verb(body, context, request_id="c", created=1)
        assert caught.value.param == param
    for convert, told in ((openai.tokenize, {"prompt": "x"}), (openai.detokenize, {"tokens": [5]})):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            convert(told, context)
    assert text.eos_ids == {2, 3} and openai.tokenizer_info(context) == {}
    with pytest.raises(ConfigError, match="skip_tokenizer_init goes without tokenizer"):
        parse({"model": {"path": "x", "skip_tokenizer_init": True, "tokenizer": "y"}})


def test_models() -> None:
    cards = [openai.model_card("a/b", 128, 1, root="/m"), openai.model_card("lora", 128, 1, parent="a/b")]
    assert [card["id"] for card in openai.models_list(cards)["data"]] == ["a/b", "lora"]
    card = openai.find_model("a/b", cards)
    assert (card["max_model_len"], card["root"], card["object"], card["parent"]) == (128, "/m", "model", None)
    with pytest.raises(UnknownModel):
        openai.find_model("b", cards)
    assert openai.version("1.2") == {"version": "1.2"}


def test_tokenize_and_back(text: Text) -> None:
    context = playing.context(text)
    for sample in ("hello 水", "<s>x"):
        told = openai.tokenize({"prompt": sample, "return_token_strs": True, "model": None}, context)
        assert told["tokens"] == text.encode(sample) and told["count"] == len(told["tokens"]) == len(told["token_strs"])
        assert told["max_model_len"] == 512
    bare = openai.tokenize({"prompt": "hello 水", "add_special_tokens": False}, context)["tokens"]
    assert openai.detokenize({"tokens": bare}, context) == {"prompt": "hello 水"}
    assert openai.detokenize({"tokens": [1]}, context) == {"prompt": "<s>"} and openai.detokenize({"tokens": []}, context) == {"prompt": ""}
    chat = openai.tokenize({"messages": CHAT, "add_generation_prompt": False}, context)
    assert chat["tokens"] == text.chat(CHAT, add_generation_prompt=False) and "token_strs" not in chat
    for wrong, body in (("prompt", {}), ("prompt", {"prompt": 5}), ("model", {"model": "other", "prompt": "x"})):
        with pytest.raises(RequestError) as caught:
            openai.tokenize(body, context)
        assert caught.value.param == wrong
    for tokens in (None, "x", [10**6], [-1], [1.5]):
        with pytest.raises(RequestError) as caught:
            openai.detokenize({"tokens": tokens}, context)
        assert caught.value.param == "tokens"
    assert openai.tokenizer_info(context)["eos_token"] == "</s>"


def test_the_demo_models_tokenizer_page(smollm2: Path) -> None:
    info = openai.tokenizer_info(playing.context(Text(smollm2)))
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>") and "add_generation_prompt" in info["chat_template"]
    errors.encode(info)
