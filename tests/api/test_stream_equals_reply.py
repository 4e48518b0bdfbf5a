"""Streamed or not, and however the tokens fall into steps, a client gets the same reply."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from rayneuron.api import errors, neuron_server, openai
from rayneuron.api.call import Call
from rayneuron.text.text import Text
from rayneuron.types import Delta
from tests.api import playing, spelling

SAMPLES = ("hi 👩‍👧!", "水は", "ab ab", "น้ำ")
ASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": ["!", "b a"]},
    "included": {"stop": ["!", "b a"], "include_stop_str_in_output": True},
    "logprobs": {"logprobs": 2, "stop": "は"},
    "ids": {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True},
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 1, "stop": ["้"]},
    "interval": {"stream_interval": 3, "logprobs": 1, "stop": ["!"]},
}
ENDS: list[dict[str, Any]] = [{"finish": "length"}, {"finish": "stop", "eos": True}, {"finish": "stop", "stop_token": 7}]


def parse(kind: str, ask: dict[str, Any], text: Text, **more: Any) -> Call:
    words: dict[str, Any] = {"request_id": "call", "created": 123}
    if kind == "chat":
        ask = {k: v for k, v in ask.items() if k != "echo"}
        if "logprobs" in ask:
            ask |= {"logprobs": True, "top_logprobs": ask["logprobs"]}
        return openai.parse_chat({"messages": [{"role": "user", "content": "say 水"}]} | ask | more, playing.context(text), **words)
    return openai.parse_completions({"prompt": "say 水", "max_tokens": 30} | ask | more, playing.context(text), **words)


def unary(call: Call, deltas: list[Delta]) -> dict[int, dict[str, Any]]:
    """The reply in the form `playing.join` gives a stream."""
    seen = {}
    for choice in call.reply(deltas)["choices"]:
        shown = choice["logprobs"] and {name: items for name, items in choice["logprobs"].items() if items}
        seen[choice["index"]] = {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "logprobs": shown or None,
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
            "token_ids": choice.get("token_ids", []),
        }
    return seen


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_cut(text: Text, kind: str, ask: dict[str, Any], sample: str) -> None:
    """All cuts of up to seven tokens, three ways to end: one reply, and every stream joins to it; usage included."""
    ids = text.encode(sample, add_special_tokens=False)[-6:]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for end in ENDS:
        tokens = [*ids, 2] if end.get("eos") else [*ids, 7] if "stop_token" in end else ids
        call = parse(kind, ask, text, **options)
        replies, usages = [], []
        for sizes in playing.cuts(len(tokens)):
            deltas = playing.assemble(call.requests[0], text, playing.play(call.requests[0], tokens, sizes, **end))
            chunks = playing.events(call, deltas)
            replies += [unary(call, deltas), playing.join(chunks)]
            usages += [call.reply(deltas)["usage"], chunks[-1]["usage"]]
            assert chunks[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in chunks[:-1])
            assert {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks} == {head(call, kind)}
        assert all(reply == replies[0] for reply in replies)
        assert all(usage == usages[0] for usage in usages)
        assert usages[0]["prompt_tokens"] == len(call.requests[0].prompt_ids) and usages[0]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_demo_models_tokenizer(smollm2: Path, kind: str) -> None:
    """The whole corpus through SmolLM2's own tokenizer, in steps of one, of many, and all at once."""
    text = Text(smollm2)
    call = parse(kind, {"stream": True, "logprobs": 3, "stop": ["\n end", "skin "]}, text, max_tokens=200)
    request = call.requests[0]
    for sample in spelling.CORPUS:
        ids = [*text.encode(sample), next(iter(text.eos_ids))]
        expected = next((sample.split(stop)[0] for stop in ("\n end", "skin ") if stop in sample), sample)
        replies = []
        for sizes in ([1] * len(ids), [2, 3, 1] * len(ids), [1, 7] * len(ids), [len(ids)]):
            steps = [size for place, size in enumerate(sizes) if sum(sizes[:place]) < len(ids)]
            played = playing.play(request, ids, steps, finish="stop", eos=True, vocab_size=text.vocab_size)
            deltas = playing.assemble(request, text, played)
            replies += [unary(call, deltas)[0], playing.join(playing.events(call, deltas))[0]]
        assert all(reply == replies[0] for reply in replies)
        assert (replies[0]["text"], replies[0]["finish_reason"]) == (expected, "stop")


def head(call: Call, kind: str) -> tuple[str, int, str, str]:
    return ("chatcmpl-call", 123, "tiny", "chat.completion.chunk") if kind == "chat" else ("cmpl-call", 123, "tiny", "text_completion")


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_many_choices_interleaved(byte_level: Text, kind: str) -> None:
    """Two prompts (completions) of three choices, shuffled together, echo with probabilities: indices, order and usage hold."""
    ask: dict[str, Any] = {"n": 3, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "logprobs": 1}
    if kind == "completion":
        ask |= {"prompt": ["first 水", "second"], "echo": True}
    call = parse(kind, ask, byte_level)
    assert call.choices == (6 if kind == "completion" else 3)
    tracks = []
    for place, request in enumerate(call.requests):
        for index in range(3):
            ids = byte_level.encode(f"{place}{index} 水", add_special_tokens=False)
            tracks.append(playing.assemble(request, byte_level, playing.play(request, ids, [1] * len(ids), index=index)))
    forward = [delta for group in itertools.zip_longest(*tracks) for delta in group if delta]
    # The other way round choice 0, which brings the prompt's probabilities, comes last of all.
    for deltas in (forward, [delta for track in reversed(tracks) for delta in track]):
        chunks = playing.events(call, deltas)
        seen = playing.join(chunks)
        assert seen == unary(call, deltas)
        assert sorted(seen) == list(range(call.choices))
        for index in range(call.choices):
            place, choice = divmod(index, 3)
            told = ["first 水", "second"][place] if kind == "completion" else ""
            assert seen[index]["text"] == f"{told}{place}{choice} 水"
        prompts = sum(len(request.prompt_ids) for request in call.requests)
        assert chunks[-1]["usage"]["prompt_tokens"] == prompts
        assert chunks[-1]["usage"]["completion_tokens"] == sum(len(delta.token_ids) for delta in deltas)
        assert chunks[-1]["usage"] == call.reply(deltas)["usage"]
        last = {chunk["choices"][0]["index"]: chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]}
        assert sum(last.values()) == chunks[-1]["usage"]["completion_tokens"]


def test_scoring_only(text: Text) -> None:
    """max_tokens 0 with echo: the prompt and its probabilities, nothing else, streamed or not."""
    call = parse("completion", {"echo": True, "logprobs": 1, "max_tokens": 0}, text, stream=True)
    request = call.requests[0]
    deltas = playing.assemble(request, text, playing.play(request, [], []))
    choice = call.reply(deltas)["choices"][0]
    assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["tokens"])) == ("say 水", "length", len(request.prompt_ids))
    assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
    joined = playing.join(playing.events(call, deltas))[0]
    assert (joined["text"], joined["logprobs"]) == ("say 水", choice["logprobs"])
    assert call.reply(deltas)["usage"]["completion_tokens"] == 0


def test_fast_chunks_equal_slow_ones(byte_level: Text) -> None:
    """The chunk cut from constant parts is byte for byte the one written the long way."""
    for kind, text_of in (("completion", "text"), ("chat", "delta")):
        call = parse(kind, {"stream": True}, byte_level)
        stream = call.answer.open(call)
        for piece in ('"quoted" \\ \n \x00 \u2028 水 👩‍👧', "\x00text\x00", "plain"):
            raw = stream.chunk(Delta(request_id="call-0", index=0, text=piece, token_ids=[1]))
            slow = stream._chunks
            progress = call.answer.open(call)._choices[0]
            long = slow.wrap(call, [slow.choice(call, progress, Delta(request_id="call-0", index=0, text=piece, token_ids=[1]), None)])
            assert raw == b"data: " + errors.encode(long) + b"\n\n" and text_of in long["choices"][0]


def test_interval_coalesces_but_not_the_first(byte_level: Text) -> None:
    call = parse("chat", {"stream": True, "stream_interval": 4}, byte_level)
    stream = call.answer.open(call)
    ids = byte_level.encode("x", add_special_tokens=False)
    sent = [bool(stream.chunk(Delta(request_id="call-0", index=0, text="x", token_ids=ids))) for _ in range(9)]
    assert sent == [True, False, False, False, True, False, False, False, True]


@pytest.mark.parametrize("kind", ["completion", "chat", "note"])
def test_errors_after_the_headers(byte_level: Text, kind: str) -> None:
    """A failed delta or an exception is one error event and the end mark; nothing follows, and the unary reply raises."""
    if kind == "note":
        call = neuron_server.parse({"prompt": "x", "stream": True}, playing.context(byte_level), request_id="call", created=1)
    else:
        call = parse(kind, {"stream": True, "n": 2}, byte_level)
    broken = Delta(request_id="call-0", index=0, text="", token_ids=[], finish_reason="error", error="rank 3 is gone")
    stream = call.answer.open(call)
    assert stream.first() is not None and stream.chunk(Delta(request_id="call-0", index=0, text="a", token_ids=[5]))
    raw = stream.chunk(broken)
    assert raw == (
        b'data: {"error":{"message":"rank 3 is gone","type":"InternalServerError","param":null,"code":500}}\n\ndata: [DONE]\n\n'
    )
    assert (stream.done, stream.failed, stream.last(), stream.chunk(broken)) == (True, True, b"", b"")
    with pytest.raises(Exception, match="rank 3 is gone"):
        call.reply([broken])
    other = call.answer.open(call)
    assert b"secret" not in other.error(ValueError("secret path")) and other.done


def test_the_note(byte_level: Text) -> None:
    """The neuron_server note's reply and stream: the same text, the usage at the end."""
    context = playing.context(byte_level, max_model_len=64)
    call = neuron_server.parse({"prompt": "What?", "max_tokens": 20, "top_k": 5, "stream": True}, context, request_id="c", created=1)
    ids = [*byte_level.encode("水 ok", add_special_tokens=False), 2]
    for sizes in playing.cuts(len(ids)):
        played = playing.play(call.requests[0], ids, sizes, finish="stop", eos=True)
        deltas = playing.assemble(call.requests[0], byte_level, played)
        reply = call.reply(deltas)
        assert set(reply) == {"model", "text", "generated_text", "finish_reason", "usage"}
        assert reply["text"] == reply["generated_text"] == "水 ok"
        chunks = playing.events(call, deltas)
        assert "".join(chunk.get("text", "") for chunk in chunks) == reply["text"]
        assert [chunk["finish_reason"] for chunk in chunks if "finish_reason" in chunk][-1] == reply["finish_reason"] == "stop"
        assert chunks[-1] == {"model": "tiny", "usage": reply["usage"]}
