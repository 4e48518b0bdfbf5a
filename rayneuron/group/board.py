"""The board: what worker 0 writes once, in memory, for all other workers of its host, and what they have done.

A message to each of seven workers by sockets is seven times a system call, a copy and a wake; here it is one write and one wake. Who
waits sleeps in the kernel (futex), so more ranks than cores do no harm. The memory has no name and goes with the processes. That one has
ended is still seen by its socket, which is also what says more than that a step is done.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rayneuron import wire
from rayneuron.collectives.native import shared_memory
from rayneuron.collectives.shared_memory import BROKEN, LINE, READY, Segment
from rayneuron.errors import ConfigError
from rayneuron.group.messages import Spot, ToWorker
from rayneuron.group.rendezvous import Member
from rayneuron.placement.layout import Layout

_WRITTEN, _FIRST = 1, 4  # lines: those before _FIRST are named in shared_memory.c; then who has answered, then who has read
_SLOTS = 4  # messages that may be unread, which overlapping steps and what goes with them never are
_BUSY = struct.Struct("=d")
_TICK_NS = int(wire.TICK_S * 1e9)


class Behind(Exception):
    """A worker has not come so far in time."""

    def __init__(self, member: Member) -> None:
        super().__init__(f"{member.name} is behind")
        self.member = member


class Board:
    """Worker 0's side. `near`: the others of its host. One thread writes and collects; `abort` is for any."""

    def __init__(self, built: ctypes.CDLL, near: Sequence[Member], slot_bytes: int) -> None:
        self._segment = Segment.create(len(near) + 1, slot_bytes)
        self._memory, self._base = _bytes(self._segment), self._segment.base
        self._built, self._near, self._places, self._turn = built, near, len(near), 0
        self._open, self._ending = True, threading.Lock()

    @classmethod
    def open(cls, near: Sequence[Member], slot_bytes: int) -> Board | None:
        """None where there is nobody to read it, or no C compiler on this host: then all goes by sockets."""
        built = shared_memory() if near else None
        return None if built is None else cls(built, near, slot_bytes)

    def spot(self, member: Member) -> Spot | None:
        """Where a worker reads and answers; None on another host."""
        if member not in self._near:
            return None
        return Spot(self._segment.address, self._near.index(member), self._places, self._segment.slot_bytes)

    def wanting(self, member: Member, layout: Layout) -> bool:
        """Whether a worker says more of a step than stands here, or elsewhere."""
        worker = member.worker
        return bool(worker.node) or (worker.stage == layout.pipeline_parallel - 1 and worker.ranks[0] == 0)

    def write(self, frame: bytes | bytearray, timeout_s: float, check: Callable[[], None]) -> None:
        """For all to read, what `wire.frame` made. Raises Behind, WireError, and what `check` raises."""
        if len(frame) > self._segment.slot_bytes:
            raise wire.WireError(f"a message of {len(frame)} bytes is longer than {self._segment.slot_bytes}")
        check()
        self._turn += 1
        if self._turn > _SLOTS:
            first, turn = _FIRST + self._places, self._turn - _SLOTS
            self._wait(lambda: self._built.rn_wait(self._base, first, self._places, turn, 0, _TICK_NS), first, timeout_s, check)
        start = self._segment.slot(self._turn % _SLOTS)
        self._memory[start : start + len(frame)] = frame
        self._built.rn_ring(self._base, _WRITTEN, self._turn)

    def collect(self, number: int, timeout_s: float, check: Callable[[], None]) -> list[float]:
        """Wait until all have done step `number`; how long each has worked at its last one. Raises Behind, and what `check` raises."""
        check()
        self._wait(lambda: self._built.rn_collect(self._base, number, _FIRST, self._places, _TICK_NS), _FIRST, timeout_s, check)
        return [_BUSY.unpack_from(self._memory, LINE * (_FIRST + place) + 8)[0] for place in range(self._places)]

    def _wait(self, look: Callable[[], int], first: int, timeout_s: float, check: Callable[[], None]) -> None:
        until = 0.0
        while (state := look()) != READY:
            check()
            until = until or time.monotonic() + timeout_s
            if state != BROKEN and time.monotonic() > until:
                raise Behind(self._near[state - first])

    def abort(self) -> None:
        """End all waits, here and in the other workers, now and later; nothing once closed."""
        with self._ending:
            if self._open:
                self._built.rn_break(self._base)

    def close(self) -> None:
        """Give the memory back, after which no other verb may be called; it lasts for those who have opened it."""
        with self._ending:
            self._open, self._memory = False, memoryview(b"")
            self._segment.close()


class BoardReader:
    """The side of another worker. One thread receives and answers."""

    def __init__(self, spot: Spot) -> None:
        built = shared_memory()
        if built is None:
            raise ConfigError("a group on one host needs a C compiler where worker 0 has one; install gcc")
        segment = Segment.attach(spot.address, spot.places + 1, spot.slot_bytes)
        self._memory, self._base, self._slot = _bytes(segment), segment.base, segment.slot
        segment.close()
        self._built, self._places, self._turn = built, spot.places, 0
        self._answers, self._reads = _FIRST + spot.place, _FIRST + spot.places + spot.place
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToWorker)

    def receive(self) -> ToWorker:
        """Wait for the next message, which may be looked into until the next call. Raises Closed."""
        self._turn += 1
        while (state := self._built.rn_read(self._base, self._reads, self._turn, _TICK_NS)) != READY:
            if state == BROKEN:
                raise wire.Closed("the group is lost")
        message: ToWorker = self._decoder.decode(wire.body(self._memory[self._slot(self._turn % _SLOTS) :]))
        return message

    def answer(self, number: int, busy_s: float) -> None:
        """Step `number` is done, after so much work."""
        self._built.rn_answer(self._base, self._answers, number, busy_s, _FIRST, self._places)


def _bytes(segment: Segment) -> memoryview:
    data: Any = segment.bytes.numpy()
    return memoryview(data)
