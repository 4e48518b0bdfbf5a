"""An end for answers whose replica has died, and JSON for what Serve says itself: a middleware of Serve's HTTP proxy, which else closes the
connection without a word, or answers in plain text.

Named in RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH (`serve.profile`), which every proxy reads as it starts. Answers of applications that end
by themselves pass through as they are.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayneuron.api import errors, routes
from rayneuron.api.fields import clean_id
from rayneuron.errors import TIMED_OUT, RequestTimeout
from rayneuron.serve.readiness import Readiness, reply

log = logging.getLogger(__name__)

GONE = "the process that answered this request has ended; it is being replaced"
RETRY_S = 5.0
KEPT = (b"retry-after", b"x-request-id")  # of what Serve says itself
STREAMS = ("text/event-stream", "application/jsonlines")


class Ending:
    """Wraps the proxy's application: a stream of events that is cut off gets an error event, an answer that never began an error body, as
    do calls that Serve refuses itself (a deadline too near for the replica to say so, a path that is none)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        answer = _Answer(send, scope)
        scope["headers"] = [h if h[0] != b"x-request-id" and h[1].isascii() else _fit(*h) for h in scope["headers"]]
        try:
            await self._app(scope, receive, answer.send)
        except Exception as wrong:
            if not await answer.failed(wrong):
                raise
        else:
            await answer.end()


class _Answer:
    """How far one answer has come."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self._begun = self._whole = False
        self._headers: Iterable[tuple[bytes, bytes]] = ()
        self._own: Message | None = None  # the head of what Serve says itself, as long as it may be that

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            self._headers = message.get("headers", ())
            if message["status"] >= 400:
                headers = {name.lower(): value for name, value in self._headers}
                if headers.get(b"content-type", b"").startswith(b"text/plain") and b"content-length" not in headers:
                    self._own = message  # an application's own has a length, or comes in parts
                    return
        elif message["type"] == "http.response.body":
            self._whole = not message.get("more_body", False)
            if (head := self._own) is not None:
                self._own = None
                if self._whole:
                    return await self._retell(head, message.get("body", b"").decode(errors="replace"))
                await self._send(head)
        await self._send(message)

    async def _retell(self, head: Message, said: str) -> None:
        """In the dialect of the route."""
        kept = {name.decode(): value.decode("latin-1") for name, value in head["headers"] if name.lower() in KEPT}
        say = TIMED_OUT if head["status"] == RequestTimeout.status else said or "Serve gave no reason"
        status, body, headers = self._shaped(errors.error_reply(head["status"], say))
        await reply(self._send, (status, body, {**kept, **headers}))

    def _shaped(self, triple: errors.Triple) -> errors.Triple:
        return routes.shaped(triple, self._scope["path"], self._scope["method"])

    async def failed(self, wrong: Exception) -> bool:
        """Say that Serve itself failed; False where it is too late for that."""
        if self._begun:
            return False
        log.exception("%s %s failed before a replica was asked", self._scope["method"], self._scope["path"], exc_info=wrong)
        await reply(self._send, self._shaped(errors.error_body(wrong)))
        return True

    async def end(self) -> None:
        """Say what is still to be said; nothing where the answer is whole, or of a kind that knows no errors."""
        if self._whole:
            return
        gone, path = errors.error_reply(503, GONE, retry_after_s=RETRY_S), self._scope["path"]
        kind = next((value.decode("latin-1") for name, value in self._headers if name.lower() == b"content-type"), "")
        if not self._begun:
            await reply(self._send, self._shaped(gone))
        elif kind.startswith(STREAMS):
            await self._send({"type": "http.response.body", "body": routes.cut_off(gone, path, kind)})


def _fit(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Serve logs and echoes a request id as it comes, however long it is, and takes every value it reads for UTF-8."""
    if name == b"x-request-id":
        return name, (clean_id(value.decode("latin-1")) or "_").encode()
    return name, _utf8(value)


def _utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value


def middlewares() -> list[Middleware]:
    """What Serve asks for, in a proxy and in a replica that answers HTTP itself; the last is the outermost."""
    own = _in_replica()
    if importlib.util.find_spec("httptools") is not None:
        from uvicorn.config import HTTP_PROTOCOLS

        HTTP_PROTOCOLS["auto"] = f"rayneuron.serve.connection:{'Own' if own else 'Connection'}"
    return [Middleware(Ending)] if own else [Middleware(Readiness), Middleware(Ending)]


def _in_replica() -> bool:
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True
