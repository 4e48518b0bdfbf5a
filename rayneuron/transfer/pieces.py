"""KV on the way, in pieces: which there are, where their bytes lie, the header and the sum of each; both sides count them alike.

A piece is a run of heads of some consecutive blocks of a ticket, of one layer. Its bytes are those of its blocks in order, wherever they
lie; so is its sum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rayneuron.transfer.base import PIECE_BYTES, Damaged, Stale

Stretch = NDArray[np.uint8]  # a stretch of memory

# magic, kind, first head, epoch, ticket, number, layer, heads, first block, blocks, bytes, sum
_HEAD = struct.Struct("<4sHHQ16sIHHIIQQ")
HEAD_BYTES = _HEAD.size
_MAGIC = b"rnKV"
PIECE, PLACES, STALE, SUMS = 1, 2, 3, 4
SUMS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class KvPiece:
    """`blocks` blocks of a ticket from `first` on, heads `head` to `head` + `heads` of layer `layer`; `number` of its Get."""

    number: int
    layer: int
    head: int
    heads: int
    first: int
    blocks: int


def pieces(layer: int, count: int, runs: Sequence[tuple[int, int]], first: int, end: int, unit: int) -> Iterator[KvPiece]:
    """All pieces of one Get, in the order in which they come."""
    number = 0
    for at in range(layer, layer + count):
        for head, heads in runs:
            each = max(1, PIECE_BYTES // (heads * unit))
            for start in range(first, end, each):
                yield KvPiece(number, at, head, heads, start, min(each, end - start))
                number += 1


def places_of(first: int, blocks: int) -> KvPiece:
    """What goes before the list of where a ticket's blocks lie."""
    return KvPiece(0, 0, 0, 0, first, blocks)


def sums_of(number: int, count: int) -> KvPiece:
    """What goes before the sums of `count` pieces from `number` on."""
    return KvPiece(number, 0, 0, 0, 0, count)


def segments(units: Sequence[NDArray[Any]], layer: int, head: int, heads: int, blocks: Sequence[int]) -> list[Stretch]:
    """Where the bytes lie: one view for all of it where that is one stretch of memory, else one a block."""
    whole, first, n = units[layer], blocks[0], len(blocks)
    if heads == whole.shape[1] and [*blocks] == [*range(first, first + n)]:
        return [whole[first : first + n].reshape(-1)]
    return [whole[block, head : head + heads].reshape(-1) for block in blocks]


def digest(parts: Sequence[Any]) -> int:
    """XXH3 of some stretches of memory, one after another."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    running = xxhash.xxh3_64()
    for part in parts:
        running.update(part)
    return running.intdigest()


def copy(to: Sequence[Stretch], of: Sequence[Stretch]) -> None:
    """The bytes of `of` into `to`, whose stretches may be cut in another way. Other threads run meanwhile."""
    if len(to) == len(of):
        for there, here in zip(of, to, strict=True):
            np.copyto(here, there)
        return
    one, many = (to[0], of) if len(to) == 1 else (of[0], to)
    at = 0
    for part in many:
        there, here = (part, one[at : at + len(part)]) if len(to) == 1 else (one[at : at + len(part)], part)
        np.copyto(here, there)
        at += len(part)


def header(epoch: int, ticket: bytes, piece: KvPiece, size: int, check: int, kind: int = PIECE) -> bytes:
    """What goes before a piece."""
    p = piece
    return _HEAD.pack(_MAGIC, kind, p.head, epoch, ticket, p.number, p.layer, p.heads, p.first, p.blocks, size, check)


def stale(epoch: int, ticket: bytes) -> bytes:
    """What goes instead of a piece where the ticket is not alive."""
    return header(epoch, ticket, KvPiece(0, 0, 0, 0, 0, 0), 0, 0, STALE)


def said(data: bytes | bytearray, epoch: int, ticket: bytes, piece: KvPiece, size: int, kind: int = PIECE) -> int:
    """The sum in a header, which must be of this very piece. Raises Damaged, Stale."""
    if len(data) == HEAD_BYTES and data[: HEAD_BYTES - 8] == stale(epoch, ticket)[:-8]:
        raise Stale("the ticket is not alive")
    wanted = header(epoch, ticket, piece, size, 0, kind)
    if data[: HEAD_BYTES - 8] != wanted[:-8]:
        raise Damaged(f"the header of piece {piece.number} is of something else: {bytes(data).hex()}")
    check: int = struct.unpack_from("<Q", data, HEAD_BYTES - 8)[0]
    return check
