"""KV of another process of this host: its memory is mapped to be read, and copied by pieces, each hashed while it is still warm.

Nothing here notices when what is read belongs to somebody else by now: the sums say that the bytes are those the other side meant, and
COMMIT, that they still were when everything had been read.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
from math import prod

import msgspec
import numpy as np

from rayneuron import wire
from rayneuron.devices.base import KvMemory
from rayneuron.transfer.base import Damaged, Lost, Pull, Receipt
from rayneuron.transfer.dialogue import Dialogue
from rayneuron.transfer.messages import Knock, MemoryHere
from rayneuron.transfer.pieces import PLACES, SUMS, SUMS_AT_ONCE, KvPiece, copy, digest, places_of, segments, sums_of


class Shared:
    """The memory of one worker of a prefill pool. Raises Lost where it is not on this host, or gives no memory away."""

    def __init__(self, address: str, token: bytes, epoch: int, stall_s: float) -> None:
        self._units = _mapped(address, token, epoch, stall_s)
        self._talk = Dialogue((address,), token, stall_s)

    def pull(self, want: Pull, into: KvMemory, stop: threading.Event) -> Receipt:
        """As `Transport`."""
        talk, read, unit, size = self._talk, want.read, into.units[0].shape[-1], 0
        with talk.begun(want, sums_only=True):
            n, sums = want.end - want.first, list[int]()
            places: list[int] = self._list(want, places_of(want.first, n), n, "<i4", PLACES, stop)
            if not 0 <= min(places) <= max(places) < len(self._units[0]):
                raise Damaged("a block outside the memory")
            every = list(talk.pieces(want, unit))
            for i, (piece, here) in enumerate(every):
                if i % SUMS_AT_ONCE == 0:
                    count = min(SUMS_AT_ONCE, len(every) - i)
                    sums = self._list(want, sums_of(i, count), count, "<u8", SUMS, stop)
                count, at = piece.blocks * piece.heads * unit, piece.first - want.first
                theirs = segments(self._units, piece.layer, piece.head, piece.heads, places[at : at + piece.blocks])
                layer, blocks = piece.layer - read.there + read.here, want.blocks[at : at + piece.blocks]
                ours = segments(into.units, layer, here, piece.heads, blocks)
                copy(ours, theirs)
                if digest(ours) != sums[i % SUMS_AT_ONCE]:
                    raise Damaged(f"piece {piece.number} is not what was meant")
                size += count
        return Receipt(size, "shared")

    def _list(self, want: Pull, of: KvPiece, count: int, kind: str, what: int, stop: threading.Event) -> list[int]:
        """So many numbers, whole or not at all."""
        size = count * np.dtype(kind).itemsize
        check = self._talk.head(want, of, size, stop, what)
        data = self._talk.receive(size, stop)
        if digest([data]) != check:
            raise Damaged("a list is not what was sent")
        numbers: list[int] = np.frombuffer(data, kind).tolist()
        return numbers

    def close(self) -> None:
        """As `Transport`."""
        self._talk.close()
        self._units = ()


def _mapped(address: str, token: bytes, epoch: int, stall_s: float) -> tuple[np.ndarray, ...]:
    """Its units by layer, to be read only."""
    if not address.startswith("unix:"):
        raise Lost(f"{address} is not on this host")
    try:
        with wire.connect(address, 0.5) as connection:
            connection.settimeout(stall_s)
            connection.sendall(wire.frame(Knock(token, memory=True), sealed=True))
            data, fds, _, _ = socket.recv_fds(connection, wire.FIRST_BYTES, 1)
    except (OSError, TimeoutError) as problem:
        raise Lost(str(problem)) from None
    try:
        if len(fds) != 1 or len(data) <= 4:
            raise Lost("it gives no memory away")
        said = msgspec.msgpack.decode(data[4:], type=MemoryHere)
        layers, size = said.shape[0], prod(said.shape[1:])
        if said.epoch != epoch or size > said.stride or os.fstat(fds[0]).st_size < layers * said.stride:
            raise Lost("the memory is not what was promised")
        held = np.frombuffer(mmap.mmap(fds[0], layers * said.stride, prot=mmap.PROT_READ), np.uint8).reshape(layers, said.stride)
        return tuple(layer[:size].reshape(said.shape[1:]) for layer in held)
    except msgspec.DecodeError as problem:
        raise Lost(str(problem)) from None
    finally:
        for fd in fds:
            os.close(fd)
