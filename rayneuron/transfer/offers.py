"""A prefill replica's side: it computes what it is asked for, and lends the KV until that one has it, or its lease is over.

One thread owns all tickets; connections, the engine and the clock only tell it what has happened.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec.structs import replace

from rayneuron import wire
from rayneuron.engine.remote import Lent, Loan
from rayneuron.errors import RayNeuronError
from rayneuron.transfer.base import Lends, LendsKv
from rayneuron.transfer.desk import Clerk
from rayneuron.transfer.door import Door
from rayneuron.transfer.layout import KvLayout
from rayneuron.transfer.messages import (
    Abandon,
    Accepted,
    Bid,
    Commit,
    Committed,
    Declined,
    Expired,
    FirstTokens,
    Knock,
    Prefixes,
    Pulse,
    ToP,
    Watermark,
    Welcome,
    limit_bytes,
)
from rayneuron.transfer.records import ControlLink, Ticket
from rayneuron.transfer.tickets import OVER, Offer, OfferEvent, offer_step
from rayneuron.types import Request, TokenDelta

SEND_S = 0.5  # a control channel whose other side does not read is lost
TOMBSTONES = 10_000


@dataclass(frozen=True, slots=True)
class LendingLimits:
    """`lease_s` without a beat; blocks that may be pinned for others at once; tokens of prompts that may wait."""

    lease_s: float = 30.0
    pinned: int = 2**31
    waiting_tokens: int = 2**31


class Offers:
    """`lenders`: one a worker, worker 0's first. `deliver` and `told` are called on the engine's thread, all else by anybody."""

    def __init__(
        self,
        engine: Lends,
        layout: KvLayout,
        lenders: Sequence[LendsKv],
        token: bytes,
        epoch: int,
        ip: str | None = None,
        limits: LendingLimits | None = None,
    ) -> None:
        self.epoch = epoch
        self.counts: Counter[str] = Counter()  # how tickets have ended
        self._engine, self._layout, self._lenders = engine, layout, lenders
        self._limits = limits or LendingLimits()
        self._tickets: OrderedDict[bytes, Ticket] = OrderedDict()  # the live ones, and the last of those that have ended
        self._keys: dict[tuple[bytes, str], bytes] = {}  # session and key of the live ones: ticket
        self._links: set[ControlLink] = set()
        self._draining = False
        self._desk = Clerk("rayneuron-offers", self._sweep, lambda: bool(self._keys))
        self.door = Door(token, ip, ToP, self._serve)
        self.addresses = self.door.addresses  # where decode replicas knock, the nearest first

    @property
    def live(self) -> int:
        """Tickets somebody waits for or reads."""
        return len(self._keys)

    def phases(self) -> Counter[str]:
        """How many of them are queued, running and offered."""
        return Counter(held.offer.phase for held in self._live())

    def _live(self) -> list[Ticket]:
        return [held for ticket in [*self._keys.values()] if (held := self._tickets.get(ticket)) is not None]

    @property
    def unfinished(self) -> int:
        """Tokens of the prompts that are not computed yet."""
        return sum(len(held.request.prompt_ids) for held in self._live() if held.offer.phase in ("queued", "running"))

    def told(self, lent: Lent) -> None:
        """The engine: more of a ticket's prompt has KV."""
        self._desk.put(self._settled, lent)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """The engine: what its step has made."""
        self._desk.put(self._delivered, deltas)

    def drain(self, timeout_s: float) -> bool:
        """Take nobody in any more, and wait for those who are; False where some are left."""
        self._draining = True
        until = time.monotonic() + timeout_s
        while self._keys and time.monotonic() < until:
            time.sleep(0.02)
        return not self._keys

    def close(self) -> None:
        """End every ticket and connection."""
        self.door.close()
        self._desk.put(self._end)
        self._desk.close(lambda: not self._links)
        for lender in self._lenders:
            lender.close()

    def _end(self) -> None:
        for link in list(self._links):
            self._lost(link)

    def _serve(self, channel: wire.Channel[Any], _: Knock) -> None:
        """A decode replica, for as long as it stays."""
        channel.frames.limit_bytes = limit_bytes(self._layout)
        link = ControlLink(channel)
        self._desk.put(self._links.add, link)
        data = tuple(lender.addresses for lender in self._lenders)
        try:
            channel.send(
                Welcome(epoch=self.epoch, session=link.session, layout=self._layout, data=data, lease_s=self._limits.lease_s), SEND_S
            )  # fmt: skip
            while True:
                self._desk.put(self._heard, link, channel.receive())
        finally:
            self._desk.put(self._lost, link)

    def _say(self, link: ControlLink, message: Any) -> None:
        if link.gone:
            return
        try:
            link.channel.send(message, SEND_S)
        except (wire.WireError, TimeoutError):
            self._lost(link)

    def _heard(self, link: ControlLink, message: Any) -> None:
        match message:
            case Bid():
                self._asked(link, message)
            case Commit():
                self._commit(link, message.ticket)
            case Abandon():
                ticket = self._keys.get((link.session, message.key))
                if ticket is not None:
                    self._step(self._tickets[ticket], "abort")
            case Pulse():
                self._pulse(link, message.tickets)
            case _:
                self._lost(link)  # a second knock

    def _asked(self, link: ControlLink, ask: Bid) -> None:
        known = self._keys.get((link.session, ask.key))
        if known is None:
            why = self._no_room(ask.request)
            ticket, now = secrets.token_bytes(16), time.monotonic()
            deadline = None if ask.remaining_s is None else time.monotonic() + ask.remaining_s
            request = replace(ask.request, id=ticket.hex(), arrival_s=time.monotonic(), deadline_s=deadline)
            try:
                if why is None:
                    self._engine.submit(request, Loan(ticket, self.told))
            except RayNeuronError as refused:
                why = refused.message
            if why is not None:
                self.counts["declined"] += 1
                self._say(link, Declined(ask.key, why))
                return
            self._tickets[ticket] = Ticket(ticket, ask.key, link, request, Offer(now + self._limits.lease_s))
            self._keys[link.session, ask.key] = known = ticket
        self._say(link, Accepted(ask.key, known))

    def _no_room(self, request: Request) -> str | None:
        if self._draining:
            return "this replica is leaving"
        live = self._live()
        if sum(self._blocks(held.request) for held in live) + self._blocks(request) > self._limits.pinned:
            return f"{self._limits.pinned} blocks may be kept for others at once"
        waiting = sum(len(held.request.prompt_ids) for held in live if held.offer.phase == "queued")
        return f"{waiting} tokens of prompts wait" if waiting > self._limits.waiting_tokens else None

    def _blocks(self, request: Request) -> int:
        return -(-len(request.prompt_ids) // self._layout.block)

    def _settled(self, news: Lent) -> None:
        held = self._tickets.get(news.ticket)
        if held is None or held.offer.phase in OVER or not news.settled:
            return
        self._step(held, "settled", news.settled)
        if held.offer.phase not in OVER:
            for lender in self._lenders:
                lender.lend(news.ticket, held.link.session, news.blocks)
            self._say(held.link, Watermark(news.ticket, news.settled))

    def _delivered(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            held = self._tickets.get(bytes.fromhex(delta.request_id))
            if held is None:
                continue
            if delta.finish_reason in ("error", "abort") and held.offer.phase not in OVER:
                self._step(held, "failed")
                self._say(held.link, Expired(held.ticket, delta.error or "the engine has ended it"))
                continue
            held.first[delta.index] = delta
            if len(held.first) == held.request.params.n:
                self._step(held, "ended")
                if held.offer.phase == "offered":
                    self._say(held.link, FirstTokens(held.ticket, [held.first[i] for i in sorted(held.first)]))

    def _commit(self, link: ControlLink, ticket: bytes) -> None:
        held = self._tickets.get(ticket)
        if held is None or held.link is not link:
            self._say(link, Expired(ticket, "no such ticket"))
            return
        committed = "committed" in self._step(held, "commit")
        self._say(link, Committed(ticket) if committed else Expired(ticket, held.offer.phase))

    def _pulse(self, link: ControlLink, tickets: Iterable[bytes]) -> None:
        for ticket in tickets:
            held = self._tickets.get(ticket)
            if held is not None and held.link is link:
                self._step(held, "beat", self._limits.lease_s * 2 / 3)
        # All of this channel's: one that was accepted since they asked, which they have heard by now, is not to be taken for dead.
        alive = (ticket for (session, _), ticket in self._keys.items() if session == link.session)
        self._say(link, Pulse({ticket: self._tickets[ticket].offer.settled for ticket in alive}))

    def _lost(self, link: ControlLink) -> None:
        if link.gone:
            return
        link.gone = True
        self._links.discard(link)
        link.channel.shutdown()
        for ticket in [ticket for (session, _), ticket in self._keys.items() if session == link.session]:
            self._step(self._tickets[ticket], "lost")

    def _sweep(self, _: float) -> None:
        for ticket in list(self._keys.values()):
            self._step(self._tickets[ticket], "tick")
        for link in tuple(self._links):
            self._follow(link)
        while len(self._tickets) > TOMBSTONES and next(iter(self._tickets.values())).offer.phase in OVER:
            self._tickets.popitem(last=False)

    def _follow(self, link: ControlLink) -> None:
        """Have a decode replica told which prefixes are kept here: it asks where its prompts begin alike."""
        try:
            link.asked = link.asked or self._engine.news(*link.known)
        except RayNeuronError:
            return  # the engine has ended
        if link.asked is not None and link.asked.done():
            news, link.asked = link.asked.result(), None
            if news is not None:
                link.known = news.epoch, news.number
                self._say(link, Prefixes(news))

    def _step(self, held: Ticket, event: OfferEvent, value: float = 0) -> tuple[str, ...]:
        """The ticket's next state; what it held goes back once nobody reads it."""
        before = held.offer.phase
        held.offer, actions = offer_step(held.offer, event, time.monotonic(), value)
        if held.offer.phase in OVER and before not in OVER:
            self.counts[held.offer.phase] += 1
            self._keys.pop((held.link.session, held.key), None)
        if "drop" in actions or "unpin" in actions:
            self._give_back(held)
        return actions

    def _give_back(self, held: Ticket) -> None:
        if held.reading:
            return  # it is on its way, and what the engine has made since goes the same way once nobody reads
        held.first.clear()
        held.request = replace(held.request, prompt_ids=[])  # a tombstone is kept long, and there are many
        held.reading = len(self._lenders)
        for lender in self._lenders:
            lender.withdraw(held.ticket, partial(self._desk.put, self._unread, held))

    def _unread(self, held: Ticket) -> None:
        """One worker's part is read by nobody any more."""
        held.reading -= 1
        if not held.reading:
            self._engine.abort(held.request.id)
            self._engine.unpin(held.ticket)
