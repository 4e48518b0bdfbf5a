"""What a decode and a prefill pool say to each other; typed frames (`wire`), sealed, never pickle.

A control channel goes from each decode replica (D) to each prefill replica (P) it knows; data connections from each worker of D to those
of P whose KV it reads. The first frame of either is Knock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from rayneuron.news import KvNews
from rayneuron.transfer.layout import KvLayout
from rayneuron.types import Request, TokenDelta

PROMPT_BYTES = 5  # of a token id, packed
MORE_BYTES = 2**20  # whatever else a request holds: biases, stops, logprobs of its first tokens
PREFIX_BYTES = 2**24  # what a prefill replica says of a million blocks it keeps


def limit_bytes(layout: KvLayout) -> int:
    """The longest frame that can be meant: a prompt of the longest sequence, or what is known of its tokens."""
    return MORE_BYTES + 64 * PROMPT_BYTES * layout.limit


class Knock(msgspec.Struct, tag=True, frozen=True):
    """First words: the application's token. `way`: of a data connection that wants the memory itself, by its descriptor, from the same
    host, or by NIXL."""

    token: bytes
    way: Literal["bytes", "shared", "nixl"] = "bytes"


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """P: who is here. `epoch`: of this life of its engine; `session`: of this channel, whose tickets only it may read; `data`: addresses
    of each worker, the nearest first; `lease_s`: how long a ticket lives without a beat."""

    epoch: int
    session: bytes
    layout: KvLayout
    data: tuple[tuple[str, ...], ...]
    lease_s: float


class Bid(msgspec.Struct, tag=True, frozen=True):
    """D: compute this prompt, and the first token of each choice. `key`: D's name for it."""

    key: str
    request: Request
    remaining_s: float | None = None


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """P: it is in the queue, under this ticket."""

    key: str
    ticket: bytes


class Declined(msgspec.Struct, tag=True, frozen=True):
    """P: not now, or never."""

    key: str
    why: str


class Watermark(msgspec.Struct, tag=True, frozen=True):
    """P: the first `settled` positions may be read, in whole blocks or all of them."""

    ticket: bytes
    settled: int


class FirstTokens(msgspec.Struct, tag=True, frozen=True):
    """P: the first token of each choice, as the engine said it."""

    ticket: bytes
    deltas: list[TokenDelta]


class Commit(msgspec.Struct, tag=True, frozen=True):
    """D: everything has been read and checked; was the ticket alive all the time?"""

    ticket: bytes


class Committed(msgspec.Struct, tag=True, frozen=True):
    """P: it was, and is no more."""

    ticket: bytes


class Expired(msgspec.Struct, tag=True, frozen=True):
    """P: there is no such ticket any more, whatever was read of it."""

    ticket: bytes
    why: str = ""


class Abandon(msgspec.Struct, tag=True, frozen=True):
    """D: nobody wants this any more, by D's name for it."""

    key: str
    why: str


class Pulse(msgspec.Struct, tag=True, frozen=True):
    """D: these tickets are wanted; P: these, of all there are of this channel, are alive, each with the positions that may be read."""

    tickets: Mapping[bytes, int]


class Prefixes(msgspec.Struct, tag=True, frozen=True):
    """P: what its cache has come to know and to forget."""

    news: KvNews


class Get(msgspec.Struct, tag=True, frozen=True):
    """A data connection: blocks `first` to `end` of a ticket, by their place in it, of `count` layers from `layer` on, and of runs of
    heads, (first, count). Answered by pieces (`pieces`): with their bytes, or with only their sums where D reads the memory itself."""

    epoch: int
    session: bytes
    ticket: bytes
    first: int
    end: int
    layer: int
    count: int
    runs: tuple[tuple[int, int], ...]
    sums_only: bool = False


class MemoryHere(msgspec.Struct, tag=True, frozen=True):
    """P, with a descriptor: its KV is there, uint8 [layers, blocks, heads, unit], layers `stride` bytes apart."""

    epoch: int
    stride: int
    shape: tuple[int, int, int, int]


class AgentHere(msgspec.Struct, tag=True, frozen=True):
    """P: its KV is read by this NIXL agent, by its metadata: uint8 `shape` [blocks, heads, unit] at the address of each of `layers`."""

    epoch: int
    agent: bytes
    layers: tuple[int, ...]
    shape: tuple[int, int, int]


ToP = Knock | Bid | Commit | Abandon | Pulse
FromP = Welcome | Accepted | Declined | Watermark | FirstTokens | Committed | Expired | Pulse | Prefixes
OfData = Knock | Get
