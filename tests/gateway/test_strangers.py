"""What others may do to a gateway and its replicas: share them, take a name, fall silent, not read, come back as somebody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from rayneuron import frames, wire
from rayneuron.frames import FromReplica, Greeting, Order, OrderEnded, Reception
from rayneuron.gateway.catalogue import Catalogue
from rayneuron.gateway.link import Link
from rayneuron.gateway.routes import application
from rayneuron.serve import hub as hubs
from rayneuron.serve import peer
from rayneuron.serve.hub import Hub
from rayneuron.types import Request, SamplingParams
from tests.gateway.fleet import House, Member, house, scripted

GO: dict[str, Any] = {"prompt": "go on", "max_tokens": 60, "ignore_eos": True}


@pytest.fixture
async def one(tiny: Path) -> AsyncIterator[House]:
    async with house({"scripted": scripted(tiny, replicas=1)}) as made:
        yield made


@contextlib.asynccontextmanager
async def beside(made: House) -> AsyncIterator[Catalogue]:
    """One more gateway over the same replicas."""
    other = Catalogue({"models": [{"application": name} for name in made.wired]}, lambda name: made.wired[name], "1")
    await other.open()
    try:
        await made.until(lambda: other.entries[0].engines and len(other.entries[0].engines[0].fleet.able) == len(made.members))
        await made.until(lambda: other.entries[0].state == "ready")
        yield other
    finally:
        await other.close()


async def raw(member: Member, name: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of somebody who knows the token, greeted."""
    ip, _, port = member.hub.address.removeprefix("tcp:").rpartition(":")
    reader, writer = await asyncio.open_connection(ip, int(port))
    writer.write(wire.frame(Greeting(name, member.hub.token, member.hub.epoch)))
    cutter: wire.Frames[Any] = wire.Frames(FromReplica, frames.MOST_BYTES)
    while (message := cutter.take()) is None:
        cutter.add(await reader.read(4096))
    assert isinstance(message, Reception) and message.epoch == member.hub.epoch
    return reader, writer


def order(member: Member, name: bytes, tokens: int) -> asyncio.Task[OrderEnded | None]:
    """An order of theirs."""
    asked = Request(id=f"of-{name.decode()}", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=tokens, ignore_eos=True), seed=1)
    return asyncio.ensure_future(member.hub._answer(member.hub.callers[name], Order(1, asked)))


async def test_two_gateways_serve_at_once_and_each_hears_what_the_other_sends(one: House) -> None:
    """At once, not when it is time to say how busy the replica is."""
    (member,) = one.members
    async with beside(one) as other:
        linked = other.entries[0].engines[0].fleet.able[0]
        member.hub._tick.cancel()
        member.engine.runner.hold()
        call = asyncio.ensure_future(one.catalogue.completions(GO))
        await one.until(lambda: linked.pressure.rows + linked.pressure.waiting == 1)
        member.engine.runner.free()
        both = await asyncio.gather(call, other.completions(GO))
        assert both[0]["choices"][0]["text"] == both[1]["choices"][0]["text"]
        await one.until(lambda: linked.pressure.rows + linked.pressure.waiting == 0)
    await one.settle()


async def test_what_ends_says_that_its_row_is_free(one: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is time to say how busy the replica is: until then an idle one would be passed over."""
    monkeypatch.setattr(peer, "TICK_S", 3600.0)
    (member,) = one.members
    member.hub._tick.cancel()
    member.engine.runner.hold()
    call = asyncio.ensure_future(one.catalogue.completions(GO))
    (linked,) = one.engine.fleet.able
    await one.until(lambda: member.orders)
    member.engine.runner.allow(3)
    await one.until(lambda: linked.pressure.rows == 1)
    member.engine.runner.free()
    await call
    assert (linked.pressure.rows, linked.pressure.waiting, linked.pressure.seen) == (0, 0, 1)


async def test_a_gateway_that_ends_under_load_takes_its_orders_with_it_and_the_next_one_serves(one: House) -> None:
    (member,) = one.members
    async with beside(one) as other:
        member.engine.runner.hold()
        calls = [asyncio.ensure_future(other.completions(GO)) for _ in range(3)]
        await one.until(lambda: len(member.orders) == 3)
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, Exception) for each in ended)
    member.engine.runner.free()
    await one.settle()
    async with beside(one) as other:
        assert (await other.completions(GO))["usage"]["completion_tokens"] == 60
    await one.settle()


async def test_who_takes_a_gateway_s_name_ends_its_connection_and_no_answer(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny)}) as two:
        wanted = await two.catalogue.completions(GO)
        for member in two.members:
            member.orders.clear()
            member.engine.runner.hold()
        call = asyncio.ensure_future(two.catalogue.completions(GO))
        await two.until(lambda: any(member.orders for member in two.members))
        member = next(member for member in two.members if member.orders)
        member.engine.runner.allow(4)
        await two.until(lambda: member.engine.runner._permits == 0)
        _, writer = await raw(member, two.engine.gateway)
        two.free()
        assert (await call)["choices"] == wanted["choices"]
        writer.close()
        await two.settle()


class Deaf:
    """A transport whose other side reads nothing: what is written stays."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._kept = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._kept += len(data)

    def get_write_buffer_size(self) -> int:
        return self._kept


async def test_who_does_not_read_is_hung_up_on_and_its_orders_end(one: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is bounded; who reads is not disturbed."""
    monkeypatch.setattr(peer, "MOST_UNREAD", 4096)
    (member,) = one.members
    _, writer = await raw(member, b"deaf")
    caller = member.hub.callers[b"deaf"]
    deaf = caller._transport = Deaf(caller._transport)
    member.engine.runner.hold()
    running = order(member, b"deaf", 200)
    while b"deaf" in member.hub.callers:  # a step at a time: a loop that comes late has the tokens of many in one frame
        kept = deaf.get_write_buffer_size()
        member.engine.runner.allow(1)
        await one.until(lambda kept=kept: deaf.get_write_buffer_size() > kept or b"deaf" not in member.hub.callers)
    member.engine.runner.free()
    assert await running is None and member.engine.steps < 200
    assert b"deaf" not in member.hub.callers and 4096 < deaf.get_write_buffer_size() < 8192
    writer.close()
    await one.settle()
    assert (await one.catalogue.completions(GO))["usage"]["completion_tokens"] == 60


async def test_who_falls_silent_with_the_connection_open_is_gone(one: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cable that is cut, a process that is stopped: nothing closes. The replica does not work for it for ever."""
    (member,) = one.members
    monkeypatch.setattr(peer, "SILENT_S", 0.6)
    _, writer = await raw(member, b"mute")
    member.engine.runner.hold()
    running = order(member, b"mute", 200)
    await one.until(lambda: b"mute" in member.hub.callers and member.hub.callers[b"mute"].orders)
    await one.until(lambda: b"mute" not in member.hub.callers)
    member.engine.runner.free()
    assert await running is None and member.engine.steps < 200
    writer.close()
    await one.settle()


async def test_another_replica_at_the_address_of_the_one_before_is_not_taken_for_it(one: House) -> None:
    """The port is given out again; card and token are those of a life."""
    (member,) = one.members
    (old,) = await one.wired["scripted"].cards()
    again = Hub(member.replica, member.name)
    await again.listen("127.0.0.1")
    lost: list[str] = []

    class Ears:
        def lost(self, link: Link, why: str, died: bool) -> None:
            lost.append(why)

    link = Link(msgspec.structs.replace(old, address=again.address), b"gateway!", Ears())  # type: ignore[arg-type]
    await link.connect()
    await one.until(lambda: lost)
    assert "token" in lost[0] and again.refused == 1 and not again.callers
    await again.close()


async def test_keys_stay_at_the_gateway(tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Neither orders nor logs nor /debug/routes hold one, and an account's key opens that account alone."""
    monkeypatch.setenv("KEY_A", "secret-of-a"), monkeypatch.setenv("KEY_B", "secret-of-b")
    tenants = {"a": {"keys": ["env:KEY_A"]}, "b": {"keys": ["env:KEY_B"]}}
    caplog.set_level("DEBUG")
    async with house({"scripted": scripted(tiny, replicas=1)}, {"tenants": tenants}) as made:
        transport = httpx.ASGITransport(application(made.catalogue))
        async with httpx.AsyncClient(transport=transport, base_url="http://site", timeout=60) as http:
            for key, status in (
                ("secret-of-a", 200),
                ("secret-of-b", 200),
                ("secret-of", 401),
                ("", 401),
                ("secret-of-a,secret-of-b", 401),
            ):
                reply = await http.post("/v1/completions", json=GO, headers={"authorization": f"Bearer {key}"})
                assert reply.status_code == status, (key, reply.text)
                assert "secret" not in reply.text
            told = await http.get("/debug/routes", headers={"authorization": "Bearer secret-of-b"})
            assert told.status_code == 200 and "secret" not in told.text and len(told.json()) == 2
            assert (await http.get("/debug/routes")).status_code == 401
        assert made.catalogue.account(b"secret-of-a") == "a" and made.catalogue.account(b"secret-of-b") == "b"
        assert all(b"secret" not in msgspec.msgpack.encode(each) for each in made.members[0].orders) and len(made.members[0].orders) == 2
    assert "secret-of" not in caplog.text


async def test_predictions_are_held_against_what_came(one: House) -> None:
    for _ in range(3):
        await one.catalogue.completions(GO)
    assert sum(one.engine.errors.counts) == 3
    text = (await one.catalogue.metrics_text()).decode()
    assert 'rayneuron:gateway_prediction_error_count{engine="0",model_name="scripted"} 3.0' in text
    assert hubs.STIR_S < peer.TICK_S, "or nobody would hear of an order sooner"


async def test_the_pace_of_replicas_is_learned_from_what_comes(tiny: Path) -> None:
    """Nobody has measured either: steps take 20 ms, it is thought. One is slower than that and one faster; both are found out."""
    slow, fast = scripted(tiny, replicas=1, pace_s=0.1), scripted(tiny, replicas=1, pace_s=0.005)
    async with house({"scripted": [*slow, *fast]}) as made:
        for i in range(8):
            await asyncio.gather(*(made.catalogue.completions({"prompt": f"{i}-{j}", "max_tokens": 2}) for j in range(4)))
        worker = {w.name: w for w in made.engine.desk.chooser.workers.all.values()}
        factors = [worker[f"scripted#{i}"].pace.factor for i in (0, 1)]
        assert factors[0] > 1.5 * factors[1], factors
        await made.settle()


async def test_a_body_that_is_too_long_goes_nowhere_and_a_deadline_ends_the_work_at_the_replica(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny, replicas=1)}, {"serving": {"max_body_bytes": 2048}}) as made:
        (member,) = made.members
        transport = httpx.ASGITransport(application(made.catalogue))
        async with httpx.AsyncClient(transport=transport, base_url="http://site", timeout=60) as http:
            reply = await http.post("/v1/completions", json={"prompt": "x" * 3000})
            assert reply.status_code == 413 and not member.orders, reply.text
            member.engine.runner.hold()
            for limit_s in (0.5, 5.0, 50.0):  # in which it comes there, however busy the machine
                reply = await http.post("/v1/completions", json=GO, headers={"x-request-timeout-seconds": str(limit_s)})
                assert reply.status_code == 408, reply.text
                if member.orders:
                    break
            assert len(member.orders) == 1 and 0 < member.orders[0].left_s <= limit_s, "it goes along as the time that is left"
        member.engine.runner.free()
        await made.settle()
