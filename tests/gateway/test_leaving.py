"""Replicas that leave, one after another or all at once: callers see a pause, and no 503 while another one serves or comes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from rayneuron.errors import NotReady
from tests.gateway.fleet import House, Member, house, scripted
from tests.serve.scripted import PATIENCE_S, opener_of

GO: dict[str, Any] = {"prompt": "go on", "max_tokens": 60, "ignore_eos": True}


async def another(made: House, path: Path, args: dict[str, Any] | None = None, model: str | None = None) -> Member:
    """One more replica, which Serve shows from now on; `args`: its application was deployed anew."""
    number = len(made.members)
    member = Member({"model": {"path": str(path), "name": "scripted"}, **(args or {})}, opener_of(path), f"scripted#{number}")
    await member.open()
    member.engine.scheduler.model = model
    made.members.append(member)
    return member


def at(made: House) -> list[Member]:
    """Replicas with orders under way."""
    return [member for member in made.members if any(caller.orders for caller in member.hub.callers.values())]


async def test_orders_that_were_on_their_way_to_one_that_leaves_are_sent_elsewhere(tiny: Path) -> None:
    """Nobody has told the gateway yet; it is asked once, however many wait."""
    async with house({"scripted": scripted(tiny)}) as two:
        wanted = await two.catalogue.completions(GO)
        two.members[0].hub.left = True
        replies = await asyncio.gather(*(two.catalogue.completions(GO) for _ in range(12)))
        assert replies[0]["choices"][0]["text"] == wanted["choices"][0]["text"] and two.engine.undone > 0
        undone = two.engine.undone
        await asyncio.gather(*(two.catalogue.completions(GO) for _ in range(12)))
        assert two.engine.undone == undone and not two.engine.repair.counts
        await two.settle()


async def test_one_that_leaves_ends_what_it_has_and_takes_no_more(tiny: Path) -> None:
    async with house({"scripted": scripted(tiny)}) as two:
        two.hold()
        call = asyncio.ensure_future(two.catalogue.completions(GO))
        await two.until(lambda: at(two))
        (leaving,) = at(two)
        leaving.hub.leave(60.0)
        await two.until(lambda: [linked.accepting for linked in two.engine.fleet.able].count(True) == 1)
        before = len(leaving.orders)
        more = [asyncio.ensure_future(two.catalogue.completions(GO)) for _ in range(6)]
        two.free()
        assert len({reply["choices"][0]["text"] for reply in await asyncio.gather(call, *more)}) == 1
        assert len(leaving.orders) == before and not two.engine.repair.counts
        await asyncio.wait_for(leaving.hub.ended(60.0), 60)
        await two.settle()


async def test_calls_wait_for_the_replica_that_comes_and_no_longer_than_they_may(tiny: Path) -> None:
    """The only one leaves, with a stream and calls that wait: all go on at the next. Where none comes they end, wherever they wait."""
    async with house({"scripted": scripted(tiny, replicas=1)}, {"replay": {"hold_s": PATIENCE_S}}) as one:
        wanted = (await one.catalogue.completions(GO))["choices"][0]["text"]
        wired, engine = one.wired["scripted"], one.engine
        wired.starting = True
        old = one.members[0]
        old.engine.runner.hold()
        begun = asyncio.ensure_future(one.catalogue.completions(GO))
        await one.until(lambda: at(one))
        old.hub.leave(60.0)
        await one.until(lambda: not any(linked.accepting for linked in engine.fleet.able))
        queued = asyncio.ensure_future(one.catalogue.completions(GO))
        await one.until(lambda: engine.under_way() == (1, 1))
        old.die()
        await one.until(lambda: not engine.fleet.workers)
        held = asyncio.ensure_future(one.catalogue.completions(GO))
        new = await another(one, tiny)
        replies = await asyncio.gather(begun, queued, held)
        assert [reply["choices"][0]["text"] for reply in replies] == [wanted] * 3
        assert one.catalogue.entries[0].state == "ready"
        engine.repair._rules = engine.repair._rules.model_copy(update={"hold_s": 0.2})
        new.engine.runner.hold()
        last = [asyncio.ensure_future(one.catalogue.completions(GO))]
        await one.until(lambda: at(one) == [new])
        new.hub.leave(60.0)
        await one.until(lambda: not any(linked.accepting for linked in engine.fleet.able))
        last.append(asyncio.ensure_future(one.catalogue.completions(GO)))
        await one.until(lambda: engine.under_way() == (1, 1))
        with pytest.raises(NotReady):
            await last[1]  # at the desk of one that takes nothing any more
        new.die()
        last.append(asyncio.ensure_future(one.catalogue.completions(GO)))
        for call in (last[0], last[2]):
            with pytest.raises(NotReady):
                await call
        wired.starting = False
        await one.until(lambda: not engine.expecting)
        with pytest.raises(NotReady, match="no replica"):
            await one.catalogue.completions(GO)
        one.free()


async def test_what_an_older_deployment_began_ends_at_the_newer_one_of_the_same_model(tiny: Path) -> None:
    """Its own replicas are gone; words that only say how many there are make no other deployment at all."""
    async with house({"scripted": scripted(tiny, replicas=1)}) as one:
        entry, old = one.catalogue.entries[0], one.members[0]
        wanted = (await one.catalogue.completions(GO))["choices"][0]["text"]
        alike = await another(one, tiny, {"serving": {"num_replicas": 2, "drain_timeout_s": 7}})
        await one.until(lambda: len(one.engine.fleet.able) == 2)
        assert len(entry.engines) == 1
        one.members.remove(alike)
        alike.hub.leave(0.0)
        old.engine.scheduler.model = "the same"
        one.engine.fleet.card = old_card(old)
        old.engine.runner.hold()
        call = asyncio.ensure_future(one.catalogue.completions(GO))
        await one.until(lambda: at(one) == [old])
        new = await another(one, tiny, {"limits": {"max_waiting": 7}}, "the same")
        await one.until(lambda: len(entry.engines) == 2 and len(entry.engines[1].fleet.able) == 1)
        old.hub.leave(0.0)
        one.members.remove(old)
        old.die()
        reply = await call
        assert reply["choices"][0]["text"] == wanted and new.orders
        await one.until(lambda: len(entry.engines) == 1)
        assert (await one.catalogue.completions(GO))["choices"][0]["text"] == wanted
        old.engine.runner.free()
        await asyncio.gather(old.close(), alike.close())


def old_card(member: Member) -> Any:
    """What a replica shows now."""
    import msgspec

    from rayneuron.frames import Card

    return msgspec.msgpack.decode(member.card(), type=Card)


@pytest.mark.parametrize("seed", range(4))
async def test_streams_outlive_whatever_leaves(tiny: Path, seed: int) -> None:
    """Replicas leave, hand over, forget to say so or die, under streams and new calls; one more comes before or behind each."""
    draw = random.Random(seed)
    async with house({"scripted": scripted(tiny)}) as made:
        wanted = {i: (await made.catalogue.completions({**GO, "prompt": f"go {i}"}))["choices"][0]["text"] for i in range(4)}
        wired = made.wired["scripted"]
        wired.starting = True
        for _ in range(6):
            there = [member for member in made.members if not member.dead and not member.hub.left]
            for member in there:
                member.engine.runner.hold()
            calls = {i: asyncio.ensure_future(made.catalogue.completions({**GO, "prompt": f"go {i}"})) for i in wanted}
            await made.until(lambda: made.engine.under_way()[1] > 0)
            victim = draw.choice(at(made))
            victim.engine.runner.allow(draw.randrange(1, 20))
            if draw.random() < 0.5:
                await another(made, tiny)
            match draw.choice(["leaves", "hands over", "is silent", "dies"]):
                case "leaves":
                    victim.hub.leave(60.0)
                case "hands over":
                    victim.hub.leave(0.0)
                case "is silent":
                    victim.hub.left = True
                case "dies":
                    victim.die()
            victim.replica.state = "leaving"  # so that Serve shows it no more
            more = {i: asyncio.ensure_future(made.catalogue.completions({**GO, "prompt": f"go {i}"})) for i in wanted}
            if not any(not member.hub.left and not member.dead and member is not victim for member in made.members):
                await another(made, tiny)
            made.free()
            for asked in (calls, more):
                for i, call in asked.items():
                    assert (await call)["choices"][0]["text"] == wanted[i]
        for member in made.members:
            if not member.dead:
                member.replica.state = "serving"
        await made.settle()
