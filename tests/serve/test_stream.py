"""A stream, put together again, is the unary reply; over every way the same text can be cut into tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron.errors import RayNeuronError
from rayneuron.serve.cadence import LONGEST_PAUSE_S, SHORTEST_PAUSE_S
from rayneuron.serve.connection import Past
from rayneuron.serve.flight import ActiveRequest, Flight, Flights
from rayneuron.text.text import Text
from rayneuron.types import Delta, Request, SamplingParams, TokenDelta
from tests.serve.scripted import PATIENCE_S, site, sse

TEXTS = ("hello the world", "naïve café — 你好 🙂🙃 end", "a\n\nb\tc", "the stone is on the note", "🙂")


@pytest.fixture(scope="module")
def text(tiny: Path) -> Text:
    return Text(tiny)


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a streamed call, parsed; the last is checked to be the end mark."""
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        reply.read()
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = sse(reply.text.split("\n"))
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def said(chunks: list[Any], index: int = 0) -> tuple[str, str | None, Any]:
    """Text, finish reason and stop reason of one choice of a completion stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    ends = [choice for choice in choices if choice.get("finish_reason")]
    assert len(ends) == 1 and ends[0] is choices[-1]
    return "".join(choice["text"] for choice in choices), ends[0]["finish_reason"], ends[0].get("stop_reason")


def bytewise(text: Text, wanted: str) -> list[int]:
    """The ids that spell `wanted` one byte at a time: every character beyond ASCII is cut."""
    by_byte = {text.token_bytes(i): i for i in range(text.vocab_size) if len(text.token_bytes(i)) == 1}
    return [by_byte[bytes([b])] for b in wanted.encode()]


@pytest.mark.parametrize("wanted", TEXTS)
@pytest.mark.parametrize("cut", ["tokens", "bytes"])
def test_every_cut_of_a_text(client: httpx.Client, text: Text, wanted: str, cut: str) -> None:
    ids = text.encode(wanted) if cut == "tokens" else bytewise(text, wanted)
    body = {"model": "scripted", "prompt": text.encode("say:") + ids, "max_tokens": len(ids) + 1, "temperature": 0}
    whole = client.post("/v1/completions", json=body).json()
    assert whole["choices"][0]["text"] == wanted
    assert whole["choices"][0]["finish_reason"] == "stop" and whole["choices"][0]["stop_reason"] is None
    assert whole["usage"]["completion_tokens"] == len(ids) + 1
    chunks = stream(client, "/v1/completions", body)
    assert said(chunks) == (wanted, "stop", None)
    assert all("\ufffd" not in choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert not any(chunk.get("usage") for chunk in chunks)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} and {chunk["created"] for chunk in chunks} == {chunks[0]["created"]}


@pytest.mark.parametrize("cut", ["tokens", "bytes"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("stop", ["stone", ["zz", "one is"], " on t", "e"])
def test_a_stop_string_across_tokens(client: httpx.Client, text: Text, stop: Any, cut: str, keep: bool) -> None:
    wanted = "the stone is on the note"
    ids = text.encode(wanted) if cut == "tokens" else bytewise(text, wanted)
    body = {
        "model": "scripted", "prompt": text.encode("say:") + ids, "max_tokens": 64, "stop": stop, "include_stop_str_in_output": keep,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    found = stop if isinstance(stop, str) else stop[1]
    expected = (wanted[: wanted.index(found)] + found * keep, "stop", found)
    chunks = stream(client, "/v1/completions", body)
    assert said(chunks) == expected
    unary = client.post("/v1/completions", json={k: v for k, v in body.items() if k != "stream_options"}).json()
    choice = unary["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == expected
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == unary["usage"]


def test_logprobs_and_ids_are_sent_exactly_once(client: httpx.Client, text: Text) -> None:
    ids = bytewise(text, "é 🙂 stone")
    body = {
        "model": "scripted",
        "prompt": text.encode("say:") + ids,
        "max_tokens": 64,
        "logprobs": 2,
        "return_token_ids": True,
        "stop": "ston",
    }
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    chunks = [choice for chunk in stream(client, "/v1/completions", body) for choice in chunk["choices"]]
    assert whole["text"] == "é 🙂 "
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for chunk in chunks for item in (chunk["logprobs"] or {}).get(key, [])] == whole["logprobs"][key], key
    assert len(whole["logprobs"]["tokens"]) == len(ids) - 1  # up to the token that completed the stop string
    assert [t for chunk in chunks for t in chunk["token_ids"]] == whole["token_ids"] == ids[:-1]


def test_several_prompts_and_choices(client: httpx.Client) -> None:
    body = {"model": "scripted", "prompt": ["say:one", "say:two!", "go"], "n": 2, "temperature": 1.0, "max_tokens": 8}
    whole = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]][:4] == ["one", "one", "two!", "two!"]
    chunks = stream(client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        assert said(chunks, choice["index"])[:2] == (choice["text"], choice["finish_reason"])
    assert chunks[-1]["usage"] == whole["usage"]


def test_chat_stream_and_reply(client: httpx.Client) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=body).json()
    chunks = stream(client, "/v1/chat/completions", body | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "length" and whole["usage"]["completion_tokens"] == 12
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] for chunk in chunks)


def test_generate_of_the_note(client: httpx.Client) -> None:
    """`POST /generate` with `prompt` and `max_tokens`, as the neuron_server note calls it."""
    reply = client.post("/generate", json={"prompt": "say:hello", "max_tokens": 50, "temperature": 0.7, "top_p": 0.9, "top_k": 50})
    assert reply.status_code == 200, reply.text
    assert reply.json()["text"] == reply.json()["generated_text"] == "hello"
    assert reply.json()["finish_reason"] == "stop"


def test_the_first_token_does_not_wait_for_others(tiny: Path) -> None:
    """With the gate closed after one step, the first piece of text is out."""
    with site(tiny) as running:
        running.runner.hold()
        running.runner.allow(1)
        body = {"model": "scripted", "prompt": "go", "max_tokens": 5, "stream": True}
        with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http, http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            first = json.loads(next(line for line in lines if line).removeprefix("data: "))
            assert len(first["choices"][0]["text"]) >= 1
            running.runner.free()
            rest = sse(list(lines))
        assert rest[-1] == "[DONE]"
        texts = [first["choices"][0]["text"], *(json.loads(event)["choices"][0]["text"] for event in rest[:-1])]
        assert len("".join(texts)) == 5


def test_a_writer_that_is_behind_gets_joined_pieces() -> None:
    """Two deltas of a choice that nobody has taken become one; the last one's finish and usage count."""
    from rayneuron.types import Delta, TokenLogprobs, Usage, join

    one = Delta("r", 0, "a", [1], logprobs=[TokenLogprobs(1, -0.5, 1, ())], prompt_logprobs=[None])
    two = Delta("r", 0, "b", [2, 3], logprobs=[TokenLogprobs(2, -0.1, 1, ())] * 2, finish_reason="stop", stop_reason="x", usage=Usage(1, 3))
    both = join([one, two])
    assert (both.text, both.token_ids, both.finish_reason, both.stop_reason, both.usage) == ("ab", [1, 2, 3], "stop", "x", Usage(1, 3))
    assert [entry.token_id for entry in both.logprobs or []] == [1, 2, 2] and both.prompt_logprobs == [None]
    assert one.token_ids == [1]  # what the engine handed over is not written to


class Joins:
    def push(self, piece: TokenDelta) -> Delta:
        return Delta(piece.request_id, 0, "x", piece.token_ids, finish_reason=piece.finish_reason)


class Silent:
    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any) -> None:
        return None


def flights_of(count: int, events_per_s: float) -> tuple[Flights, list[Flight]]:
    """As many calls that have begun."""
    flights = Flights(Silent(), asyncio.get_running_loop(), events_per_s)  # type: ignore[arg-type]
    flights.engine = Silent()  # type: ignore[assignment]
    requests = [Request(id=str(i), prompt_ids=[1], params=SamplingParams()) for i in range(count)]
    return flights, [flights.open([ActiveRequest(request, Joins())]) for request in requests]


async def test_resting_streams_gather_and_wake_together_and_at_their_end() -> None:
    """`rest` lets steps pass without waking the writers; the first step after the pause wakes all that have something, and the last delta
    its own."""
    flights, all_of_them = flights_of(8, events_per_s=8 / LONGEST_PAUSE_S)
    now_s = time.monotonic()
    flights.cadence._within = lambda most_s: None  # type: ignore[method-assign] # no clock but the steps'
    flights.cadence._last_s = now_s

    def step(at_s: float, *tokens: TokenDelta) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "monotonic", lambda: now_s + at_s)
            flights.dispatch(list(tokens))

    resting = [asyncio.ensure_future(flight.rest()) for flight in all_of_them]
    await asyncio.sleep(0)
    step(0.01, *(TokenDelta(str(i), 0, [1]) for i in range(7)))
    step(0.05, TokenDelta("0", 0, [2]), TokenDelta("1", 0, [2], finish_reason="length"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [done.done() for done in resting] == [False, True, *[False] * 6]
    step(LONGEST_PAUSE_S + 0.001, TokenDelta("0", 0, [3]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [done.done() for done in resting] == [True] * 7 + [False], "whoever has nothing goes on resting"
    assert [delta.token_ids for flight in all_of_them[:3] for delta in flight.ready()] == [[1, 2, 3], [1, 2], [1]]
    assert flights.cadence.resting == {all_of_them[7]}
    all_of_them[7].fail(RayNeuronError("over"))
    await asyncio.wait_for(resting[7], PATIENCE_S)
    assert not flights.cadence.resting


async def test_a_rest_is_poured_out_at_each_beat_and_ended_by_its_end_its_writer_or_a_fault() -> None:
    flights, (ends, full, breaks) = flights_of(3, events_per_s=1.0)
    flights.cadence._within = lambda most_s: None  # type: ignore[method-assign] # every step is a beat: the last one was long ago
    poured: list[str] = []
    fault = ValueError("torn")

    def pour(flight: Flight, most: int, wrong: Exception | None = None) -> bool:
        if len(poured) >= most:
            if wrong is not None:
                raise wrong
            return False
        poured.extend(delta.text for delta in flight.ready())
        return True

    def step(*ids: str, end: Any = None) -> None:
        flights.cadence._last_s = 0.0
        flights.dispatch([TokenDelta(i, 0, [1], finish_reason=end) for i in ids])

    resting = asyncio.ensure_future(ends.rest(lambda: pour(ends, 9)))
    await asyncio.sleep(0)
    for _ in range(3):
        step("0")
    await asyncio.sleep(0)
    assert poured == ["x"] * 3 and not resting.done(), "nobody was woken"
    step("0", end="length")
    await asyncio.wait_for(resting, PATIENCE_S)
    assert poured == ["x"] * 3 and [delta.finish_reason for delta in ends.ready()] == ["length"], "the last one is the task's own"
    resting = asyncio.ensure_future(full.rest(lambda: pour(full, 3)))
    await asyncio.sleep(0)
    step("1")
    await asyncio.wait_for(resting, PATIENCE_S)
    assert len(full.ready()) == 1, "what could not be written is still there"
    resting = asyncio.ensure_future(breaks.rest(lambda: pour(breaks, 3, fault)))
    await asyncio.sleep(0)
    step("2")
    with pytest.raises(ValueError, match="torn"):
        await asyncio.wait_for(resting, PATIENCE_S)
    assert not flights.cadence.resting


@pytest.mark.parametrize("blocked", [0, 2, 1])
def test_what_is_poured_past_the_task_is_the_same_text(tiny: Path, monkeypatch: pytest.MonkeyPatch, blocked: int) -> None:
    """Six streams on one clock, whose connections take every part, every second one or none."""
    parts: list[bytes] = []
    looks = itertools.count()
    free, write = Past.open.fget, Past.write
    assert free is not None
    monkeypatch.setattr(Past, "open", property(lambda self: bool(free(self)) and not (blocked and next(looks) % blocked == 0)))
    monkeypatch.setattr(Past, "write", lambda self, part: (parts.append(part), write(self, part)))
    with site(tiny, {"serving": {"stream_events_per_s": 300.0}}, rows=6, pace_s=0.004) as running:
        words = Text(tiny)

        def ask(i: int) -> tuple[tuple[str, str | None, Any], Any]:
            body = {"model": "scripted", "prompt": words.encode("say:") + bytewise(words, f"{i} " + "🙂 naïve — " * 4), "max_tokens": 99}
            with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
                chunks = stream(http, "/v1/completions", body | {"temperature": 0, "stream_options": {"include_usage": True}})
            return said(chunks), chunks[-1]["usage"]["completion_tokens"]

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, range(6)))
        for i, ((text, reason, stop), tokens) in enumerate(answers):
            wanted = f"{i} " + "🙂 naïve — " * 4
            assert (text, reason, stop, tokens) == (wanted, "stop", None, len(wanted.encode()) + 1)
        assert bool(parts) == (blocked != 1)
        running.settle()


async def test_what_has_gathered_waits_for_no_step() -> None:
    flights, all_of_them = flights_of(4, events_per_s=1.0)
    resting = [asyncio.ensure_future(flight.rest()) for flight in all_of_them]
    await asyncio.sleep(0)
    flights.cadence._last_s = time.monotonic()
    flights.dispatch([TokenDelta("2", 0, [1])])
    await asyncio.wait_for(resting[2], PATIENCE_S)
    assert [done.done() for done in resting] == [False, False, True, False]
    for done in resting:
        done.cancel()


async def test_few_streams_are_never_paced() -> None:
    flights, (one,) = flights_of(1, events_per_s=250.0)
    assert 1 / 250 < SHORTEST_PAUSE_S and flights.cadence.pause_s == 0
    with pytest.raises(StopIteration):
        one.rest().send(None)  # over without giving way once
    for count, pause_s in ((8, 8 / 250), (500, LONGEST_PAUSE_S)):
        assert flights_of(count, 250.0)[0].cadence.pause_s == pause_s


def test_an_event_holds_as_many_tokens_as_the_file_says_or_the_body(tiny: Path) -> None:
    body = {"model": "scripted", "prompt": "Hi", "max_tokens": 14, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked: list[tuple[dict[str, int], int]] = [({}, 4), ({"stream_interval": 1}, 1)]
    with site(tiny, {"serving": {"stream_interval": 4, "stream_events_per_s": 1e6}}, pace_s=0.005) as running:
        for more, least in asked:
            with httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
                chunks = stream(http, "/v1/completions", body | more)
            sizes = [len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"]]
            assert sum(sizes) == 14 and min(sizes[1:-1]) >= least and (min(sizes[1:-1]) < 4) == (least < 4), sizes
