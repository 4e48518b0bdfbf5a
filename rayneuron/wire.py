"""Framed messages between processes: a length, then msgpack of a known struct; never pickle.

A unix socket without a file (Linux abstract name) on one host, TCP bound to one internal address and port 0 between hosts. The first frame
must carry the group's token. Whatever is too long, not of the schema or without the token closes the connection and is counted.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from rayneuron.errors import ConfigError

Heard = TypeVar("Heard")

FIRST_BYTES = 4096  # longest frame of somebody who has not shown the token yet
MOST_BYTES = 2**20  # longest frame otherwise, where the caller does not say
TICK_S = 0.25  # how often a blocked call looks at its deadline
SILENT_S = 5.0  # after which a host that answers no packet is gone, where nobody says otherwise
RETRANSMIT_S = 0.4  # Linux counts TCP_USER_TIMEOUT from the first retransmission, which comes so late
_HEAD = struct.Struct(">I")
_READ = 2**16


class WireError(Exception):
    """The other side sent what is no message: too long, cut, or of no known kind."""


class Closed(WireError):
    """The other side has closed the connection, or its process has ended."""


def frame(message: msgspec.Struct, sealed: bool = False) -> bytearray:
    """A message with its length in front. `sealed`: and a sum behind it, so that a wrong bit is no other message."""
    out = bytearray(_HEAD.size)
    msgspec.msgpack.Encoder().encode_into(message, out, _HEAD.size)
    if sealed:
        out += _HEAD.pack(zlib.crc32(memoryview(out)[_HEAD.size :]))
    _HEAD.pack_into(out, 0, len(out) - _HEAD.size)
    return out


def body(data: memoryview) -> memoryview:
    """What of `data`, which begins with a frame, is its message."""
    return data[_HEAD.size : _HEAD.size + _HEAD.unpack_from(data)[0]]


class Frames(Generic[Heard]):
    """What has arrived of one connection, cut into messages of `kinds`, a union of structs; `sealed`: each with its checksum behind it."""

    def __init__(self, kinds: Any, limit_bytes: int, sealed: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self._sealed = sealed
        self._decoder: msgspec.msgpack.Decoder[Heard] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    def __bool__(self) -> bool:
        return bool(self._buffer)

    def add(self, data: bytes) -> None:
        """Some more has arrived."""
        self._buffer += data

    def lacking(self) -> int:
        """How many bytes the first message lacks, 0 where that is not known. Raises WireError where it is too long."""
        if len(self._buffer) < _HEAD.size:
            return 0
        length: int = _HEAD.unpack_from(self._buffer)[0]
        if length > self.limit_bytes:
            raise WireError(f"a message of {length} bytes is longer than {self.limit_bytes}")
        return max(0, _HEAD.size + length - len(self._buffer))

    def take(self) -> Heard | None:
        """The next whole message, None where there is none. Raises WireError."""
        if self.lacking() or len(self._buffer) < _HEAD.size:
            return None
        end = _HEAD.size + _HEAD.unpack_from(self._buffer)[0]
        whole, self._buffer = self._buffer, self._buffer[end:]  # arrays of the message look into `whole` for as long as they live
        if self._sealed:
            end -= _HEAD.size
            if end < _HEAD.size or _HEAD.unpack_from(whole, end)[0] != zlib.crc32(memoryview(whole)[_HEAD.size : end]):
                raise WireError("a message that is not the one that was sent")
        try:
            return self._decoder.decode(memoryview(whole)[_HEAD.size : end])
        except (msgspec.DecodeError, ValueError, RecursionError) as problem:
            raise WireError(f"no message that is known here: {problem}") from None


class Channel(Generic[Heard]):
    """One connection. `kinds`: the union of structs that may arrive. One thread receives; `beat` may be called beside one that sends."""

    def __init__(self, connection: socket.socket, kinds: Any, limit_bytes: int = MOST_BYTES, sealed: bool = False) -> None:
        self.socket = connection
        self.frames: Frames[Heard] = Frames(kinds, limit_bytes, sealed)
        self._sealed = sealed
        self._sending = threading.Lock()
        ticking(connection)

    @property
    def far(self) -> bool:
        """Whether the other side is on another host."""
        return self.socket.family != socket.AF_UNIX

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self.socket.fileno()

    def send(self, message: msgspec.Struct, timeout_s: float = 30.0) -> None:
        """Send one message. Raises Closed, or TimeoutError where the other side does not read."""
        self.send_frame(frame(message, self._sealed), timeout_s)

    def send_frame(self, data: bytearray | bytes, timeout_s: float = 30.0) -> None:
        """Send what `frame` made; one frame may go to several channels."""
        with self._sending:
            self._send(data, timeout_s, 0)

    def beat(self, data: bytearray | bytes) -> None:
        """Send a short frame if nothing is on its way: the other host's kernel must acknowledge it, however busy its process is."""
        if self._sending.acquire(blocking=False):
            try:
                self._send(data, SILENT_S, socket.MSG_DONTWAIT)
            except (WireError, TimeoutError):
                pass  # whoever waits on the channel is told
            finally:
                self._sending.release()

    def _send(self, data: bytearray | bytes, timeout_s: float, flags: int) -> None:
        try:
            sent = self.socket.send(data, socket.MSG_NOSIGNAL | flags)
        except BlockingIOError:
            sent = 0
        except OSError as problem:
            raise Closed(str(problem)) from None
        if sent < len(data) and (sent or not flags):  # a beat that does not fit is left out
            self._send_rest(memoryview(data)[sent:], timeout_s)

    def _send_rest(self, left: memoryview, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while left:
            try:
                left = left[self.socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"nothing was read for {timeout_s:g} s") from None
            except OSError as problem:
                raise Closed(str(problem)) from None

    def receive(self, timeout_s: float | None = None, check: Callable[[], None] | None = None) -> Heard:
        """Wait for the next message. `check` is called every TICK_S and may raise. Raises TimeoutError, WireError, Closed."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self.frames.take()
            if message is not None:
                return message
            try:
                self._read(0)
            except BlockingIOError:
                if check is not None:
                    check()
                if until is not None and time.monotonic() > until:
                    raise TimeoutError(f"no message within {timeout_s:g} s") from None

    def receive_now(self) -> Heard | None:
        """The next message if it is there, None if not. Raises WireError, Closed."""
        message = self.frames.take()
        if message is not None:
            return message
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        return self.frames.take()

    def _read(self, flags: int) -> None:
        """One read: the rest of a long frame, or whatever is there."""
        try:
            data = self.socket.recv(max(_READ, self.frames.lacking()), flags)
        except BlockingIOError:
            raise
        except OSError as problem:
            raise Closed(str(problem)) from None
        if not data:
            raise Closed("the connection was closed within a message" if self.frames else "the connection was closed")
        self.frames.add(data)

    def shutdown(self) -> None:
        """End both directions: whoever waits on this channel, here or there, is told. For any thread."""
        shut(self.socket)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def shut(connection: socket.socket) -> None:
    """End both directions of a connection, or wake who accepts: whoever waits on it is told. For any thread."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was closed already


def ticking(connection: socket.socket) -> None:
    """Have its calls come back every TICK_S, send what is there at once, and notice when the other host is gone."""
    tick = struct.pack("ll", 0, int(TICK_S * 1e6))
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection, SILENT_S)


def keep_alive(connection: socket.socket, silent_s: float) -> None:
    """Break a TCP connection whose other host is gone without a word (power, network): nothing acknowledged for `silent_s`.

    It counts from the first byte that is not acknowledged; on an idle connection up to 2 s pass before the kernel asks. A process that
    ends is noticed at once by its own closing; one that is only busy has a kernel that acknowledges for it.
    """
    user_ms = int(max(0.2, silent_s - RETRANSMIT_S) * 1000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_USER_TIMEOUT, user_ms)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def broke(connection: socket.socket) -> str:
    """Why a connection ended, for people."""
    problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "its node does not answer any more"
    return "its connection was closed"


def listen(ip: str | None = None, backlog: int = 128) -> socket.socket:
    """A listener: on one address of this node and a port the kernel chooses, or without `ip` on a unix socket that has no file."""
    if ip is None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0rayneuron-{secrets.token_hex(16)}")
        listener.listen(backlog)
        return listener
    try:
        return socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=backlog)
    except OSError as problem:
        raise ConfigError(f"{ip} is no address of this host ({problem.strerror}); Ray must know the node by its internal IP") from None


def address(listener: socket.socket) -> str:
    """How to reach a listener: "unix:NAME", or "tcp:IP:PORT"."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return "unix:" + (name.decode() if isinstance(name, bytes) else name).lstrip("\0")
    return f"tcp:{name[0]}:{name[1]}"


def connect(to: str, timeout_s: float) -> socket.socket:
    """Connect to what `address` printed, again and again until `timeout_s`. Raises TimeoutError naming it."""
    kind, _, rest = to.partition(":")
    until = time.monotonic() + timeout_s
    while True:
        try:
            if kind == "tcp":
                ip, _, port = rest.rpartition(":")
                return socket.create_connection((ip, int(port)), timeout=max(0.1, until - time.monotonic()))
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect("\0" + rest)
            return connection
        except OSError as problem:
            if time.monotonic() + TICK_S > until or kind == "unix":
                raise TimeoutError(f"{to} does not answer ({problem})") from None
            time.sleep(TICK_S)


def same_token(shown: bytes, expected: bytes) -> bool:
    """Compare without telling by the time it takes how much was right."""
    return hmac.compare_digest(shown, expected)


def hang_up(poll: select.poll, fd: int) -> None:
    """Register a descriptor so that `poll` returns when the other side is gone, and not when there is data."""
    poll.register(fd, select.POLLRDHUP)
