"""A worker of a decode replica reads its part of other pools' KV into its own memory, on threads that nobody waits for."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from rayneuron.devices.base import KvMemory
from rayneuron.transfer.base import Damaged, Halted, Lost, Pull, Stale, Transport
from rayneuron.transfer.layout import KvLayout, reads, zeros
from rayneuron.transfer.messages import Welcome
from rayneuron.transfer.nixl import Nixl, api
from rayneuron.transfer.shared import Shared
from rayneuron.transfer.sockets import Sockets

log = logging.getLogger(__name__)

THREADS = 8  # pulls at once
NICE = 5  # behind the steps: the time between tokens is why there are two pools
PullEnd = Literal["pulled", "damaged", "lost", "halted", "stale"]
Tidings = Callable[[PullEnd, str, int], None]
ENDS: Mapping[type[Exception], PullEnd] = {Stale: "stale", Damaged: "damaged", Lost: "lost", Halted: "halted"}


@dataclass(frozen=True, slots=True)
class Errand:
    """Blocks `first` to `end` of a ticket of `peer`, whose KV goes into `blocks` here, of every worker."""

    peer: Welcome
    ticket: bytes
    first: int
    end: int
    blocks: tuple[int, ...]


class Halting(threading.Event):
    """Whoever pulls looks at it; others are told."""

    def __init__(self) -> None:
        super().__init__()
        self._then: list[Callable[[], None]] = []

    def then(self, tell: Callable[[], None]) -> None:
        """Also tell somebody who cannot look."""
        self._then.append(tell)

    def set(self) -> None:
        """Nobody wants it any more."""
        super().set()
        for tell in self._then:
            tell()


class PullsKv(Protocol):
    """What is needed of each worker that holds a part of the KV (`Puller`, or a worker's by its agent)."""

    def begin(self, errand: Errand, stop: Halting, told: Tidings) -> None:
        """Pull its part."""

    def forget(self, epoch: int) -> None:
        """Whoever that was is gone."""

    def close(self) -> None:
        """Wait for what runs, which has been told to stop."""


class Puller:
    """One worker's memory, and its connections to workers of other pools, kept between errands. `way`: auto, shared, sockets or nixl.
    Raises ConfigError."""

    def __init__(
        self, memory: KvMemory, mine: KvLayout, token: bytes, *, stage: int = 0, rank: int = 0, way: str = "auto", streams: int = 2,
        stall_s: float = 5.0,
    ) -> None:  # fmt: skip
        self._memory, self._mine, self._token = memory, mine, token
        self._stage, self._rank, self._way = stage, rank, way
        self._streams, self._stall_s = streams, stall_s
        if way == "nixl":
            api()  # there is one, or nothing begins
        self._idle: dict[tuple[int, int], list[Transport]] = {}  # by epoch and worker
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, "rayneuron-pull", initializer=_behind)

    def begin(self, errand: Errand, stop: Halting, told: Tidings) -> None:
        """Pull; `told` is called with how it ended, why, and how many bytes came, from when on nothing writes."""
        self._threads.submit(self._run, errand, stop, told)

    def forget(self, epoch: int) -> None:
        """Whoever that was is gone."""
        with self._lock:
            left = [transport for key in [key for key in self._idle if key[0] == epoch] for transport in self._idle.pop(key)]
        for transport in left:
            transport.close()

    def close(self) -> None:
        """Wait for what runs, which has been told to stop, and close the connections."""
        self._threads.shutdown()
        for epoch in {epoch for epoch, _ in self._idle}:
            self.forget(epoch)

    def _run(self, errand: Errand, stop: threading.Event, told: Tidings) -> None:
        outcome: PullEnd = "lost"
        why, size = "", 0
        try:
            size = self._pull(errand, stop)
            outcome = "pulled"
        except (Stale, Damaged, Lost, Halted) as problem:
            outcome, why = ENDS[type(problem)], str(problem)
        except Exception as problem:
            log.exception("a pull has failed")
            why = str(problem)
        told(outcome, why, size)

    def _pull(self, errand: Errand, stop: threading.Event) -> int:
        if stop.is_set():  # while it waited for a thread
            raise Halted("nobody wants it any more")
        peer, size = errand.peer, 0
        blocks = list(errand.blocks)
        for read in reads(self._mine, self._stage, self._rank, peer.layout):
            want = Pull(peer.epoch, peer.session, errand.ticket, errand.first, errand.end, read, errand.blocks)
            with self._transport(peer, read.worker) as transport:
                size += transport.pull(want, self._memory, stop)
            for source, target in read.copies:
                for units in self._memory.units[read.here : read.here + read.count]:
                    units[blocks, target] = units[blocks, source]
        for head in zeros(self._mine, self._rank):
            for units in self._memory.units:
                units[blocks, head] = 0
        return size

    @contextmanager
    def _transport(self, peer: Welcome, worker: int) -> Iterator[Transport]:
        key = peer.epoch, worker
        with self._lock:
            idle = self._idle.setdefault(key, [])
            transport = idle.pop() if idle else None
        if transport is None:
            transport = self._open(peer.data[worker], peer.epoch)
        try:
            yield transport
        finally:
            with self._lock:
                kept = self._idle.get(key)
                if kept is not None:
                    kept.append(transport)
            if kept is None:  # forgotten meanwhile, and what is kept of the dead is their whole memory
                transport.close()

    def _open(self, addresses: Sequence[str], epoch: int) -> Transport:
        if self._way == "nixl":
            return Nixl(addresses, self._token, epoch, self._stall_s)
        near = [address for address in addresses if address.startswith("unix:")]
        for address in near if self._way != "sockets" else ():
            try:
                return Shared(address, self._token, epoch, self._stall_s)
            except Lost as problem:
                if self._way == "shared":
                    raise
                log.info("KV at %s comes over sockets: %s", address, problem)
        if self._way == "shared":
            raise Lost(f"{', '.join(addresses)} is not on this host, and pools.transport is shared")
        return Sockets(addresses, self._token, self._stall_s, self._streams)


def _behind() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
