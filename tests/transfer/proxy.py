"""What stands between two replicas in tests: it passes everything on, until it shall lose, double, delay, damage, cut or freeze."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

import msgspec

from rayneuron import wire

FROM_D = ("Knock", "Bid", "Commit", "Abandon", "Pulse")
FROM_P = ("Welcome", "Accepted", "Declined", "Watermark", "FirstTokens", "Committed", "Expired", "Pulse")


@dataclass
class Fault:
    """`what` happens to the `nth` message of a kind, or behind so many bytes of a data connection. `hit`: it has."""

    what: str  # drop, late, double, damage, cut, freeze
    kind: str = ""  # of a message, "" for the data
    nth: int = 0
    after: int = 0
    late_s: float = 0.0
    hit: threading.Event = field(default_factory=threading.Event)
    left: int = 0


class Proxy:
    """In front of the listeners of one side. `data`: bytes, else frames."""

    def __init__(self, to: str, data: bool) -> None:
        self.to, self.data = to, data
        self.fault: Fault | None = None
        self._listener = wire.listen()
        self.address = wire.address(self._listener)
        self._ends: list[tuple[socket.socket, socket.socket]] = []
        self._rng = random.Random(0)
        self.frozen = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def begin(self, fault: Fault | None) -> None:
        if fault is not None:
            fault.left = fault.nth if fault.kind else fault.after
        self.fault = fault

    def heal(self) -> None:
        """No fault any more; what was frozen is cut."""
        self.fault = None
        if self.frozen.is_set():
            self.cut()
            self.frozen.clear()

    def cut(self) -> None:
        for pair in self._ends:
            for end in pair:
                wire.shut(end)
        self._ends.clear()

    def close(self) -> None:
        wire.shut(self._listener)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = wire.connect(self.to, 2)
            except (OSError, TimeoutError):
                near.close()  # nobody is there any more, or yet
                continue
            self._ends.append((near, far))
            for source, target, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass, args=(source, target, up), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            if self.data:
                self._bytes(source, target, up)
            else:
                self._frames(source, target)
        for end in (source, target):
            wire.shut(end)
        source.close()

    def _bytes(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(source, 1 << 16, 1)
            if not data:
                return
            fault = self.fault
            if fault is not None and not fault.kind and not up and not fault.hit.is_set():
                if fault.left < len(data):
                    at = fault.left
                    fault.hit.set()
                    data = self._spoil(fault, data, at)
                    if data is None:
                        return
                else:
                    fault.left -= len(data)
            while self.frozen.is_set():
                time.sleep(0.01)
            if fds:
                socket.send_fds(target, [data], fds)
                for fd in fds:
                    socket.close(fd)
            else:
                target.sendall(data)

    def _frames(self, source: socket.socket, target: socket.socket) -> None:
        while True:
            head = _exactly(source, 4)
            body = _exactly(source, struct.unpack(">I", head)[0])
            frame = head + body
            fault = self.fault
            if fault is not None and fault.kind and not fault.hit.is_set() and msgspec.msgpack.decode(body[:-4])["type"] == fault.kind:
                fault.left -= 1
                if fault.left < 0:
                    fault.hit.set()
                    spoiled = self._spoil(fault, frame, 4 + self._rng.randrange(len(body)))
                    if spoiled is None:
                        return
                    frame = spoiled
            while self.frozen.is_set():
                time.sleep(0.01)
            target.sendall(frame)

    def _spoil(self, fault: Fault, data: bytes, at: int) -> bytes | None:
        match fault.what:
            case "drop":
                return data[:0] if fault.kind else data[:at] + data[at + 1 + len(data) // 3 :]
            case "late":
                time.sleep(fault.late_s)
            case "double":
                return data + data if fault.kind else data[:at] + data[max(0, at - 64) :]
            case "damage":
                return data[:at] + bytes([data[at] ^ 0x81]) + data[at + 1 :]
            case "cut":
                self.cut()
                return None
            case "freeze":
                self.frozen.set()
        return data


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise OSError("closed")
        data += more
    return data
