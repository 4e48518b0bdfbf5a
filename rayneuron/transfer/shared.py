"""KV of another process of this host: its memory is mapped to be read, and copied and hashed in one pass.

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
from rayneuron.devices.base import KvMemory, KvRuns
from rayneuron.transfer.base import Lost, Pull
from rayneuron.transfer.dialogue import Dialogue
from rayneuron.transfer.messages import Knock, MemoryHere
from rayneuron.transfer.pieces import carry, check_places


class Shared:
    """The memory of one worker of a prefill pool. Raises Lost where it is not on this host, or gives no memory away."""

    def __init__(self, address: str, token: bytes, epoch: int, stall_s: float) -> None:
        self._units = _mapped(address, token, epoch, stall_s)
        self._talk = Dialogue((address,), token, stall_s)

    def pull(self, want: Pull, into: KvMemory, stop: threading.Event) -> int:
        """As `Transport`."""
        talk, read, unit, size = self._talk, want.read, into.units[0].shape[-1], 0
        with talk.begun(want, sums_only=True):
            places = talk.places(want, stop)
            check_places(places, self._units[0].shape, unit)
            theirs, ours = self._units[read.there : read.there + read.count], into.units[read.here : read.here + read.count]
            at, how = places.tolist(), into.carry or carry
            carried = {r.there: how(KvRuns(theirs, at, r.there, r.count), KvRuns(ours, want.blocks, r.here, r.count)) for r in read.runs}
            for piece in talk.summed(want, unit):
                found = carried[piece.head](*piece.within(want.first, want.end, read.there))  # they hash the same meanwhile
                talk.agree(want, piece, found, stop)
                size += len(found) * piece.heads * unit
        return size

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
            connection.sendall(wire.frame(Knock(token, way="shared"), sealed=True))
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
