"""The way of hidden states from a rank to the same rank of the next stage: one socket, raw bytes, sent by a thread of its own.

The sender's thread lets a stage begin its next micro-batch while the last one is still on its way. On one host a unix socket: 17-26 us
for 64 KB where gloo takes 130-2300 us; else TCP between the nodes' internal addresses. The connecting side shows the
group's token.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rayneuron import wire
from rayneuron.errors import WorkerLost
from rayneuron.group.messages import Hello

_AHEAD = 16  # micro-batches that may wait to be sent; more would only hold memory
_HEAD = struct.Struct(">Q")
_BUFFER_BYTES = 4 * 2**20


class Outgoing:
    """To the next stage. `send` returns at once; an error of the thread is raised by the next `send`."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._socket = connection
        self._name = name
        self._queue: queue.Queue[Tensor | None] = queue.Queue(_AHEAD)
        self._error: str | None = None
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._thread = threading.Thread(target=self._run, name="rayneuron-link", daemon=True)
        self._thread.start()

    def send(self, x: Tensor) -> None:
        """Hand over a tensor that nobody changes afterwards."""
        if self._error is not None:
            raise WorkerLost(f"{self._name}: {self._error}")
        self._queue.put(x.contiguous())

    def abort(self) -> None:
        """End the connection. For any thread."""
        wire.shut(self._socket)

    def close(self) -> None:
        """Send what waits, then end the thread and the connection."""
        try:
            self._queue.put_nowait(None)
            self._thread.join(5.0)
        except queue.Full:
            pass  # nobody reads any more
        wire.shut(self._socket)
        self._socket.close()

    def _run(self) -> None:
        while (x := self._queue.get()) is not None:
            if self._error is None:
                try:
                    data = raw(x)
                    self._socket.sendall(_HEAD.pack(len(data)))
                    self._socket.sendall(data)
                except OSError as problem:
                    self._error = str(problem)  # keep emptying the queue, so that `send` never blocks for ever


class Incoming:
    """From the previous stage."""

    def __init__(self, connection: socket.socket, name: str, timeout_s: float) -> None:
        self._socket = connection
        self._name = name
        self._timeout_s = timeout_s
        self.waited_s = 0.0  # how long `receive` has taken, all calls together
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)

    def receive(self, x: Tensor) -> Tensor:
        """Fill a contiguous tensor with what comes next. Raises WorkerLost: gone, too late, or of another size."""
        began = time.perf_counter()
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head))
        size = _HEAD.unpack(head)[0]
        data = raw(x)
        if size != len(data):
            raise WorkerLost(f"{self._name} sent {size} bytes where {len(data)} were due; the stages run different steps")
        self._fill(data)
        self.waited_s += time.perf_counter() - began
        return x

    def _fill(self, left: memoryview) -> None:
        while left:
            try:
                count = self._socket.recv_into(left)
            except TimeoutError:
                raise WorkerLost(f"{self._name} has sent nothing for {self._timeout_s:g} s") from None
            except OSError as problem:
                raise WorkerLost(f"{self._name}: {problem}") from None
            if not count:
                raise WorkerLost(f"{self._name} is gone")
            left = left[count:]

    def abort(self) -> None:
        """End the connection. For any thread."""
        wire.shut(self._socket)

    def close(self) -> None:
        """Close the connection."""
        wire.shut(self._socket)
        self._socket.close()


def raw(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    data: Any = x.view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def accept(listener: socket.socket, token: bytes, name: str, timeout_s: float, check: Callable[[], None]) -> socket.socket:
    """Wait for the one connection that shows the token; others are closed. Raises WorkerLost naming who has not come."""
    until = time.monotonic() + timeout_s
    listener.settimeout(wire.TICK_S)
    while True:
        check()
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() > until:
                raise WorkerLost(f"{name} has not connected within {timeout_s:g} s") from None
            continue
        try:
            channel: wire.Channel[Hello] = wire.Channel(connection, Hello, wire.FIRST_BYTES)
            if wire.same_token(channel.receive(5.0).token, token):
                return patient(connection)
        except (wire.WireError, TimeoutError):
            pass
        connection.close()


def dial(to: str, token: bytes, index: int, name: str, timeout_s: float) -> socket.socket:
    """Connect to the next stage and show the token. Raises WorkerLost naming it."""
    try:
        connection = wire.connect(to, timeout_s)
        wire.Channel(connection, Hello).send(Hello(token, index, 0, 0))
    except (TimeoutError, wire.WireError) as problem:
        raise WorkerLost(f"{name}: {problem}") from None
    return patient(connection)


def patient(connection: socket.socket) -> socket.socket:
    """A stage that computes for long reads nothing meanwhile, which is no reason to break. Worker 0 watches the hosts."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
    return connection
