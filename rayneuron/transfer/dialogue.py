"""A data connection, of who reads: one Get after another, each answered by headers and bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayneuron import wire
from rayneuron.transfer.base import AHEAD_BYTES, Damaged, Halted, Lost, Pull
from rayneuron.transfer.messages import Get, Knock
from rayneuron.transfer.pieces import HEAD_BYTES, PIECE, PLACES, SUMS, KvPiece, digest, pieces, places_of, said, summed

CONNECT_S = 2.0


class Dialogue:
    """Connects when it is needed; what has gone wrong once is closed, since nobody knows where in an answer it stands. One thread."""

    def __init__(self, addresses: Sequence[str], token: bytes, stall_s: float) -> None:
        """`addresses`: of the same listener's process, the nearest first; the first that answers is taken."""
        self._addresses = tuple(addresses)
        self._token = token
        self._stall_s = stall_s
        self._connection: socket.socket | None = None

    @contextmanager
    def begun(self, want: Pull, layers: tuple[int, int] | None = None, *, sums_only: bool = False) -> Iterator[None]:
        """Bid for `want`, of all its layers or of (first, count) of theirs; within, all that is answered must be read."""
        try:
            layer, count = layers or (want.read.there, want.read.count)
            get = Get(want.epoch, want.session, want.ticket, want.first, want.end, layer, count, _runs(want), sums_only)
            self._open().sendall(wire.frame(get, sealed=True))
            yield
        except OSError as problem:
            self.close()
            raise Lost(f"{self._addresses[0]}: {problem}") from None
        except BaseException:
            self.close()
            raise

    def pieces(self, want: Pull, unit: int, layers: tuple[int, int]) -> Iterator[KvPiece]:
        """What comes of layers (first, count) of theirs."""
        return pieces(*layers, _runs(want), want.first, want.end, unit)

    def summed(self, want: Pull, unit: int) -> Iterator[KvPiece]:
        """Of what sums come."""
        return summed(want.read.there, want.read.count, _runs(want), want.first, want.end, unit)

    def head(self, want: Pull, piece: KvPiece, size: int, stop: threading.Event, kind: int = PIECE) -> int:
        """The sum of the next piece, which must be this one. Raises Damaged, Stale."""
        return said(self.receive(HEAD_BYTES, stop), want.epoch, want.ticket, piece, size, kind)

    def places(self, want: Pull, stop: threading.Event) -> NDArray[Any]:
        """Where the blocks of `want` lie there, where only sums come. Raises Damaged, Stale."""
        n = want.end - want.first
        return self._numbers(want, places_of(want.first, n), n, "<i4", PLACES, stop)

    def agree(self, want: Pull, piece: KvPiece, found: NDArray[Any], stop: threading.Event) -> None:
        """Hear the sums of a piece, which must be those found here. Raises Damaged, Stale."""
        if not np.array_equal(found, self._numbers(want, piece, len(found), "<u8", SUMS, stop)):
            raise Damaged(f"piece {piece.number} is not what was meant")

    def _numbers(self, want: Pull, of: KvPiece, count: int, kind: str, what: int, stop: threading.Event) -> NDArray[Any]:
        """So many of numpy's `kind`, whole or not at all. Raises Damaged, Stale."""
        size = count * np.dtype(kind).itemsize
        check = self.head(want, of, size, stop, what)
        data = self.receive(size, stop)
        if digest(data) != check:
            raise Damaged("a list is not what was sent")
        return np.frombuffer(data, kind)

    def receive(self, count: int, stop: threading.Event) -> bytearray:
        """So many bytes."""
        data = bytearray(count)
        self.receive_into([memoryview(data)], stop)
        return data

    def receive_into(self, parts: Sequence[Any], stop: threading.Event) -> None:
        """Fill some stretches of memory, one after another. Raises Lost, Halted."""
        connection = self._open()
        left = [memoryview(part).cast("B") for part in parts]
        until = time.monotonic() + self._stall_s
        while left:
            if stop.is_set():
                raise Halted("nobody wants it any more")
            try:
                got = connection.recvmsg_into(left[:512], 0, socket.MSG_WAITALL)[0]  # or what has come within a tick
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Lost(f"{self._addresses[0]} has sent nothing for {self._stall_s:g} s") from None
                continue
            if not got:
                raise Lost(f"{self._addresses[0]} has closed the connection")
            until = time.monotonic() + self._stall_s
            while left and got >= len(left[0]):
                got -= len(left.pop(0))
            if got:
                left[0] = left[0][got:]

    def _open(self) -> socket.socket:
        problems = []
        for address in self._addresses if self._connection is None else ():
            try:
                self._connection = wire.connect(address, CONNECT_S)
            except TimeoutError as problem:
                problems.append(str(problem))
                continue
            self._addresses = (address,)
            wire.ticking(self._connection)
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, AHEAD_BYTES)
            self._connection.sendall(wire.frame(Knock(self._token), sealed=True))
            break
        if self._connection is None:
            raise Lost("; ".join(problems) or "it has no address")
        return self._connection

    def close(self) -> None:
        """Close the connection; the next Get opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _runs(want: Pull) -> tuple[tuple[int, int], ...]:
    return tuple((run.there, run.count) for run in want.read.runs)
