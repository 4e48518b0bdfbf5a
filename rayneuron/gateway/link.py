"""The gateway's side of a replica: one connection, which is open, or lost for good."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Protocol, cast

import msgspec

from rayneuron import frames, wire
from rayneuron.frames import Alive, Cancel, Card, FromReplica, Greeting, KvEvents, Leaving, Order, OrderEnded, Reception, Tokens
from rayneuron.news import KvNews, Pressure
from rayneuron.types import FinishReason

log = logging.getLogger(__name__)

ALIVE_S = 0.5  # how often a gateway says that it is there
SILENT_S = 5.0  # a replica says how busy it is ten times as often
AWAY_S = 1.5  # between two ticks: this process has not run, or hardly
UNACKNOWLEDGED_S = 1.2  # a host whose kernel acknowledges nothing for so long is gone


class Listener(Protocol):
    """Whom a link tells what it hears. `lost` comes once, and nothing after it; `died`: its process has, as far as one can tell."""

    def opened(self, link: Link, pressure: Pressure) -> None: ...

    def heard(self, link: Link, tokens: Tokens) -> None: ...

    def ended(self, link: Link, how: OrderEnded) -> None: ...

    def events(self, link: Link, news: KvNews) -> None: ...

    def leaving(self, link: Link, within_s: float, failed: bool) -> None: ...

    def lost(self, link: Link, why: str, died: bool) -> None: ...


class Link(asyncio.Protocol):
    """The connection to one replica. Whatever is wrong with it ends it, and what was on its way over it is replayed elsewhere."""

    def __init__(self, card: Card, gateway: bytes, listener: Listener) -> None:
        self.card = card
        self.open = False
        self.frames = 0  # that were heard
        self._gateway = gateway
        self._listener = listener
        self._frames: wire.Frames[FromReplica] = wire.Frames(FromReplica, frames.MOST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._number = 0
        self._heard_s = self._said_s = self._ticked_s = time.monotonic()
        self._gone = self._waits = False

    async def connect(self) -> None:
        """Connect and say who it is. Raises OSError."""
        ip, _, port = self.card.address.removeprefix("tcp:").rpartition(":")
        await asyncio.get_running_loop().create_connection(lambda: self, ip, int(port))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        if self._gone:  # given up while it was on its way
            return self._transport.abort()
        found = transport.get_extra_info("socket")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire.keep_alive(found, UNACKNOWLEDGED_S)
        self._heard_s = time.monotonic()
        self._send(Greeting(self._gateway, self.card.token, self.card.epoch))

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        self._heard_s = time.monotonic()
        self._frames.add(data)
        try:
            while not self._gone and (message := self._frames.take()) is not None:
                self._hear(message)
        except wire.WireError as wrong:
            self.end(str(wrong))

    def _hear(self, message: FromReplica) -> None:
        self.frames += 1
        if isinstance(message, Reception):
            if message.version != frames.VERSION or message.epoch != self.card.epoch:
                return self.end(f"it speaks version {message.version} and does not know the token; our version is {frames.VERSION}")
            self.open = True
            self._listener.opened(self, message.pressure)
        elif not self.open:
            self.end("its first word was no reception")
        elif isinstance(message, Leaving):
            self._listener.leaving(self, message.within_s, message.failed)
        elif isinstance(message, KvEvents):
            self._listener.events(self, message.news)
        elif isinstance(message, OrderEnded):
            self._listener.ended(self, message)
        else:
            self._number += 1
            if message.number != self._number:
                return self.end(f"frame {self._number} is missing, {message.number} came")
            self._listener.heard(self, message)

    def order(self, order: Order) -> None:
        """Send an order."""
        self._send(order)

    def cancel(self, order: int, index: int | None, reason: FinishReason) -> None:
        """An order, or a choice of it, is not wanted any more."""
        self._send(Cancel(order, index, reason))

    def tick(self, now_s: float, waiting_ms: float) -> None:
        """Say that this gateway is there, and what work waits at it; end where the replica has said nothing for long, and this process was
        there to hear it."""
        if now_s - self._ticked_s > AWAY_S:
            self._heard_s = now_s
        self._ticked_s = now_s
        if now_s - self._heard_s > SILENT_S:
            self.end(f"the replica has said nothing for {SILENT_S:g} s")
        elif now_s - self._said_s > ALIVE_S or waiting_ms or self._waits:
            self._waits = waiting_ms > 0.0
            self._send(Alive(waiting_ms))

    def _send(self, message: msgspec.Struct) -> None:
        if self._transport is not None and not self._gone:
            self._said_s = time.monotonic()
            self._transport.write(wire.frame(message))

    def end(self, why: str, died: bool = False) -> None:
        """Give the connection up, at once; `died`: since its process has."""
        if self._gone:
            return
        self._gone, self.open = True, False
        if self._transport is not None:
            self._transport.abort()
        self._listener.lost(self, why, died)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended, whoever ended it."""
        self.end("its connection was closed" if exc is None else str(exc), died=True)
