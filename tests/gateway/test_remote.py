"""RemoteEngine against one replica alone: the same bytes; and whatever happens to a replica, every token once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron.errors import NotReady, RayNeuronError, RequestError
from rayneuron.gateway.routes import application
from rayneuron.serve.answering import Answering
from rayneuron.serve.ingress import application as alone
from rayneuron.serve.replica import Replica
from tests.gateway.fleet import House, house, scripted
from tests.serve.scripted import opener_of

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", {"prompt": "say:hello, you", "max_tokens": 40}),
    "length": ("/v1/completions", {"prompt": "go on", "max_tokens": 33, "ignore_eos": True}),
    "stop string": ("/v1/completions", {"prompt": "say:one two three four", "max_tokens": 90, "stop": ["three"]}),
    "choices": ("/v1/completions", {"prompt": ["say:ab", "go", "on"], "n": 3, "max_tokens": 20, "temperature": 1, "seed": 4}),
    "scores": ("/v1/completions", {"prompt": "go", "max_tokens": 9, "logprobs": 2, "temperature": 1, "seed": 1}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "logprobs": True}),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "sampling": ("/v1/completions", {"prompt": "x", "temperature": 5}),
    "too long": ("/v1/completions", {"prompt": "x" * 4000, "max_tokens": 5}),
    "too many": ("/v1/completions", {"prompt": "x", "max_tokens": 4000}),
    "no token left": ("/v1/completions", {"prompt": "x", "max_tokens": 5, "allowed_token_ids": [5], "banned_token_ids": [5]}),
    "unknown model": ("/v1/completions", {"prompt": "x", "model": 5}),
    "no json": ("/v1/completions", {}),
}


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://site", timeout=60)


@pytest.fixture
async def two(tiny: Path) -> AsyncIterator[House]:
    async with house({"scripted": scripted(tiny)}) as made:
        yield made


@pytest.fixture
async def single(tiny: Path) -> AsyncIterator[Replica]:
    made = Replica({"model": {"path": str(tiny), "name": "scripted"}}, opener_of(tiny))
    await made.open()
    yield made
    await made.close()


def cleaned(body: bytes) -> list[Any]:
    """Every object of a reply, without what differs from call to call."""
    said = [line.removeprefix("data: ") for line in body.decode().splitlines() if line]
    found = [json.loads(line) if line != "[DONE]" else line for line in said]
    for each in found:
        if isinstance(each, dict):
            each.pop("id", None), each.pop("created", None)
    return found


def joined(events: list[Any]) -> dict[int, tuple[str, list[Any]]]:
    """Text and scores of each choice of a stream, however its chunks were cut, and how it ended."""
    out: dict[int, tuple[str, list[Any]]] = {}
    for event in events[:-1]:
        for choice in event.get("choices", ()):
            text, rest = out.get(choice["index"], ("", []))
            text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            scores = choice.get("logprobs") or {}
            rest = rest + [*(scores.get("tokens") or scores.get("content") or [])]
            rest += [choice["finish_reason"]] if choice.get("finish_reason") else []
            out[choice["index"]] = (text, rest)
    return out


@pytest.mark.parametrize("kind", STREAMS)
async def test_it_says_what_a_replica_alone_says(two: House, single: Replica, kind: str) -> None:
    path, body = STREAMS[kind]
    async with client(application(two.catalogue)) as through, client(alone(single)) as direct:
        said = [await http.post(path, json=body) for http in (through, direct)]
        assert said[0].status_code == said[1].status_code == 200, said[0].text
        assert cleaned(said[0].content) == cleaned(said[1].content)
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        streamed = [await http.post(path, json=asked) for http in (through, direct)]
        events = [cleaned(each.content) for each in streamed]
        assert joined(events[0]) == joined(events[1]) and events[0][-1] == events[1][-1] == "[DONE]"
        assert events[0][-2]["usage"] == events[1][-2]["usage"]
    await two.settle()


@pytest.mark.parametrize("kind", REFUSED)
async def test_it_refuses_what_a_replica_alone_refuses(two: House, single: Replica, kind: str) -> None:
    path, body = REFUSED[kind]
    async with client(application(two.catalogue)) as through, client(alone(single)) as direct:
        said = [await http.post(path, json=body) for http in (through, direct)]
    assert said[0].status_code == said[1].status_code >= 400
    assert said[0].json() == said[1].json()
    await two.settle()


async def test_calls_spread_over_the_replicas(two: House) -> None:
    two.hold()
    calls = [asyncio.ensure_future(two.catalogue.completions({"prompt": f"go {i}", "max_tokens": 5})) for i in range(8)]
    await two.until(lambda: sum(len(member.orders) for member in two.members) == 8)
    assert [len(member.orders) for member in two.members] == [4, 4]
    two.free()
    assert {len(reply["choices"]) for reply in await asyncio.gather(*calls)} == {1}
    await two.settle()


async def test_replicas_know_of_the_work_that_waits_before_them(two: House) -> None:
    """What the desk holds back is told to them in equal parts, and so to who decides how many there are; and that it is over, too."""
    member = two.members[0]
    counted = Answering(member.replica.config.model_dump(exclude_unset=True), opener_of(member.replica.served.opened.path))
    two.hold()
    calls = [asyncio.ensure_future(two.catalogue.completions({"prompt": f"go {i}", "max_tokens": 5})) for i in range(40)]
    desk = two.engine.desk
    await two.until(lambda: desk.open["calls"] == 40 and all(each.hub.waiting_ms for each in two.members))
    await two.until(lambda: sum(each.hub.waiting_ms for each in two.members) == pytest.approx(desk.queue.waiting_ms))
    assert desk.open["waiting"] > 0
    counted._served = member.replica._served
    alone_ms = counted.record_autoscaling_stats()["backlog_ms"]
    counted._hub = member.hub
    assert counted.record_autoscaling_stats()["backlog_ms"] == pytest.approx(alone_ms + member.hub.waiting_ms)
    two.free()
    await asyncio.gather(*calls)
    await two.until(lambda: not any(each.hub.waiting_ms for each in two.members))
    await two.settle()


async def test_a_client_that_leaves_frees_its_row(two: House) -> None:
    stream = two.catalogue.generate("go on", {"max_tokens": 200, "ignore_eos": True})
    await anext(stream)
    await stream.aclose()
    await two.settle()


async def test_a_stop_string_ends_the_work(two: House) -> None:
    """The gateway finds it, the replica stops; the choice beside it goes on."""
    body = {"prompt": "go on", "max_tokens": 200, "ignore_eos": True, "n": 2, "temperature": 1, "seed": 3}
    whole = await two.catalogue.completions(body)
    first, second = (choice["text"] for choice in whole["choices"])
    stop = first[20:24]
    assert stop not in second[:60]
    reply = await two.catalogue.completions({**body, "stop": [stop]})
    assert reply["choices"][0]["text"] == first[: first.index(stop)]
    assert reply["choices"][1]["text"] == (second[: second.index(stop)] if stop in second else second)
    await two.settle()


async def test_serve_counts_as_many_calls_as_a_replica_has_orders(two: House) -> None:
    """Those that follow each other use the same, and a moment after the last none is left: a replica that is to end waits no longer."""
    two.hold()
    calls = [asyncio.ensure_future(two.catalogue.completions({"prompt": f"go {i}", "max_tokens": 5})) for i in range(8)]
    await two.until(lambda: [member.attending for member in two.members] == [len(member.orders) for member in two.members] == [4, 4])
    two.free()
    await asyncio.gather(*calls)
    (first, *_) = sorted(two.members, key=lambda member: -member.attending)
    made = count_calls(two)
    for i in range(4):
        await two.catalogue.completions({"prompt": f"go {i}", "max_tokens": 5})
    assert len(first.orders) + len(two.members[1].orders) > 8 and not made
    await two.settle()


def count_calls(made: House) -> list[str]:
    """The calls of Serve to replicas from now on."""
    wired, calls = made.wired["scripted"], []
    attend = wired.attend

    async def counted(replica: str, gateway: bytes) -> bool:
        calls.append(replica)
        return await attend(replica, gateway)

    wired.attend = made.engine.attendance._calls.attend = counted  # type: ignore[method-assign]
    return calls


async def test_a_call_that_came_to_somebody_else_or_failed_is_made_again(two: House) -> None:
    """Its order waits for nothing; where Serve had that replica before, the gateway looks who is there at once."""
    two.wired["scripted"].misdirect = 1
    two.hold()
    call = asyncio.ensure_future(two.catalogue.completions({"prompt": "say:here", "max_tokens": 20}))
    await two.until(lambda: any(member.orders for member in two.members))
    await two.until(lambda: any(member.attending for member in two.members))
    looks = two.catalogue.entries[0]._looks
    attended = next(member for member in two.members if member.attending)
    attended.replica.leave()  # Serve shows it to nobody any more; nobody tells the gateway
    two.wired["scripted"].misdirect = 1
    for over in list(two.members[two.members.index(attended)].hub.callers.values()):
        over.dismiss(0)
    await two.until(lambda: two.catalogue.entries[0]._looks > looks and len(two.engine.fleet.able) == 2)
    await two.until(lambda: [linked.accepting for linked in two.engine.fleet.able].count(True) == 1)
    two.free()
    assert (await call)["choices"][0]["text"] == "here"


async def test_an_order_that_comes_to_one_that_takes_none_goes_to_another(two: House) -> None:
    member = two.members[0]
    member.replica.leave()
    said = await asyncio.gather(*(two.catalogue.completions({"prompt": "say:here", "max_tokens": 20}) for _ in range(6)))
    assert {reply["choices"][0]["text"] for reply in said} == {"here"} and two.engine.undone > 0
    assert [linked.accepting for linked in two.engine.fleet.able] == [False, True], "it is asked no more"
    member.replica.state = "serving"
    await two.settle()


@pytest.mark.parametrize("after", [0, 1, 5, 30])
async def test_what_a_dead_replica_left_goes_on_elsewhere(two: House, single: Replica, after: int) -> None:
    """After so many tokens of each of two prompts; every token once."""
    body = {"prompt": ["go", "on", "and"], "max_tokens": 40, "ignore_eos": True}
    wanted = await single.completions(body)
    two.hold()
    call = asyncio.ensure_future(two.catalogue.completions(body))
    await two.until(lambda: sum(len(member.orders) for member in two.members) == 3)
    victim = two.members[0]
    engine = two.engine
    victim.engine.runner.allow(after + 3)
    await two.until(lambda: victim.engine.runner._permits == 0 or not victim.engine.has_work)
    if after:
        await two.until(lambda: any(len(r.ids) >= after for way in engine.books.ways.values() for r in way.replays.values()))
    victim.die()
    two.free()
    reply = await call
    assert [c["text"] for c in reply["choices"]] == [c["text"] for c in wanted["choices"]]
    assert reply["usage"] == wanted["usage"]
    assert engine.repair.counts["crash", "again"] >= 1
    await two.settle()


async def test_a_failed_step_is_a_pause_for_the_others_and_an_end_for_the_one_that_fails(tiny: Path) -> None:
    """Two replicas fail under it, and it is never sent to the third; what ran beside it goes on."""
    async with house({"scripted": scripted(tiny, replicas=3)}) as three:
        bodies = [{"prompt": f"go {i}", "max_tokens": 60, "ignore_eos": True} for i in range(3)]
        others = [asyncio.ensure_future(three.catalogue.completions(body)) for body in bodies]
        with pytest.raises(RayNeuronError, match="2 replicas failed while they computed"):
            await three.catalogue.completions({"prompt": "boom:3:", "max_tokens": 9})
        assert sum(not member.replica.served.engine.alive for member in three.members) == 2
        assert {len(reply["choices"][0]["text"]) > 0 for reply in await asyncio.gather(*others)} == {True}
        assert three.engine.repair.counts["step", "failed"] == 1


@pytest.mark.parametrize("heard", ["failed", "cut"])
async def test_what_kills_two_replicas_in_its_first_step_is_not_sent_to_a_third(tiny: Path, heard: str) -> None:
    """Nothing was heard of it at either; whether they say that they have failed, or nothing more at all."""
    async with house({"scripted": scripted(tiny, replicas=3)}) as three:
        three.hold()
        call = asyncio.ensure_future(three.catalogue.completions({"prompt": "go", "max_tokens": 9}))
        for dead in (1, 2):
            await three.until(lambda dead=dead: sum(bool(member.orders) for member in three.members) == dead)
            there = {linked.link.card.replica: linked for linked in three.engine.fleet.able}
            at = next(m for m in three.members if m.orders and m.name in there and three.engine.books.on(there[m.name].number))
            if heard == "failed":
                at.hub.leave(0.0, failed=True)
            else:
                at.die()
        with pytest.raises(RayNeuronError, match="2 replicas failed while they computed"):
            await call
        assert sum(bool(member.orders) for member in three.members) == 2
        three.free()
        await three.settle()


@pytest.mark.parametrize("way", ["drain", "gap"])
async def test_what_is_nobody_s_doing_is_no_strike(tiny: Path, way: str) -> None:
    """A request that every replica but the last is taken from: by leaving, or since what they say makes no sense."""
    async with house({"scripted": scripted(tiny, replicas=4)}) as four:
        four.hold()
        call = asyncio.ensure_future(four.catalogue.completions({"prompt": "say:done", "max_tokens": 9}))
        for lost in (1, 2, 3):
            await four.until(lambda lost=lost: sum(bool(member.orders) for member in four.members) == lost)
            (placed,) = four.engine.books.placed.values()
            linked = four.engine.fleet.workers[placed.worker]
            at = next(m for m in four.members if m.name == linked.link.card.replica)
            if way == "drain":
                at.replica.leave()
                at.hub.leave(0.0)
            else:
                linked.link.end("it makes no sense")
        four.free()
        assert (await call)["choices"][0]["text"] == "done"


async def test_a_replica_that_leaves_hands_over_what_it_cannot_end(two: House, single: Replica) -> None:
    body = {"prompt": "go on", "max_tokens": 60, "ignore_eos": True}
    wanted = await single.completions(body)
    two.hold()
    call = asyncio.ensure_future(two.catalogue.completions(body))
    await two.until(lambda: sum(len(member.orders) for member in two.members) == 1)
    leaving = next(member for member in two.members if member.orders)
    leaving.engine.runner.allow(6)
    await two.until(lambda: leaving.engine.runner._permits == 0)
    leaving.hub.leave(0.0)
    leaving.replica.leave()
    other = next(member for member in two.members if not member.orders)
    await two.until(lambda: other.orders)
    assert other.orders[0].request.output_ids, "it goes on where it was"
    two.free()
    reply = await call
    assert reply["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert two.engine.repair.counts["leave", "again"] == 1
    await two.settle()


async def test_nobody_there_is_a_503_and_a_late_replica_ends_the_wait(two: House) -> None:
    two.hold()
    call = asyncio.ensure_future(two.catalogue.completions({"prompt": "say:late", "max_tokens": 20}))
    await two.until(lambda: any(member.orders for member in two.members))
    for left, member in ((1, next(m for m in two.members if not m.orders)), (0, next(m for m in two.members if m.orders))):
        member.die()
        await two.until(lambda left=left: len(two.engine.fleet.able) == left)
    await two.until(lambda: not two.engine.expecting)  # Serve says that none comes
    with pytest.raises(NotReady, match="no replica"):
        await two.catalogue.completions({"prompt": "x"})
    assert not call.done()
    two.members[1].dead = False
    two.free()
    assert (await call)["choices"][0]["text"] == "late"


async def test_what_a_replica_refuses_is_the_caller_s(two: House) -> None:
    """What only the replica knows comes as the first event of the flight."""
    with pytest.raises(RequestError, match="no token is left"):
        await two.catalogue.completions({"prompt": "go", "max_tokens": 5, "allowed_token_ids": [5, 6], "no_repeat_ngram_size": 1})
    await two.settle()


async def test_times_are_those_of_the_gateway_s_clock(two: House) -> None:
    await two.catalogue.completions({"prompt": "go", "max_tokens": 5})
    telemetry = two.catalogue.entries[0].telemetry
    from rayneuron import metrics

    for metric in (metrics.TTFT, metrics.E2E, metrics.QUEUE_TIME, metrics.PREFILL_TIME):
        histogram = telemetry.histograms[metric]
        assert sum(histogram.counts) == 1 and 0 <= histogram.sum < 60
