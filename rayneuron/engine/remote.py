"""What crosses between an engine and those who compute prompts for each other: the seam of prefill and decode pools, in plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rayneuron.types import Request, TokenDelta


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that somebody else may compute. `key`: of this asking alone; `known`: leading positions, whole blocks, whose KV is here
    already; `blocks`: all that hold the prompt, in order: those behind `known` are written by whoever answers, and by nobody else.
    `hashes`: of its full blocks, where KV of equal prefixes serves."""

    key: str
    request: Request
    known: int
    blocks: tuple[int, ...]
    hashes: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class First:
    """The first tokens, a delta a choice, as the other engine said them. They go out before any KV has come."""

    key: str
    deltas: list[TokenDelta]


@dataclass(frozen=True, slots=True)
class Arrived:
    """The KV of every position of the prompt is in its blocks, and nobody writes them any more."""

    key: str


@dataclass(frozen=True, slots=True)
class Absent:
    """No KV comes, and nobody writes the blocks any more: it is computed here."""

    key: str
    why: str


class Prefills(Protocol):
    """Others who compute prompts. All but `close` is called on the engine's thread and does not block."""

    wake: Callable[[], None]  # set by who runs the engine; called, from any thread, when `take` has something

    def ask(self, prefill: Prefill) -> bool:
        """False: nobody does, and nothing has happened. True: one Arrived or Absent follows, before it at most one First."""

    def kept(self, why: str) -> None:
        """A prompt is not asked for, but computed here."""

    def cancel(self, key: str) -> None:
        """Nobody wants it any more; its Arrived or Absent still comes, and until then its blocks are held. Harmless twice."""

    def take(self) -> list[First | Arrived | Absent]:
        """What has come since the last time."""

    def close(self) -> None:
        """End everything; afterwards nobody writes."""


@dataclass(frozen=True, slots=True)
class Lent:
    """The first `settled` positions of a lent prompt have KV in `blocks`, in whole blocks or all of them. What was said once stays so,
    and once all of it is said nobody writes these blocks before the ticket is unpinned."""

    ticket: bytes
    settled: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loan:
    """A request is computed for somebody else: its prompt, and one token a choice. `told` is called on the engine's thread, before the
    deltas of the same step are delivered, and must not block."""

    ticket: bytes
    told: Callable[[Lent], None]
