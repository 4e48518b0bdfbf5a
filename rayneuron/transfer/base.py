"""The seam between a hand-off and the way its bytes take: what is wanted, where it goes, and how that can go wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from rayneuron.devices.base import KvMemory
from rayneuron.engine.remote import Loan
from rayneuron.news import KvNews
from rayneuron.transfer.layout import Reading
from rayneuron.types import Request

PIECE_BYTES = 1 << 20  # what is received, then hashed and copied while it is still in the processor's cache
AHEAD_BYTES = 4 << 20  # of a socket's buffer: one side hashes its next pieces while the other takes these
SHARING = frozenset({"auto", "shared"})  # of `pools.transport`: those that let processes of this host map KV
SUMMED_BYTES = 16 << 20  # what is copied and hashed in one call where the memory itself can be read


class Stale(Exception):
    """The ticket is not alive, or was never this channel's."""


class Damaged(Exception):
    """What came is not what was sent, or not what was asked for."""


class Lost(Exception):
    """The other side is gone, or silent for too long."""


class Halted(Exception):
    """Nobody wants it any more."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks `first` to `end` of a ticket, as far as `read` says, into `blocks` of our own memory."""

    epoch: int
    session: bytes
    ticket: bytes
    first: int
    end: int
    read: Reading
    blocks: tuple[int, ...]


class Transport(Protocol):
    """The way to the KV of one worker of another pool."""

    def pull(self, want: Pull, into: KvMemory, stop: threading.Event) -> int:
        """Read, verify, and return how many bytes once they lie in our memory. Blocks; one at a time. Raises Stale, Damaged, Lost, Halted,
        after which nothing writes any more."""

    def close(self) -> None:
        """Give connections and mappings back."""


class Lends(Protocol):
    """What is needed of the engine's thread. Nothing here waits for it."""

    def submit(self, request: Request, loan: Loan | None = None) -> None:
        """Compute a prompt and the first token of each choice, and keep the KV for a ticket. Raises RequestError, NotReady."""

    def abort(self, request_id: str) -> None:
        """Nobody wants it any more."""

    def unpin(self, ticket: bytes) -> None:
        """Nobody reads what was kept for a ticket, if anything was."""

    def news(self, epoch: int, number: int) -> Future[KvNews | None] | None:
        """What whoever knows its prefixes up to `number` of `epoch` lacks; None where that is nothing."""


class LendsKv(Protocol):
    """What is needed of each worker that holds a part of the KV (`lending.Lender`, or a worker's by its agent)."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it is read, the nearest first."""

    def lend(self, ticket: bytes, session: bytes, blocks: Sequence[int]) -> None:
        """These blocks may be read."""

    def withdraw(self, ticket: bytes, gone: Callable[[], None]) -> None:
        """None may; `gone` once nobody does."""

    def close(self) -> None:
        """End every connection."""
