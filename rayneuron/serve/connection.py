"""A connection that waits for a request's head only so long, and reads only so much of it; what is no HTTP is told so in JSON. A replica's
own is written past ASGI too."""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rayneuron.api import errors, routes
from rayneuron.serve.seams import PIPE

HEAD_S = 20.0  # from the first byte, or from the connection, to the end of the head
HEAD_BYTES = 64 * 1024
WHY = {
    400: "this is not valid HTTP/1.1",
    408: f"the head of the request did not arrive within {HEAD_S:g} s",
    431: f"the head of the request is over the limit of {HEAD_BYTES} bytes",
}
# A client that knows HTTP/2 too (Java's, `curl --http2`) offers it and goes on in HTTP/1.1; the parser would not read its body as such.
UPGRADE = re.compile(rb"\r\nupgrade:(?![ \t]*websocket)[^\r\n]*", re.IGNORECASE)


class Endless(int):
    """What is left of an answer that ends with its connection, as uvicorn counts it: always enough, never too much."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> Endless:
        return self

    def __ne__(self, other: object) -> bool:
        return False


class Connection(HttpToolsProtocol):
    """uvicorn's own, which by itself waits for ever. What is named in `uvicorn.config.HTTP_PROTOCOLS`."""

    url = b""
    _timer: asyncio.TimerHandle | None = None
    _read = 0
    _in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As uvicorn's."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As uvicorn's."""
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # of the next request on this connection; or a body comes in that was answered already
        if not self._in_body:
            self._read += len(data)
            if b"pgrade:" in data:
                head, end, body = data.partition(b"\r\n\r\n")
                data = UPGRADE.sub(b"", head) + end + body
        super().data_received(data)
        if self._timer is not None and self._read > HEAD_BYTES:
            self._refuse(431)

    def on_headers_complete(self) -> None:
        """As uvicorn's, which is refused a head that is too long and came at once, and chunks for HTTP/1.0."""
        if self._read > HEAD_BYTES and len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            raise ValueError  # the parser's error, of which send_400_response is told
        self._forget()
        if self.root_path:  # which uvicorn puts before every path, also of who calls past the proxy that takes it off
            root, rest = self.root_path.encode(), self.url.removeprefix(self.root_path.encode())
            if self.url.startswith(root) and rest[:1] in (b"/", b"?", b""):
                self.url = rest if rest.startswith(b"/") else b"/" + rest
        super().on_headers_complete()
        self._in_body = True
        if self.scope["http_version"] == "1.0" and self.cycle is not None and self.cycle.scope is self.scope:
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, Endless()

    def on_message_complete(self) -> None:
        """As uvicorn's."""
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """In place of uvicorn's, which is plain text, and goes into the middle of an answer that has begun."""
        self._refuse(400 if self._in_body or self._read <= HEAD_BYTES else 431)

    def _await_head(self) -> None:
        self._read = 0
        self._timer = self.loop.call_later(HEAD_S, self._refuse, 408)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int) -> None:
        self._forget()
        if not self.transport.is_closing():
            if self._read and (self.cycle is None or self.cycle.response_complete or not self.cycle.response_started):
                path, method = self.url.decode("latin-1").partition("?")[0], self.parser.get_method().decode()
                _, said, _ = routes.shaped(errors.error_reply(status, WHY[status]), path, method)
                body = errors.encode(said)
                head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                self.transport.write(STATUS_LINE[status] + head + body)
            self.transport.close()


class Past:
    """A pipe (`serve.seams.Pipe`) into the chunked body of one answer."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def open(self) -> bool:
        """As the seam."""
        cycle = self._cycle
        begun = cycle.response_started and cycle.chunked_encoding is True and not cycle.response_complete
        return begun and not (cycle.disconnected or cycle.flow.write_paused)

    def write(self, part: bytes) -> None:
        """As the seam."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class Own(Connection):
    """That of a replica which answers HTTP itself. A proxy's hands what it reads on to another process, and no pipe goes there."""

    def on_headers_complete(self) -> None:
        """As uvicorn's."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["state"][PIPE] = Past(self.cycle)
