"""What gateways and replicas say to each other: every message survives, and what is none closes the connection and is counted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron import frames, wire
from rayneuron.errors import Busy, NotReady, RayNeuronError, RequestError, UnknownModel
from rayneuron.frames import Alive, Cancel, FromGateway, FromReplica, Gain, Greeting, Leaving, Order, OrderEnded, Reception, Refusal, Tokens
from rayneuron.news import Pressure
from rayneuron.types import Request, SamplingParams, Stamps, TokenDelta, TokenLogprobs
from tests.gateway.fleet import House, house, scripted

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
SCORES = st.builds(TokenLogprobs, st.integers(0, 500), st.floats(-50, 0), st.integers(1, 9), st.just(((3, -0.5),)))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.text(max_size=9),
    "index": st.integers(0, 127),
    "token_ids": IDS,
    "logprobs": st.none() | st.lists(SCORES, max_size=2),
    "finish_reason": st.sampled_from([None, "stop", "length", "abort", "error"]),
    "stop_token": st.none() | st.integers(0, 9),
    "eos": st.booleans(),
    "prompt_logprobs": st.none() | st.lists(st.none() | SCORES, max_size=2),
    "cached_tokens": st.integers(0, 9),
    "preemptions": st.integers(0, 9),
    "predicted": st.tuples(st.integers(0, 9), st.integers(0, 9)),
    "remote": st.booleans(),
    "error": st.none() | st.text(max_size=9),
    "fault": st.sampled_from(["engine", "choice", "request", "call"]),
    "param": st.none() | st.text(max_size=9),
    "pooled": st.binary(max_size=9),
    "stamps": st.none() | st.builds(Stamps, *[st.floats(0, 1e6)] * 7),
}
DELTAS = st.builds(TokenDelta, **FIELDS)
PRESSURES = st.builds(Pressure, st.integers(0, 9), st.floats(0, 9), st.integers(0, 9))
PIECES = st.builds(Gain, st.integers(1, 9), st.integers(0, 9), DELTAS)
MESSAGES = st.one_of(
    st.builds(Reception, st.binary(max_size=9)),
    st.builds(Tokens, st.integers(1, 9), st.lists(PIECES, max_size=3), st.none() | PRESSURES),
    st.builds(Leaving, st.floats(0, 9)),
    st.builds(OrderEnded, st.integers(1, 9)),
)


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_whatever_way_the_bytes_are_cut(messages: list[Any], data: st.DataObject) -> None:
    """Every field of a TokenDelta is there."""
    assert set(FIELDS) == set(TokenDelta.__struct_fields__), "what was added is carried too: say here what it may be"
    stream = b"".join(bytes(wire.frame(message)) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    cutter: wire.Frames[Any] = wire.Frames(FromReplica, frames.MOST_BYTES)
    heard = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        cutter.add(stream[start:end])
        while (message := cutter.take()) is not None:
            heard.append(message)
    assert heard == messages and not cutter


@pytest.mark.parametrize("message", [Greeting(b"g", b"t", b"e"), Alive(), Alive(70.5), Cancel(3, None, "abort"), Cancel(3, 1, "stop")])
def test_what_a_gateway_says(message: Any) -> None:
    cutter: wire.Frames[Any] = wire.Frames(FromGateway, wire.FIRST_BYTES)
    cutter.add(bytes(wire.frame(message)))
    assert cutter.take() == message


def test_an_order_and_its_outcome() -> None:
    request = Request(id="a", prompt_ids=[1, 2], params=SamplingParams(n=2, logit_bias={3: 1.0}), seed=2**63 + 5, output_ids=[])
    order = Order(7, request, 0.5, None)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=Order)
    assert again == order
    for error in (Busy("full", retry_after_s=2.0), RequestError("wrong", param="n"), UnknownModel("none"), NotReady("wait")):
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(OrderEnded(7, Refusal.of(error), True)), type=OrderEnded)
        made = told.refused.error()
        assert (type(made), made.message, made.param, made.retry_after_s) == (type(error), error.message, error.param, error.retry_after_s)
        assert (told.order, told.failed) == (7, True)

    class Own(RequestError):
        pass

    assert isinstance(Refusal.of(Own("x")).error(), RequestError)
    assert type(Refusal("SystemExit", "x").error()) is RayNeuronError, "only errors of this package are made of what comes in"


async def connected(made: House) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    ip, _, port = made.members[0].hub.address.removeprefix("tcp:").rpartition(":")
    return await asyncio.open_connection(ip, int(port))


@pytest.mark.parametrize("wrong", ["token", "epoch", "version", "first word", "too long", "no message", "cut"])
async def test_a_stranger_is_refused_and_counted(tiny: Path, wrong: str) -> None:
    async with house({"scripted": scripted(tiny, replicas=1)}) as made:
        hub = made.members[0].hub
        good = {"gateway": b"stranger", "token": hub.token, "epoch": hub.epoch}
        said = {
            "token": wire.frame(Greeting(**{**good, "token": b"x" * 16})),
            "epoch": wire.frame(Greeting(**{**good, "epoch": b"x" * 8})),
            "version": wire.frame(Greeting(**good, version=frames.VERSION + 1)),
            "first word": wire.frame(Alive()),
            "too long": (wire.FIRST_BYTES + 1).to_bytes(4, "big"),
            "no message": b"\0\0\0\x03abc",
            "cut": bytes(wire.frame(Greeting(**good)))[:-3],
        }[wrong]
        reader, writer = await connected(made)
        writer.write(said)
        if wrong == "cut":
            writer.write_eof()
        rest = await reader.read()
        cutter: wire.Frames[Any] = wire.Frames(FromReplica, frames.MOST_BYTES)
        cutter.add(rest)
        answer = cutter.take()
        assert answer == (None if wrong == "cut" else Reception(b"")), "nothing of the replica is told"
        assert hub.refused == (wrong != "cut") and set(hub.callers) == {made.engine.gateway}
        writer.close()
        reply = await made.catalogue.completions({"prompt": "say:still here", "max_tokens": 40})
        assert reply["choices"][0]["text"] == "still here"


async def test_a_gap_in_the_frames_ends_the_link_and_the_stream_goes_on(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny)}) as made:
        made.hold()
        call = asyncio.ensure_future(made.catalogue.completions({"prompt": "go on", "max_tokens": 40, "ignore_eos": True}))
        await made.until(lambda: any(member.orders for member in made.members))
        victim = next(member for member in made.members if member.orders)
        victim.engine.runner.allow(5)
        await made.until(lambda: victim.engine.runner._permits == 0)
        next(iter(victim.hub.callers.values()))._number += 1
        made.free()
        assert (await call)["usage"]["completion_tokens"] == 40
        assert made.engine.repair.counts["silence", "again"] == 1, "nobody is blamed for it"
        await made.settle()


async def test_a_gateway_that_is_gone_leaves_no_orders(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny, replicas=1)}) as made:
        member = made.members[0]
        member.engine.runner.hold()
        calls = [asyncio.ensure_future(made.catalogue.completions({"prompt": f"go {i}", "max_tokens": 200})) for i in range(4)]
        await made.until(lambda: len(member.orders) == 4)
        link = made.engine.fleet.able[0].link
        member.dead = True  # so that the gateway does not find it again
        link._transport.abort()
        member.engine.runner.free()
        await made.until(lambda: not len(member.replica.flights) and not member.replica.served.engine.pending())
        member.engine.check_ledger()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
