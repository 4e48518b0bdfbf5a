"""One HTTP exchange over ASGI: its body read within a limit and a time, its one reply, and the notice that the client has gone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from starlette.types import Message, Receive, Scope, Send

from rayneuron.api import errors, openai, routes
from rayneuron.errors import BodyTooLarge, RequestError, RequestTimeout, UnsupportedMedia
from rayneuron.serve.seams import PIPE, Pipe

JSON = "application/json"
UNWATCHED = b"x-request-disconnect-disabled"  # by which a client keeps Ray Serve from looking whether it has gone
STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class Exchange:
    """One request and its one reply. `status` is 0 until the reply's headers are out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, echo_request_id: bool = True) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.params: Mapping[str, str] = scope.get("path_params") or {}
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.client_id = openai.clean_id(self.header("x-request-id"))
        self.request_id = self.client_id or uuid4().hex
        self.status = 0
        self.pipe: Pipe | None = scope.get("state", {}).get(PIPE)
        self.shape: Callable[[errors.Triple], errors.Triple] = lambda triple: routes.shaped(triple, self.path, self.method)
        self.gone = False
        self.said: dict[bytes, bytes] = {}  # headers that whoever has handled it before wants said
        self._commented = self._answering = False  # comments have gone out; the answer has begun behind them
        self._unread = False  # a body that was not read to its end
        self._whole: bytes | None = None  # one that was
        self._echo = [(b"x-request-id", self.request_id.encode())] if echo_request_id else []
        self._receive, self._send = receive, send
        self._watcher: asyncio.Task[None] | None = None
        # Where a replica answers HTTP itself, Ray Serve cancels the task when the client goes, but for a client that says it need not look.
        self._watched = not echo_request_id and self.pipe is not None and UNWATCHED not in self.headers

    def header(self, name: str) -> str | None:
        """A request header by its lower-case name."""
        value = self.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    async def body(self, limit_bytes: int, within_s: float | None = None) -> bytes:
        """The request body. Raises BodyTooLarge before reading more than the limit, RequestTimeout where it does not come in time,
        ClientGone if the client leaves while sending. Once it is read it is kept."""
        if self._whole is not None:
            if len(self._whole) > limit_bytes:
                raise _too_large(limit_bytes)
            return self._whole
        self._unread = True
        declared = self.header("content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
            raise _too_large(limit_bytes)
        if within_s is None:
            body = await self._body(limit_bytes)
        else:
            body = await self._in_time(limit_bytes, within_s)
        self._unread, self._whole = False, body
        return body

    async def _in_time(self, limit_bytes: int, within_s: float) -> bytes:
        """The body, without the task that asyncio.wait_for would make: nearly always it is there already."""
        task, late = asyncio.current_task(), False
        assert task is not None

        def end() -> None:
            nonlocal late
            late = task.cancel()

        timer = asyncio.get_running_loop().call_later(within_s, end)
        try:
            return await self._body(limit_bytes)
        except asyncio.CancelledError:
            if not late:
                raise
            raise RequestTimeout(f"the request body did not arrive within {within_s:g} s") from None
        finally:
            timer.cancel()

    async def _body(self, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._hear()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            parts.append(chunk)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _hear(self) -> Message:
        """The next of what the client sends. Behind Serve's proxy this is a call, which fails where the proxy has died or forgotten us."""
        try:
            return await self._receive()
        except Exception:
            return {"type": "http.disconnect"}

    async def json_body(self, limit_bytes: int, within_s: float | None = None) -> bytes:
        """The body of a request that must be JSON by its content type, and not compressed."""
        kind = (self.header("content-type") or JSON).partition(";")[0].strip().lower()
        if kind != JSON and not kind.endswith("+json"):
            raise UnsupportedMedia(f"content type {kind!r} is not read here; send application/json", param="content-type")
        encoding = (self.header("content-encoding") or "identity").strip().lower()
        if encoding != "identity":
            raise UnsupportedMedia(
                f"Content-Encoding {encoding!r} is not read here; send the JSON uncompressed, without that header", param="content-encoding"
            )
        return await self.body(limit_bytes, within_s)

    def watch(self, task: asyncio.Task[Any]) -> None:
        """From here on, cancel `task` when the client goes, where nobody else does. The body must have been read."""
        if self._watcher is not None or self._watched:
            return
        self._watcher = asyncio.create_task(self._watch(task))

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self._hear())["type"] != "http.disconnect":
            pass
        self.gone = True
        task.cancel()

    def unwatch(self) -> None:
        """The exchange is over."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def begin(self, status: int, content_type: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send the status and headers of a reply whose length is not known; nothing where a comment has sent them before."""
        if self._commented:
            self._answering = True
            return
        self.status = status
        said = [(b"content-type", content_type.encode()), *self._echo, *self.said.items(), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": said})

    @property
    def held_open(self) -> bool:
        """Whether comments have gone out, and nothing else."""
        return self._commented and not self._answering

    async def comment(self, said: str) -> None:
        """Let whoever waits for events know of something that is none: a comment, which clients skip."""
        if not self._commented:
            await self.begin(200, "text/event-stream", STREAM_HEADERS)
            self._commented = True
        await self.write(f": {said}\n\n".encode())

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send a part of the body; `more` False ends it."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, data: bytes, content_type: str = JSON, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole reply."""
        others = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in (headers or {}).items()]
        await self.begin(status, content_type, [(b"content-length", str(len(data)).encode()), *others])
        await self.write(data, more=False)

    async def refuse(self, triple: errors.Triple) -> None:
        """Send an error body. Whoever is still sending is not listened to any longer."""
        status, body, headers = triple
        if self._unread:
            headers = {**headers, "Connection": "close"}
        await self.reply(status, errors.encode(body), headers=headers)

    def time_limit_s(self, default_s: float | None) -> float | None:
        """The request's own time limit: header x-request-timeout-seconds (0 or less: none), else the default.

        Ray Serve reads the same header and would answer in plain text, so ours ends a tenth of a second (at most half) earlier.
        """
        named = self.header("x-request-timeout-seconds")
        if named is None:
            return default_s
        try:
            limit_s = float(named)
        except ValueError:
            limit_s = math.nan
        if math.isnan(limit_s):
            raise RequestError(f"x-request-timeout-seconds must be a number of seconds, got {named!r}", param="x-request-timeout-seconds")
        return None if limit_s <= 0 or math.isinf(limit_s) else max(limit_s / 2, limit_s - 0.1)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is over the limit of {limit_bytes} bytes", param="body")
