"""A client as low as a socket: for bodies sent by halves, and connections dropped at a chosen moment."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from tests.serve.scripted import PATIENCE_S, Site


class Wire:
    """One connection to a site."""

    def __init__(self, site: Site, timeout_s: float = PATIENCE_S) -> None:
        self._socket = socket.create_connection(("127.0.0.1", site.port), timeout=timeout_s)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def post(self, path: str, body: object, **headers: str) -> None:
        """A whole request."""
        self.send(post(path, body, **headers))

    def read_until(self, mark: bytes) -> bytes:
        """What arrives up to and including `mark`."""
        got = b""
        while mark not in got:
            data = self._socket.recv(65536)
            if not data:
                raise EOFError(f"closed after {got!r}")
            got += data
        return got

    def drop(self) -> None:
        """Close at once, with a reset, as a killed client does."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        """Close politely."""
        self._socket.close()


def post(path: str, body: object, **headers: str) -> bytes:
    """The bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named: dict[str, Any] = {"host": "site", "content-type": "application/json", "content-length": str(len(data)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data
