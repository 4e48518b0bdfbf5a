"""An end for answers whose replica has died: a middleware of Serve's HTTP proxy, which else closes the connection without a word.

Named in RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH (`serve.profile`), which every proxy reads as it starts. Answers that end by themselves
pass through as they are.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayneuron.api import errors
from rayneuron.api.stream import DONE, event

GONE = "the process that answered this request has ended; it is being replaced"
RETRY_S = 5.0


class Ending:
    """Wraps the proxy's application: a stream of events that is cut off gets an error event, an answer that never began an error body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        answer = _Answer(send)
        await self._app(scope, receive, answer.send)
        await answer.end()


class _Answer:
    """How far one answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = self._whole = self._events = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            self._events = any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._whole = not message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """Say what is still to be said; nothing where the answer is whole, or of a kind that knows no errors."""
        status, body, headers = errors.error_reply(500, GONE, retry_after_s=RETRY_S)
        if not self._begun:
            pairs = [(b"content-type", b"application/json"), *((k.lower().encode(), v.encode()) for k, v in headers.items())]
            await self._send({"type": "http.response.start", "status": status, "headers": pairs})
            await self._send({"type": "http.response.body", "body": errors.encode(body)})
        elif self._events and not self._whole:
            await self._send({"type": "http.response.body", "body": event(body) + DONE})


def middlewares() -> list[Middleware]:
    """What Serve's proxy asks for."""
    return [Middleware(Ending)]
