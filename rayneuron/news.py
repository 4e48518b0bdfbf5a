"""What a replica tells those who choose among replicas: how busy it is, and which prefixes it has KV of (msgspec structs)."""

from __future__ import annotations

import msgspec


class Pressure(msgspec.Struct, frozen=True, array_like=True):
    """The load of one replica as a gateway hears it. `seen`: the last of that gateway's orders that is counted in.

    `backlog_ms`: until a prompt that comes now would begin; `slot_ms`: until a row comes free, and between two; `longest`: tokens of the
    longest sequence; `kv_free`: tokens there is room for.
    """

    seen: int = 0
    backlog_ms: float = 0.0
    rows: int = 0
    longest: int = 0
    slots_free: int = 0
    slot_ms: float = 0.0
    kv_free: int = 0
    step_ms: float = 0.0
    waiting: int = 0
    accepting: bool = True


class Stored(msgspec.Struct, tag=True, frozen=True):
    """Blocks that can be had from now on: a chain behind `parent`, a hash or a root."""

    parent: bytes
    hashes: list[bytes]


class Removed(msgspec.Struct, tag=True, frozen=True):
    """Blocks whose room is used anew."""

    hashes: list[bytes]


class Cleared(msgspec.Struct, tag=True, frozen=True):
    """Nothing is known any more."""


class KvNews(msgspec.Struct, frozen=True):
    """What a follower lacks: after `batches`, each the events of one step, it knows everything up to `number` of `epoch`.

    `held`: where the batches do not reach back far enough, all hashes there are, to begin anew with.
    """

    epoch: int
    number: int
    batches: list[list[Stored | Removed | Cleared]]
    held: list[bytes] | None = None
