"""The replicas of one model as a gateway sees them: who is there, how busy, and over which connection."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from rayneuron.frames import Card, OrderEnded, Tokens
from rayneuron.gateway.link import Link
from rayneuron.news import KvNews, Pressure
from rayneuron.types import Profile

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Linked:
    """One replica. `named`: Serve has it; `left`: it has said itself that it takes no more orders; `profile`: what choices go by."""

    number: int
    link: Link
    named: bool = True
    left: bool = False
    pressure: Pressure = field(default_factory=Pressure)
    profile: Profile | None = None

    @property
    def accepting(self) -> bool:
        """Whether it may be sent new orders."""
        return self.named and not self.left


class Watcher(Protocol):
    """Who is told of the fleet's comings, words and goings."""

    def joined(self, worker: Linked) -> None: ...

    def timed(self, worker: Linked) -> None: ...

    def heard(self, worker: Linked, tokens: Tokens) -> None: ...

    def ended(self, worker: Linked, how: OrderEnded) -> None: ...

    def events(self, worker: Linked, news: KvNews) -> None: ...

    def draining(self, worker: Linked, within_s: float | None) -> None: ...

    def failed(self, worker: Linked) -> None: ...

    def lost(self, worker: Linked, died: bool) -> None: ...


class Fleet:
    """Connects to whom the roster names, once for each life of a replica. A connection that has ended is not made again in the same life:
    what it carried is replayed, and the roster names the replica anew while Serve has it."""

    def __init__(self, gateway: bytes, watcher: Watcher) -> None:
        self.workers: dict[int, Linked] = {}
        self.card: Card | None = None  # the last that was seen: all replicas of a model have the same sizes
        self.names: dict[str, str] = {}  # the adapters that every replica has, contents by name
        self._frames = 0  # of connections that have ended
        self._gateway, self._watcher = gateway, watcher
        self._numbers = itertools.count()
        self._of: dict[Link, Linked] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def able(self) -> list[Linked]:
        """Those that are connected."""
        return [worker for worker in self.workers.values() if worker.link.open]

    def roster(self, cards: Iterable[Card]) -> None:
        """The replicas that Serve has now. Whoever is missing takes no more orders, until it is named again, and ends what it has."""
        there = {card.epoch: card for card in cards}
        if there:
            first, *others = (card.adapters for card in there.values())
            self.names = {name: known for name, known in first.items() if all(other.get(name) == known for other in others)}
        for worker in self.workers.values():
            card = there.pop(worker.link.card.epoch, None)
            was, worker.named = worker.named, card is not None
            if card is None and worker.link.open and was and not worker.left:
                self._watcher.draining(worker, None)
            elif card is not None and card.profile != worker.link.card.profile:
                worker.link.card = card
                self._watcher.timed(worker)
        for card in there.values():
            self.card = card
            link = Link(card, self._gateway, self)
            worker = self._of[link] = Linked(next(self._numbers), link)
            self.workers[worker.number] = worker
            task = asyncio.get_running_loop().create_task(self._connect(link))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def close_to(self, worker: Linked, within_s: float | None = None) -> None:
        """A replica has said that it takes no more orders; what it does not end within so long goes elsewhere."""
        worker.left = True
        self._watcher.draining(worker, within_s)

    async def _connect(self, link: Link) -> None:
        try:
            await link.connect()
        except OSError as wrong:
            link.end(f"it cannot be reached: {wrong}")

    def tick(self, now_s: float, waiting_ms: float) -> None:
        """Say everywhere that this gateway is there, and a part of the work that waits at it; give up who has been silent."""
        part_ms = waiting_ms / max(1, len(self.able))
        for worker in list(self.workers.values()):
            worker.link.tick(now_s, part_ms)

    def heard_frames(self) -> int:
        """How many there were."""
        return self._frames + sum(worker.link.frames for worker in self.workers.values())

    def close(self) -> None:
        """Hang up everywhere."""
        for worker in list(self.workers.values()):
            worker.link.end("the gateway is closing")

    # What links tell.

    def opened(self, link: Link, pressure: Pressure) -> None:
        """A replica has said that it is there."""
        self._of[link].pressure = pressure
        log.info("replica %s is connected", link.card.replica)
        self._watcher.joined(self._of[link])

    def heard(self, link: Link, tokens: Tokens) -> None:
        """What a step of a replica gave, and how busy it is."""
        worker = self._of[link]
        if tokens.pressure is not None:
            worker.pressure = tokens.pressure if worker.accepting else replace(tokens.pressure, accepting=False)
        self._watcher.heard(worker, tokens)

    def ended(self, link: Link, how: OrderEnded) -> None:
        """How an order has ended that its tokens do not say so of."""
        self._watcher.ended(self._of[link], how)

    def events(self, link: Link, news: KvNews) -> None:
        """What prefixes a replica has KV of."""
        self._watcher.events(self._of[link], news)

    def leaving(self, link: Link, within_s: float, failed: bool) -> None:
        """A replica takes no more orders; where it has `failed`, those it has come to nothing."""
        if failed:
            self._of[link].left = True
            self._watcher.failed(self._of[link])
        else:
            self.close_to(self._of[link], within_s)

    def lost(self, link: Link, why: str, died: bool) -> None:
        """A connection has ended."""
        worker = self._of.pop(link)
        self._frames += link.frames
        del self.workers[worker.number]
        log.warning("replica %s is lost: %s", link.card.replica, why)
        self._watcher.lost(worker, died)
