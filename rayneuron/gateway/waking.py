"""Models that may sleep, as a gateway sees them: it tells the arbiter who waits, holds their calls, and says why where it cannot."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rayneuron.config import Deployment
from rayneuron.errors import Busy, NotReady, RequestTimeout
from rayneuron.frames import Asked, Card, Standing, Wanting
from rayneuron.gateway.entry import CatalogueEntry, Replicas
from rayneuron.gateway_config import GatewayConfig
from rayneuron.loading import read_text
from rayneuron.serve.exchange import Exchange
from rayneuron.text.text import Text

log = logging.getLogger(__name__)

ASK_S, IDLE_S = 0.2, 1.0  # how often the arbiter is told, while somebody waits or runs, and else
LOOK_S = 0.02  # how often coming seats are asked for their cards while somebody waits
HOLD_S = 0.05  # and whoever waits looks whether it still pays
SAY_S = 2.0  # between two comments of progress
MOST_RETRY_S = 120.0  # clients obey no longer one


class ArbiterCalls(Protocol):
    """The way to the arbiter."""

    def want(self, blob: bytes) -> Awaitable[bytes]: ...

    def describe(self) -> Awaitable[dict[str, Any]]: ...


class SeatWay(Replicas, Protocol):
    """The way to the replica of one seat, as to those of any application."""

    async def early(self) -> Card | None:
        """What it has shown, though Serve may not know it yet."""


class SeatReplicas:
    """The replicas of a model of the host: those of all its seats. `follow`: the way to those of one application."""

    def __init__(self, follow: Callable[[str], SeatWay]) -> None:
        self.standing = Standing("sleeping")
        self._follow = follow
        self._ways: dict[str, SeatWay] = {}
        self._known: dict[str, str] = {}  # replicas that Serve has shown, on which seat
        self.seat_of: dict[str, str] = {}  # of a replica

    async def cards(self) -> list[Card]:
        """Of every replica that takes calls now."""
        names = [*self.standing.seats, *self.standing.coming]
        self._ways = {name: self._ways.get(name) or self._follow(name) for name in names}
        self._known = {replica: name for replica, name in self._known.items() if name in names}  # who comes next to a seat is another one
        told = await asyncio.gather(*map(self._shown, self._ways), return_exceptions=True)
        cards = []
        for name, shown in zip(self._ways, told, strict=True):
            for card in shown if isinstance(shown, list) else ():
                self.seat_of[card.replica] = name
                cards.append(card)
        return cards

    async def _shown(self, name: str) -> list[Card]:
        """Of those on a seat. Serve needs up to a second to know that one is ready, and a call of it waits until then: before, its own word
        counts."""
        way = self._ways[name]
        if name in self._known.values():
            return await way.cards()
        early = await way.early()
        cards = [] if name in self.standing.coming else await way.cards()
        self._known.update((card.replica, name) for card in cards)
        return cards or ([] if early is None else [early])

    async def coming(self) -> bool:
        """Whether there is a seat, or will be."""
        return bool(self.standing.seats or self.standing.coming)

    def knows(self, replica: str) -> bool:
        """Whether Serve has shown it."""
        return replica in self._known

    async def attend(self, replica: str, gateway: bytes) -> bool:
        """Wait at a replica."""
        seat = self.seat_of[replica]
        return await (self._ways.get(seat) or self._follow(seat)).attend(replica, gateway)

    async def all(self, method: str) -> list[object]:
        """What every replica answers."""
        told = await asyncio.gather(*(self._ways[name].all(method) for name in self.standing.seats if name in self._ways))
        return [answer for answers in told for answer in answers]


@dataclass(slots=True)
class Sleeper:
    """One model that may sleep. `held`: when each call came that waits for it; `looking`: for its replicas meanwhile."""

    config: Deployment
    entry: CatalogueEntry
    replicas: SeatReplicas
    held: dict[object, float] = field(default_factory=dict)
    arrived: int = 0
    looking: asyncio.Task[None] | None = None
    words: asyncio.Task[tuple[Text, Path]] | None = None

    def prepare(self) -> None:
        """Read the words of the model while it is loaded, so that its first call does not wait for them."""
        if self.words is None or (self.words.done() and self.words.exception() is not None):
            self.words = asyncio.create_task(read_text(self.config))

    async def read(self, config: Deployment) -> tuple[Text, Path]:
        """Those of a replica that has come."""
        if self.words is None or config.model != self.config.model:
            return await read_text(config)
        return await asyncio.shield(self.words)

    async def look(self) -> None:
        """Ask coming seats for their cards while somebody waits: one for all who do."""
        while self.held:
            if self.replicas.standing.coming and self.entry.state != "ready":
                await self.entry.look()
            await asyncio.sleep(LOOK_S)


class Waking:
    """Keeps the arbiter told and the entries' replicas known. Belongs to the event loop."""

    def __init__(self, config: GatewayConfig, sleepers: dict[str, Sleeper], arbiter: ArbiterCalls) -> None:
        self._config, self._sleepers, self._arbiter = config.scaling, sleepers, arbiter
        self._gateway = secrets.token_bytes(8)
        self._hurry = asyncio.Event()
        self.refused: dict[tuple[str, str], int] = {}  # calls turned away, by model and reason

    async def keep(self) -> None:
        """Tell and hear until told to end."""
        while True:
            self._hurry.clear()
            try:
                await self.ask()
            except Exception as wrong:  # it is being replaced: what was known holds
                log.warning("the arbiter does not answer: %r", wrong)
            busy = any(sleeper.held or sleeper.entry.busy for sleeper in self._sleepers.values())
            try:
                await asyncio.wait_for(self._hurry.wait(), ASK_S if busy else IDLE_S)
            except asyncio.TimeoutError:
                pass

    async def ask(self) -> None:
        """Once."""
        now_s = time.monotonic()
        asked = {name: self._asked(sleeper, now_s) for name, sleeper in self._sleepers.items()}
        told = await self._arbiter.want(msgspec.msgpack.encode(Wanting(self._gateway, asked)))
        standings = msgspec.msgpack.decode(told, type=dict[str, Standing])
        for name, standing in standings.items():
            sleeper = self._sleepers[name]
            before, sleeper.replicas.standing = sleeper.replicas.standing, standing
            sleeper.entry.standing = standing
            if standing.seats != before.seats or (sleeper.held and standing.seats and sleeper.entry.state != "ready"):
                await sleeper.entry.look()

    def _asked(self, sleeper: Sleeper, now_s: float) -> Asked:
        arrived, sleeper.arrived = sleeper.arrived, 0
        waiting, oldest_s, backlog_s, busy = len(sleeper.held), 0.0, 0.0, {}
        if sleeper.held:
            oldest_s = now_s - min(sleeper.held.values())
        for engine in sleeper.entry.engines:
            if not engine.fleet.able:
                waiting += engine.under_way()[0]  # whose seat has gone
                oldest_s = max([oldest_s, *(now_s - way.since_s for way in engine.books.ways.values())])
            for linked in engine.fleet.able:
                load = linked.pressure
                work_s = (load.backlog_ms + load.rows * load.slot_ms) / 1e3
                backlog_s += load.backlog_ms / 1e3
                seat = sleeper.replicas.seat_of.get(linked.link.card.replica)
                if seat is not None and (load.rows or load.waiting):
                    busy[seat] = max(work_s, 0.05)
        return Asked(waiting, oldest_s, arrived, backlog_s, busy)

    @contextmanager
    def _holding(self, sleeper: Sleeper) -> Iterator[None]:
        if len(sleeper.held) >= self._config.max_held:
            self._refuse(sleeper, "full")
            raise Busy(f"{len(sleeper.held)} calls wait for {sleeper.entry.name} to wake; the limit is {self._config.max_held}",
                       retry_after_s=retry_s(sleeper.replicas.standing.eta_s))  # fmt: skip
        key = object()
        sleeper.held[key] = time.monotonic()
        self._hurry.set()
        sleeper.prepare()
        if sleeper.looking is None or sleeper.looking.done():
            sleeper.looking = asyncio.create_task(sleeper.look())
        try:
            yield
        finally:
            del sleeper.held[key]

    async def hold(self, entry: CatalogueEntry, exchange: Exchange, comments: bool) -> None:
        """Wait until the model of a call is awake. `comments`: say meanwhile how far it is. Raises NotReady where that takes too long, or
        longer than the call may (RequestTimeout), Busy where too many wait."""
        sleeper = self._sleepers.get(entry.name)
        if sleeper is None:
            return
        sleeper.arrived += 1
        if entry.state == "ready":
            return
        began_s, limit_s = time.monotonic(), exchange.time_limit_s(None)
        with self._holding(sleeper):
            task = asyncio.current_task()
            assert task is not None
            exchange.watch(task)
            said_s = began_s
            while entry.state != "ready":
                now_s = time.monotonic()
                if entry.left is not None:
                    raise entry.left
                if limit_s is not None and now_s - began_s >= limit_s:
                    raise RequestTimeout(f"{entry.name} was not awake within the {limit_s:g} s of this request")
                self._judge(sleeper, now_s - began_s)
                if comments and now_s - said_s >= SAY_S:
                    said_s = now_s
                    await exchange.comment(f"{entry.name} {progress(sleeper.replicas.standing)}")
                if sleeper.looking is not None and sleeper.looking.done():
                    sleeper.looking.result()  # what it raised
                await entry.joined(HOLD_S)
        exchange.said[b"x-rayneuron-waited-ms"] = f"{1e3 * (time.monotonic() - began_s):.0f}".encode()

    def _judge(self, sleeper: Sleeper, waited_s: float) -> None:
        """Raise where it is not worth waiting. The arbiter is given a moment to hear of it and to begin, after a failure too."""
        standing, name = sleeper.replicas.standing, sleeper.entry.name
        if waited_s < 2 * ASK_S:
            return
        if standing.failed and standing.state == "sleeping":
            self._refuse(sleeper, "failed")
            raise NotReady(f"{name} failed to start: {standing.failed}", retry_after_s=retry_s(standing.eta_s))
        left_s = self._config.hold_s - waited_s
        if standing.eta_s is None or standing.eta_s > self._config.hold_s or left_s <= 0:
            said = f" ({standing.why})" if standing.why else ""
            self._refuse(sleeper, "late")
            when = "nobody can say when" if standing.eta_s is None else f"expected in {standing.eta_s:.0f} s"
            raise NotReady(f"{name} is {standing.state}{said}; {when}", retry_after_s=retry_s(standing.eta_s))

    def _refuse(self, sleeper: Sleeper, reason: str) -> None:
        key = sleeper.entry.name, reason
        self.refused[key] = self.refused.get(key, 0) + 1


def retry_s(eta_s: float | None) -> float:
    """When a client may come again."""
    return MOST_RETRY_S if eta_s is None else min(MOST_RETRY_S, float(math.ceil(max(1.0, eta_s))))


def progress(standing: Standing) -> str:
    """How far a model has come, for people who wait."""
    when = "" if standing.eta_s is None else f", about {standing.eta_s:.0f} s"
    return f"{standing.state} {standing.why}".strip().replace("\n", " ") + when

