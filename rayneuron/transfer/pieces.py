"""KV on the way, in pieces: which there are, where their bytes lie, the header and the sum of each; both sides count them alike.

A piece is a run of heads of some consecutive blocks of a ticket, of one layer, or of some, where only sums are said. Its bytes are those
of its blocks in order, wherever they lie; its sum is of the sums of these runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rayneuron.devices.base import Carried, KvRuns
from rayneuron.transfer.base import PIECE_BYTES, SUMMED_BYTES, Damaged, Stale

Stretch = NDArray[np.uint8]  # a stretch of memory

# magic, kind, first head, epoch, ticket, number, layer, heads, first block, blocks, bytes, sum
_HEAD = struct.Struct("<4sHHQ16sIHHIIQQ")
HEAD_BYTES = _HEAD.size
_MAGIC = b"rnKV"
PIECE, PLACES, STALE, SUMS = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class KvPiece:
    """`blocks` blocks of a ticket from `first` on, heads `head` to `head` + `heads` of `layers` layers from `layer` on; the `number` of its
    Get."""

    number: int
    layer: int
    head: int
    heads: int
    first: int
    blocks: int
    layers: int = 1

    def within(self, first: int, end: int, layers: int = 0) -> tuple[int, int]:
        """Which runs these are, (first, end), of those of blocks `first` to `end` of every layer from `layers` on."""
        at = (self.layer - layers) * (end - first) + self.first - first
        return at, at + self.layers * self.blocks


def at_once(blocks: int, size: int) -> int:
    """How many of so many blocks of `size` bytes make a piece: as good as equal parts."""
    return -(-blocks // -(-blocks * size // PIECE_BYTES))


def pieces(layer: int, count: int, runs: Sequence[tuple[int, int]], first: int, end: int, unit: int) -> Iterator[KvPiece]:
    """All pieces of one Get, in the order in which they come."""
    number = 0
    for at in range(layer, layer + count):
        for head, heads in runs:
            each = at_once(end - first, heads * unit)
            for start in range(first, end, each):
                yield KvPiece(number, at, head, heads, start, min(each, end - start))
                number += 1


def summed(layer: int, count: int, runs: Sequence[tuple[int, int]], first: int, end: int, unit: int) -> Iterator[KvPiece]:
    """The same where only sums are said: whole layers, as many at once as make SUMMED_BYTES."""
    number = 0
    for head, heads in runs:
        each = layers_at_once((end - first) * heads * unit)
        for at in range(layer, layer + count, each):
            yield KvPiece(number, at, head, heads, first, end - first, min(each, layer + count - at))
            number += 1


def layers_at_once(size: int) -> int:
    """How many layers of `size` bytes make a piece of which only the sums are said."""
    return max(1, SUMMED_BYTES // size)


def places_of(first: int, blocks: int) -> KvPiece:
    """What goes before the list of where a ticket's blocks lie."""
    return KvPiece(0, 0, 0, 0, first, blocks)


def check_places(places: NDArray[Any], shape: Sequence[int], unit: int) -> None:
    """Raise Damaged unless these blocks are of a memory [blocks, heads, unit] whose units are ours."""
    if not 0 <= places.min() <= places.max() < shape[0] or shape[-1] != unit:
        raise Damaged("a block outside the memory, or of another size")


def stretches(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of those that lie side by side."""
    made: list[tuple[int, int]] = []
    for block in blocks:
        if made and block == sum(made[-1]):
            made[-1] = made[-1][0], made[-1][1] + 1
        else:
            made.append((block, 1))
    return made


def segments(units: Sequence[NDArray[Any]], layer: int, head: int, heads: int, blocks: Sequence[int]) -> list[Stretch]:
    """Where the bytes lie: a view of each stretch of memory."""
    whole = units[layer]
    if heads == whole.shape[1]:
        return [whole[first : first + count].reshape(-1) for first, count in stretches(blocks)]
    return [whole[block, head : head + heads].reshape(-1) for block in blocks]


def digest(data: Any) -> int:
    """XXH3 of a list; of a piece by that of its runs' sums."""
    return xxhash.xxh3_64_intdigest(data)


def carry(of: KvRuns, to: KvRuns | None = None) -> Carried:
    """As `devices.base.Carry`, for memory whose device has none."""
    n = len(of.blocks)

    def carried(first: int, end: int) -> NDArray[np.uint64]:
        sums = []
        for layer, i in (divmod(at, n) for at in range(first, end)):
            run: Any = of.units[layer][of.blocks[i], of.head : of.head + of.heads].reshape(-1)
            if to is not None:
                copied: Any = to.units[layer][to.blocks[i], to.head : to.head + to.heads].reshape(-1)
                np.copyto(copied, run)
                run = copied  # what lies here is hashed: the other may have changed
            sums.append(xxhash.xxh3_64_intdigest(run))
        return np.array(sums, np.uint64)

    return carried


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
