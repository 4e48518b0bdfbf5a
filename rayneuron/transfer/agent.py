"""The workers of a group that are not worker 0: each holds a part of the KV, reads or lends it, and is told what by worker 0.

An agent is a thread of such a worker with a channel of its own, beside the one on which steps come: transfers wait for no step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from rayneuron import wire
from rayneuron.errors import WorkerLost
from rayneuron.transfer.door import Door
from rayneuron.transfer.layout import KvLayout
from rayneuron.transfer.lending import Lender
from rayneuron.transfer.messages import Knock, Welcome, limit_bytes
from rayneuron.transfer.pulling import Errand, Halting, PullEnd, Puller, Tidings

log = logging.getLogger(__name__)

SEND_S = 5.0


class Present(msgspec.Struct, tag=True, frozen=True):
    """A worker: here I am, and what I lend is read at these addresses, if I lend at all."""

    worker: int
    addresses: tuple[str, ...] = ()


class Fetchings(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: pull your part of this."""

    number: int
    peer: Welcome
    ticket: bytes
    first: int
    end: int
    blocks: tuple[int, ...]


class HaltPull(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: nobody wants that any more."""

    number: int


class Forget(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: whoever that was is gone."""

    epoch: int


class LendOut(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: these blocks of a ticket may be read."""

    ticket: bytes
    session: bytes
    blocks: Sequence[int]


class Withdraw(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: none of a ticket may."""

    ticket: bytes


class Pulled(msgspec.Struct, tag=True, frozen=True):
    """A worker: how a pull ended; nothing writes for it any more."""

    number: int
    outcome: PullEnd
    why: str
    size: int


class Unread(msgspec.Struct, tag=True, frozen=True):
    """A worker: nobody reads that ticket any more."""

    ticket: bytes


ToAgent = Fetchings | HaltPull | Forget | LendOut | Withdraw
FromAgent = Knock | Present | Pulled | Unread


def attend(address: str, token: bytes, worker: int, layout: KvLayout, puller: Puller | None, lender: Lender | None) -> None:
    """Serve worker 0, at `address`, to the end of its channel; for a thread of its own."""
    channel: wire.Channel[Any] = wire.Channel(wire.connect(address, SEND_S), ToAgent, limit_bytes(layout), sealed=True)
    stops: dict[int, Halting] = {}

    def pulled(number: int, outcome: PullEnd, why: str, size: int) -> None:
        stops.pop(number, None)
        channel.send(Pulled(number, outcome, why, size), SEND_S)

    try:
        channel.send(Knock(token), SEND_S)
        channel.send(Present(worker, lender.addresses if lender is not None else ()), SEND_S)
        while True:
            match channel.receive():
                case Fetchings() as f if puller is not None:
                    stop = stops[f.number] = Halting()
                    puller.begin(Errand(f.peer, f.ticket, f.first, f.end, f.blocks), stop, partial(pulled, f.number))
                case HaltPull(number):
                    if number in stops:
                        stops[number].set()
                case Forget(epoch) if puller is not None:
                    puller.forget(epoch)
                case LendOut(ticket, session, blocks) if lender is not None:
                    lender.lend(ticket, session, blocks)
                case Withdraw(ticket) if lender is not None:
                    lender.withdraw(ticket, partial(channel.send, Unread(ticket), SEND_S))
    except (wire.WireError, TimeoutError) as ended:
        log.info("worker %d hears nothing of transfers any more: %s", worker, ended)
    finally:
        for stop in tuple(stops.values()):
            stop.set()
        channel.close()


class FarWorker:
    """One such worker as worker 0 knows it: `PullsKv` and `LendsKv`. One that is lost ends the group, so nobody waits for what it owes."""

    def __init__(self, channel: wire.Channel[Any], present: Present) -> None:
        self.worker, self.addresses = present.worker, present.addresses
        self._channel = channel
        self._told: dict[int, Tidings] = {}
        self._gone: dict[bytes, Callable[[], None]] = {}
        self._number = 0

    def begin(self, errand: Errand, stop: Halting, told: Tidings) -> None:
        """As `PullsKv`."""
        self._number += 1
        number, e = self._number, errand
        self._told[number] = told
        self._say(Fetchings(number, e.peer, e.ticket, e.first, e.end, e.blocks))
        stop.then(lambda: self._say(HaltPull(number)))

    def forget(self, epoch: int) -> None:
        """As `PullsKv`."""
        self._say(Forget(epoch))

    def lend(self, ticket: bytes, session: bytes, blocks: Sequence[int]) -> None:
        """As `LendsKv`."""
        self._say(LendOut(ticket, session, blocks))

    def withdraw(self, ticket: bytes, gone: Callable[[], None]) -> None:
        """As `LendsKv`."""
        self._gone[ticket] = gone
        self._say(Withdraw(ticket))

    def close(self) -> None:
        """As both."""
        self._channel.shutdown()

    def hear(self) -> None:
        """What it says, to the end of its channel."""
        while True:
            match self._channel.receive():
                case Pulled(number, outcome, why, size) if number in self._told:
                    self._told.pop(number)(outcome, why, size)
                case Unread(ticket) if ticket in self._gone:
                    self._gone.pop(ticket)()

    def _say(self, message: msgspec.Struct) -> None:
        try:
            self._channel.send(message, SEND_S)
        except (wire.WireError, TimeoutError):
            self._channel.shutdown()


class Agents:
    """Where the other workers of a group come in; `all` waits for so many, in order."""

    def __init__(self, token: bytes, ip: str | None, layout: KvLayout) -> None:
        self._limit_bytes = limit_bytes(layout)
        self._here: dict[int, FarWorker] = {}
        self._come = threading.Condition()
        self._door = Door(token, ip, FromAgent, self._serve)
        self.addresses = self._door.addresses

    def all(self, count: int, timeout_s: float) -> list[FarWorker]:
        """The workers 1 to `count`. Raises WorkerLost."""
        with self._come:
            if not self._come.wait_for(lambda: len(self._here) == count, timeout_s):
                raise WorkerLost(f"{len(self._here)} of {count} workers have come within {timeout_s:g} s to exchange KV")
            return [self._here[worker] for worker in sorted(self._here)]

    def close(self) -> None:
        """End every channel."""
        self._door.close()

    def _serve(self, channel: wire.Channel[Any], _: Knock) -> None:
        channel.frames.limit_bytes = self._limit_bytes
        present = channel.receive(SEND_S)
        if not isinstance(present, Present):
            raise wire.WireError("its first words are not who it is")
        worker = FarWorker(channel, present)
        with self._come:
            self._here[present.worker] = worker
            self._come.notify_all()
        worker.hear()
