"""A worker of a prefill pool gives its KV to those who have a ticket, as memory to map or as bytes; a thread a connection.

On one host a socket is given the memory's own pages and not copies of them. What it has not passed on when the ticket ends may so become
somebody else's: the sum, of what was meant, tells that from this, and COMMIT that nothing was so late.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayneuron import wire
from rayneuron.devices.base import KvMemory, KvRuns
from rayneuron.transfer.base import AHEAD_BYTES, SHARING
from rayneuron.transfer.door import Door
from rayneuron.transfer.messages import Get, Knock, MemoryHere, OfData
from rayneuron.transfer.nixl import NixlMemory
from rayneuron.transfer.pieces import PLACES, SUMS, KvPiece, carry, digest, header, pieces, places_of, segments, stale, stretches, summed

LATE_S, ENDED = 0.5, 1024  # within which a worker hears what those who read know already; tickets it remembers as withdrawn


@dataclass(slots=True)
class _Lent:
    """The blocks of one ticket as far as they may be read, and who reads them."""

    session: bytes
    blocks: Sequence[int]
    readers: list[socket.socket] = field(default_factory=list)
    gone: Callable[[], None] | None = None  # what waits for the last of them


class Lender:
    """The tickets one worker knows. What is withdrawn is read by nobody once `gone` has been called."""

    def __init__(self, memory: KvMemory, token: bytes, epoch: int, ip: str | None, *, way: str = "auto") -> None:
        """`ip`: of this node, where other hosts may come; `way`: as `pools.transport`. Raises ConfigError."""
        self._memory = memory
        self._epoch = epoch
        self._gives = way in SHARING
        self._registered = NixlMemory(memory, epoch) if way == "nixl" else None
        self._fd = os.dup(memory.fd) if memory.fd >= 0 else -1  # whoever closes the other's number may give it to another file
        self._lent: dict[bytes, _Lent] = {}
        self._ended: deque[bytes] = deque(maxlen=ENDED)
        self._heard = threading.Condition(threading.Lock())  # guards the two above; told of every change
        self.door = Door(token, ip, OfData, self._serve)
        self.addresses = self.door.addresses  # where it is read, the nearest first

    def lend(self, ticket: bytes, session: bytes, blocks: Sequence[int]) -> None:
        """These blocks, in the ticket's order, may be read from now on."""
        with self._heard:
            self._lent.setdefault(ticket, _Lent(session, blocks)).blocks = blocks
            self._heard.notify_all()

    def withdraw(self, ticket: bytes, gone: Callable[[], None]) -> None:
        """Nobody may read a ticket any more; `gone` is called once nobody does, maybe on another thread."""
        with self._heard:
            lent = self._lent.pop(ticket, None)
            self._ended.append(ticket)
            self._heard.notify_all()
            if lent is not None and lent.readers:
                lent.gone = gone
                for reader in lent.readers:
                    wire.shut(reader)
                return
        gone()

    def close(self) -> None:
        """End every connection."""
        self.door.close()
        with self._heard:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if self._registered is not None:
            self._registered.close()

    def _serve(self, channel: wire.Channel[Any], knock: Knock) -> None:
        if knock.way == "nixl" and self._registered is not None:
            channel.send(self._registered.here)
        if knock.way == "shared":
            self._give_memory(channel.socket)
        if knock.way != "bytes":
            return
        channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, AHEAD_BYTES)
        with self._file(not channel.far) as fd:
            while True:
                get = channel.receive()
                if not isinstance(get, Get):
                    raise wire.WireError("a second knock")
                self._answer(channel.socket, get, fd)

    def _give_memory(self, connection: socket.socket) -> None:
        memory = self._memory
        blocks, heads, unit = memory.units[0].shape
        said = MemoryHere(self._epoch, memory.stride, (len(memory.units), blocks, heads, unit))
        with self._heard:
            if self._gives and self._fd >= 0:
                socket.send_fds(connection, [bytes(wire.frame(said))], [self._fd])

    @contextmanager
    def _file(self, near: bool) -> Iterator[int]:
        """The memory's descriptor for one connection, which may outlive the lender's own; -1 where sending from it does not pay."""
        with self._heard:
            fd = os.dup(self._fd) if near and self._fd >= 0 else -1
        try:
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)

    def _answer(self, connection: socket.socket, get: Get, fd: int) -> None:
        units = self._memory.units
        _, heads, unit = units[0].shape
        with self._reading(connection, get) as blocks:
            if blocks is None or get.epoch != self._epoch:
                connection.sendall(stale(get.epoch, get.ticket))
                return
            _check(get, len(blocks), len(units), heads)
            asked, how = blocks[get.first : get.end], self._memory.carry or carry
            sums = {head: how(KvRuns(units, asked, head, n), None) for head, n in get.runs}
            if get.sums_only:
                places = np.array(asked, "<i4")
                _send_list(connection, get, places_of(get.first, len(places)), places, PLACES)
                for piece in summed(get.layer, get.count, get.runs, get.first, get.end, unit):
                    _send_list(connection, get, piece, sums[piece.head](*piece.within(get.first, get.end)), SUMS)
                return
            for piece in pieces(get.layer, get.count, get.runs, get.first, get.end, unit):
                check = digest(sums[piece.head](*piece.within(get.first, get.end)))
                said = header(get.epoch, get.ticket, piece, piece.blocks * piece.heads * unit, check)
                where = blocks[piece.first : piece.first + piece.blocks]
                if fd < 0 or piece.heads < heads:
                    _send(connection, [said, *segments(units, piece.layer, piece.head, piece.heads, where)])
                    continue
                _send(connection, [said], socket.MSG_MORE)
                for start, count in stretches(where):
                    _send_file(connection, fd, piece.layer * self._memory.stride + start * heads * unit, count * heads * unit)

    @contextmanager
    def _reading(self, connection: socket.socket, get: Get) -> Iterator[Sequence[int] | None]:
        """The ticket's blocks, which stay what they are until this reader has left; None where it may not read them.

        Who reads hears of them from the replica's first worker, and may be here before its word to this one.
        """
        with self._heard:
            self._heard.wait_for(lambda: self._knows(get), LATE_S)
            lent = self._lent.get(get.ticket)
            allowed = lent is not None and wire.same_token(get.session, lent.session)
            if lent is not None and allowed:
                lent.readers.append(connection)
        try:
            yield lent.blocks if lent is not None and allowed else None
        finally:
            gone = None
            if lent is not None and allowed:
                with self._heard:
                    lent.readers.remove(connection)
                    gone = lent.gone if not lent.readers else None
            if gone is not None:
                gone()

    def _knows(self, get: Get) -> bool:
        lent = self._lent.get(get.ticket)
        there = lent is not None and get.end <= len(lent.blocks)
        return there or get.epoch != self._epoch or get.ticket in self._ended


def _check(get: Get, blocks: int, layers: int, heads: int) -> None:
    """Raise WireError where a Get asks for what is not there."""
    whole = 0 <= get.first < get.end <= blocks and 0 <= get.layer < get.layer + get.count <= layers
    if not whole or not get.runs or len(get.runs) > heads or not all(0 <= head < head + n <= heads for head, n in get.runs):
        raise wire.WireError(f"blocks {get.first}-{get.end} of {blocks}, layers {get.layer}+{get.count}, heads {get.runs}")


def _send_list(connection: socket.socket, get: Get, of: KvPiece, numbers: NDArray[Any], kind: int) -> None:
    data = numbers.tobytes()
    _send(connection, [header(get.epoch, get.ticket, of, len(data), digest(data), kind), data])


def _send_file(connection: socket.socket, fd: int, start: int, size: int) -> None:
    while size:
        try:
            sent = os.sendfile(connection.fileno(), fd, start, size)
        except BlockingIOError:
            continue
        start, size = start + sent, size - sent


def _send(connection: socket.socket, parts: Sequence[Any], flags: int = 0) -> None:
    """All of some stretches of memory. The other side may be slow; who withdraws the ticket breaks the connection."""
    left = [memoryview(part).cast("B") for part in parts]
    while left:
        try:
            sent = connection.sendmsg(left[:512], [], socket.MSG_NOSIGNAL | flags)
        except BlockingIOError:
            continue
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]
