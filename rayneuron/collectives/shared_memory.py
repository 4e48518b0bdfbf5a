"""Collectives of ranks on one host through one shared segment: a slot a rank, two parities, counters; sums in rank order.

A rank writes its slot, publishes its turn, waits for the others' turns and reads their slots. Turns alternate between two sets of slots:
a rank that begins turn n has seen everybody begin turn n - 1, hence finish reading turn n - 2, so its slot of that parity is free.
Every rank adds the slots in the same order, so all get the same bits. Gloo over loopback takes 250-450 us for 8 KB, this 5-20.
The segment is a memfd: it has no name, so nothing is left of it however its processes end, and no limit of /dev/shm applies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayneuron.collectives.native import shared_memory
from rayneuron.errors import ConfigError, WorkerLost
from rayneuron.processes import process_started

SLOT_BYTES = 2**20
LINE = 64  # bytes of a counter: one cache line, so that ranks do not write into each other's
READY, BROKEN = -1, -2
SPINS = 2000  # about 50 us: longer than the skew of ranks in step, shorter than what a waiting core is worth
PATIENCE_S = 0.1  # how long a wait stays in C before it looks whether the others live
KINDS = {torch.float32: 0, torch.bfloat16: 1}
NARROW = (torch.float16, torch.bfloat16)  # summed in float32
Peer = tuple[int, int]  # pid, start time in kernel ticks


class Segment:
    """The memory of one group: counters, two slots a rank, a mail slot a rank. `address`: (pid, descriptor), for other processes."""

    def __init__(self, descriptor: int, ranks: int, slot_bytes: int) -> None:
        self.ranks = ranks
        self.slot_bytes = slot_bytes
        self.address = (os.getpid(), descriptor)
        self.first_slot = -(-LINE * (1 + ranks + 2 * ranks * ranks) // 4096) * 4096
        self._descriptor = descriptor
        size = self.first_slot + 3 * ranks * slot_bytes
        if os.fstat(descriptor).st_size == 0:
            os.ftruncate(descriptor, size)  # untouched pages cost nothing
        self.bytes = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, size), np.uint8))
        self.base = self.bytes.data_ptr()

    @classmethod
    def create(cls, ranks: int, slot_bytes: int = SLOT_BYTES) -> Segment:
        """A new one, all counters zero."""
        return cls(os.memfd_create("rayneuron", os.MFD_CLOEXEC), ranks, slot_bytes)

    @classmethod
    def attach(cls, address: Sequence[int], ranks: int, slot_bytes: int = SLOT_BYTES) -> Segment:
        """The one that process `address[0]` created. Raises ConfigError where this process may not look at that one."""
        pid, descriptor = address
        try:
            return cls(os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), ranks, slot_bytes)
        except OSError as problem:
            raise ConfigError(
                f"the shared memory of process {pid} cannot be opened ({problem.strerror}); "
                "ranks of one host must run as one user in one container"
            ) from None

    def slot(self, place: int) -> int:
        """Where slot `place` begins: parity x ranks + rank, or 2 x ranks + rank for mail."""
        return self.first_slot + place * self.slot_bytes

    def close(self) -> None:
        """Unmap and close, unless a view of the memory is still about: then it goes with that view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.bytes = torch.empty(0, dtype=torch.uint8)


class Counters:
    """Waiting and publishing without C: sound on x86, where stores are seen in order. Yields the core between looks."""

    def __init__(self, segment: Segment) -> None:
        self._lines = segment.bytes.numpy()[: segment.first_slot].view(np.int64)[:: LINE // 8]

    def wait(self, first: int, count: int, turn: int, patience_s: float) -> int:
        lines, until = self._lines, 0.0
        for line in range(first, first + count):
            while lines[line] < turn:
                if lines[0]:
                    return BROKEN
                now = time.monotonic()
                until = until or now + patience_s
                if now > until:
                    return line
                time.sleep(0 if now + patience_s - until < 1e-3 else 1e-4)
        return READY

    def post(self, line: int, turn: int) -> None:
        self._lines[line] = turn


class NativeCounters:
    """The same in C, outside Python's lock; and small sums in one call."""

    def __init__(self, segment: Segment, library: ctypes.CDLL) -> None:
        self.library = library
        self._base = segment.base

    def wait(self, first: int, count: int, turn: int, patience_s: float) -> int:
        return int(self.library.rn_wait(self._base, first, count, turn, SPINS, int(patience_s * 1e9)))

    def post(self, line: int, turn: int) -> None:
        self.library.rn_post(self._base, line, turn)


class SharedMemory:
    """Collectives of one rank. `peers` says which process is which rank: one that has ended is noticed at once instead of at the deadline.

    Every wait ends with WorkerLost that names the missing rank: when its process is gone, after `timeout_s`, or after `abort`.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        ranks: int,
        *,
        peers: Mapping[int, Peer] | None = None,
        timeout_s: float = 120.0,
        native: bool = True,
    ) -> None:
        built = shared_memory() if native else None
        if built is None and os.uname().machine != "x86_64":
            raise ConfigError("shared memory between ranks needs a C compiler on this processor; install gcc")
        self.rank, self.ranks = rank, ranks
        self.native = built is not None
        self._counters = Counters(segment) if built is None else NativeCounters(segment, built)
        self._segment = segment
        self._peers = dict(peers or {})
        self._timeout_s = timeout_s
        self._open, self._ending = True, threading.Lock()
        self._turn = 0
        self._sent, self._received = [0] * ranks, [0] * ranks
        self._mailed: tuple[int, int] | None = None  # who must have taken the mail slot, how often

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks in rank order, on every rank; a new tensor. float16 and bfloat16 are summed in float32."""
        x = x.contiguous()
        out = torch.empty_like(x)
        if isinstance(self._counters, NativeCounters) and x.dtype in KINDS and x.nbytes <= self._segment.slot_bytes:
            self._reduce_at_once(self._counters.library, x, out)
            return out
        for piece, into in zip(self._pieces(x), self._pieces(out), strict=True):
            into.copy_(self._sum([s[: len(piece)] for s in self._exchange(piece)]))
        return out

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim` in rank order."""
        x = x.contiguous()
        if x.nbytes <= self._segment.slot_bytes:
            return torch.cat([s.view(x.shape) for s in self._exchange(x.view(-1))], dim)
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        for piece, *into in zip(self._pieces(x), *map(self._pieces, parts), strict=True):
            for target, slot in zip(into, self._exchange(piece), strict=True):
                target.copy_(slot)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over ranks, keep this rank's equal share of `dim`; only that share is added up here."""
        if x.shape[dim] % self.ranks:
            raise ValueError(f"{x.shape[dim]} along dim {dim} cannot be shared equally by {self.ranks} ranks")
        shares = x.movedim(dim, 0).reshape(self.ranks, -1)
        shape = list(x.movedim(dim, 0).shape)
        shape[0] //= self.ranks
        out = torch.empty(shares.shape[1], dtype=x.dtype)
        width = max(1, self._segment.slot_bytes // (self.ranks * x.element_size()))
        for at in range(0, len(out), width):
            piece = shares[:, at : at + width].contiguous()
            slots = self._exchange(piece.view(-1))
            out[at : at + width] = self._sum([s.view(piece.shape)[self.rank] for s in slots])
        return out.view(shape).movedim(0, dim).contiguous()

    def broadcast(self, x: Tensor, rank: int) -> None:
        """Copy `x` of one rank into everybody's."""
        whole = x.contiguous()
        for piece in self._pieces(whole):
            slots = self._exchange(piece if rank == self.rank else piece[:0], piece)
            if rank != self.rank:
                piece.copy_(slots[rank])
        if whole is not x:
            x.copy_(whole)

    def send(self, x: Tensor, rank: int) -> None:
        """Put into this rank's mail slot, once its last content was taken; returns before the receiver has it."""
        for piece in self._pieces(x.contiguous()):
            if self._mailed is not None:
                self._wait(self._line(1, self.rank, self._mailed[0]), 1, self._mailed[1], self._mailed[0])
            self._view(2 * self.ranks + self.rank, piece).copy_(piece)
            self._sent[rank] += 1
            self._counters.post(self._line(0, self.rank, rank), self._sent[rank])
            self._mailed = (rank, self._sent[rank])

    def receive(self, x: Tensor, rank: int) -> None:
        """Take what `rank` has sent next, into `x`."""
        whole = x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        for piece in self._pieces(whole):
            self._received[rank] += 1
            self._wait(self._line(0, rank, self.rank), 1, self._received[rank], rank)
            piece.copy_(self._view(2 * self.ranks + rank, piece))
            self._counters.post(self._line(1, rank, self.rank), self._received[rank])
        if whole is not x:
            x.copy_(whole)

    def abort(self) -> None:
        """Break every wait of every rank, now and later. For any thread; nothing once closed, when the memory is gone."""
        with self._ending:
            if self._open:
                self._counters.post(0, 1)

    def close(self) -> None:
        """Give the segment back. No verb may be running or called afterwards."""
        with self._ending:
            self._open = False
            self._counters = None  # type: ignore[assignment]
            self._segment.close()

    def _reduce_at_once(self, built: ctypes.CDLL, x: Tensor, out: Tensor) -> None:
        self._turn += 1
        segment, kind = self._segment, KINDS[x.dtype]
        data = segment.base + segment.slot((self._turn & 1) * self.ranks)
        state = built.rn_reduce(
            segment.base, data, self.rank, self.ranks, segment.slot_bytes, self._turn, x.data_ptr(), out.data_ptr(), x.numel(), kind,
            SPINS, int(PATIENCE_S * 1e9),
        )  # fmt: skip
        if state != READY:
            self._wait_on(state, 1, self.ranks, self._turn, None)
            built.rn_sum(data, self.ranks, segment.slot_bytes, out.data_ptr(), x.numel(), kind)

    def _exchange(self, mine: Tensor, like: Tensor | None = None) -> list[Tensor]:
        """One turn: everybody's slot, as long as `like`. The views hold until the next turn but one."""
        self._turn += 1
        first = (self._turn & 1) * self.ranks
        self._view(first + self.rank, mine).copy_(mine)
        self._counters.post(1 + self.rank, self._turn)
        self._wait(1, self.ranks, self._turn, None)
        return [self._view(first + r, mine if like is None else like) for r in range(self.ranks)]

    def _sum(self, slots: Sequence[Tensor]) -> Tensor:
        dtype = slots[0].dtype
        total = slots[0].to(torch.float32 if dtype in NARROW else dtype, copy=True)
        for slot in slots[1:]:
            total += slot
        return total.to(dtype)

    def _pieces(self, x: Tensor) -> Iterator[Tensor]:
        """A contiguous tensor as flat pieces that fit a slot; views."""
        return iter(x.view(-1).split(self._segment.slot_bytes // x.element_size()))

    def _view(self, place: int, like: Tensor) -> Tensor:
        start = self._segment.slot(place)
        return self._segment.bytes[start : start + like.nbytes].view(like.dtype)

    def _line(self, taken: int, source: int, target: int) -> int:
        """Counter of messages sent (0) or taken (1) from one rank to another."""
        return 1 + self.ranks + (taken * self.ranks + source) * self.ranks + target

    def _wait(self, first: int, count: int, turn: int, rank: int | None) -> None:
        state = self._counters.wait(first, count, turn, PATIENCE_S)
        if state != READY:
            self._wait_on(state, first, count, turn, rank)

    def _wait_on(self, state: int, first: int, count: int, turn: int, rank: int | None) -> None:
        """Keep waiting, while those waited for live, to the deadline. `rank`: who it is, where the line does not say."""
        until = time.monotonic() + self._timeout_s
        while state != READY:
            if state == BROKEN:
                raise WorkerLost("another rank of the group has failed")
            missing = state - 1 if rank is None else rank
            peer = self._peers.get(missing)
            if peer is not None and process_started(peer[0]) != peer[1]:
                raise WorkerLost(f"rank {missing} (pid {peer[0]}) is gone")
            if time.monotonic() > until:
                raise WorkerLost(f"rank {missing} has not come to the exchange within {self._timeout_s:g} s")
            state = self._counters.wait(first, count, turn, PATIENCE_S)
