"""What either side keeps of a hand-off that is under way, and of whom it hands to."""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rayneuron import wire
from rayneuron.engine.remote import Prefill
from rayneuron.news import KvNews
from rayneuron.transfer.peers import PrefillPeer
from rayneuron.transfer.pulling import Halting, PullEnd
from rayneuron.transfer.tickets import Claim, Offer
from rayneuron.types import Request, TokenDelta


@dataclass(slots=True, eq=False)
class Fetching:
    """One prompt that somebody else computes."""

    prefill: Prefill
    peer: PrefillPeer
    fetch: Claim
    ticket: bytes = b""
    why: str = ""
    first: list[TokenDelta] = field(default_factory=list)
    stop: Halting = field(default_factory=Halting)
    cancelled: bool = False
    awaited: int = 0  # workers that have not said how their pull went
    outcome: PullEnd = "pulled"
    stage: str = ""  # how far it had come


@dataclass(slots=True, eq=False)
class ControlLink:
    """A control channel. `session`: what its tickets are read with."""

    channel: wire.Channel[Any]
    session: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    gone: bool = False
    known: tuple[int, int] = (0, 0)  # it has heard of our prefixes up to this
    asked: Future[KvNews | None] | None = None  # of the engine, what it has not


@dataclass(slots=True, eq=False)
class Ticket:
    """A ticket: who has it, for what, and how it stands."""

    ticket: bytes
    key: str
    link: ControlLink
    request: Request
    offer: Offer
    first: dict[int, TokenDelta] = field(default_factory=dict)  # by choice
    reading: int = 0  # workers whose part somebody may still read
