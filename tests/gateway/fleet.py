"""A gateway over replicas in this process: everything but Ray. Orders and tokens go over real connections on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from rayneuron.errors import RayNeuronError
from rayneuron.frames import Card, Order
from rayneuron.gateway.catalogue import Catalogue
from rayneuron.gateway.remote import RemoteEngine
from rayneuron.gateway.routed import Routed
from rayneuron.serve.hub import Hub
from rayneuron.serve.replica import Opener, Replica
from tests.serve.scripted import PATIENCE_S, opener_of


class Member:
    """One replica: what `serve.app` makes of it under Serve."""

    def __init__(self, config: dict[str, Any], opener: Opener, name: str) -> None:
        self.name = name
        self.replica = Replica(config, opener)
        self.orders: list[Order] = []
        self.attending = 0  # calls that Serve would count
        self.dead = False
        self.measured: dict[str, Any] = {}  # of its card, in place of what it says

    async def open(self) -> None:
        await self.replica.open()
        self.hub = Hub(self.replica, self.name)
        take = self.hub.order
        self.hub.order = lambda caller, order: (self.orders.append(order), take(caller, order))[1]  # type: ignore[method-assign]
        await self.hub.listen("127.0.0.1")

    @property
    def engine(self) -> Any:
        return self.replica.served.opened.engine

    def card(self) -> bytes:
        if self.replica.state != "serving":
            raise self.replica._shut.refusal
        return self.hub.card(self.replica.config, self.replica.served.opened, self.replica._user_config)

    def die(self) -> None:
        """Its connections end and its calls fail, as where the process is killed; nothing it says is heard any more."""
        self.dead = True
        for caller in list(self.hub.callers.values()):
            caller._transport.abort()

    async def close(self) -> None:
        if hasattr(runner := self.engine.runner, "free"):
            runner.free()
        await self.hub.close()
        await self.replica.close()


class Wired:
    """The replicas of one application, as `gateway.dispatch` reaches them. `misdirect`: so many calls come to somebody else."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.misdirect = 0
        self.unknown = False  # Serve does not have them yet
        self.starting = False  # one comes, as far as Serve knows
        self.died = asyncio.Event()

    async def cards(self) -> list[Card]:
        return self.shown()

    async def coming(self) -> bool:
        return self.starting

    async def early(self) -> Card | None:
        return next(iter(self.shown()), None)

    def knows(self, replica: str) -> bool:
        return not self.unknown

    def shown(self) -> list[Card]:
        cards = []
        for member in self.members:
            with contextlib.suppress(RayNeuronError):
                if not member.dead:
                    cards.append(msgspec.structs.replace(msgspec.msgpack.decode(member.card(), type=Card), **member.measured))
        return cards

    async def attend(self, replica: str, gateway: bytes) -> bool:
        assert not self.unknown
        member = next((m for m in self.members if m.name == replica), None)
        if self.misdirect:
            self.misdirect -= 1
            member = next(m for m in self.members if m is not member)
        if member is None or member.dead:
            raise RuntimeError("ActorDiedError")
        member.attending += 1
        try:
            return await member.hub.attend(gateway, replica)
        finally:
            member.attending -= 1

    async def all(self, method: str) -> list[object]:
        if method == "replica_metrics":
            return [(m.name, m.replica.telemetry.text()) for m in self.members if not m.dead]
        return [await m.replica.forget_prefixes() for m in self.members if not m.dead]


class House:
    """A catalogue over applications of wired replicas."""

    def __init__(self, catalogue: Catalogue, wired: dict[str, Wired]) -> None:
        self.catalogue = catalogue
        self.wired = wired

    @property
    def engine(self) -> RemoteEngine:
        """Of the first model."""
        return self.catalogue.entries[0].engines[-1]

    @property
    def members(self) -> list[Member]:
        """The replicas of the first model."""
        return next(iter(self.wired.values())).members

    def hold(self) -> None:
        """No replica of the first model takes a step."""
        for member in self.members:
            member.engine.runner.hold()

    def free(self) -> None:
        """They do again."""
        for member in self.members:
            member.engine.runner.free()

    async def until(self, true: Callable[[], object]) -> None:
        """Wait for a condition; the clock only bounds it."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.002)

    async def settle(self) -> None:
        """Everything returns to its base line, in the gateway and in every replica that lives, and no ledger is wrong."""
        for entry in self.catalogue.entries:
            for engine in entry.engines:
                await self.until(lambda engine=engine: not engine.pending() and engine.under_way() == (0, 0))
                assert not engine.books.asked and not engine.wishes and not any(engine.desk.open.values()), engine.desk.open
            newest = entry.newest
            if isinstance(newest, Routed):
                flights = newest.flights
                assert (len(flights), flights.sequences, flights.waiting_tokens, len(flights.by_request)) == (0, 0, 0, 0)
        for wired in self.wired.values():
            for member in wired.members:
                if not member.dead:
                    await self.until(lambda m=member: not m.replica.served.engine.pending() and not len(m.replica.flights))
                    await self.until(lambda m=member: not m.attending)
                    member.engine.check_ledger()
                    assert member.replica.flights.sequences == 0


@contextlib.asynccontextmanager
async def house(
    applications: dict[str, list[tuple[dict[str, Any], Opener]]], config: dict[str, Any] | None = None
) -> AsyncIterator[House]:
    """A gateway over these, open, with every replica connected."""
    wired = {}
    for name, replicas in applications.items():
        members = [Member(args, opener, f"{name}#{i}") for i, (args, opener) in enumerate(replicas)]
        for member in members:
            await member.open()
        wired[name] = Wired(members)
    words = {"models": [{"application": name} for name in applications], **(config or {})}
    catalogue = Catalogue(words, lambda name: wired[name])
    made = House(catalogue, wired)
    await catalogue.open()
    try:
        for entry, each in zip(catalogue.entries, wired.values(), strict=True):
            await made.until(lambda entry=entry, each=each: entry.engines and len(entry.engines[-1].fleet.able) == len(each.members))
            await made.until(lambda entry=entry: entry.state == "ready")
        yield made
    finally:
        await catalogue.close()
        for each in wired.values():
            for member in each.members:
                await member.close()


def scripted(path: Path, replicas: int = 2, name: str = "scripted", **script: Any) -> list[tuple[dict[str, Any], Opener]]:
    """Replicas of the scripted model."""
    return [({"model": {"path": str(path), "name": name}}, opener_of(path, **script)) for _ in range(replicas)]
