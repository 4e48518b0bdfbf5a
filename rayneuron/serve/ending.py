"""An end for answers whose replica has died: a middleware of Serve's HTTP proxy, which else closes the connection without a word.

Named in RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH (`serve.profile`), which every proxy reads as it starts. Answers that end by themselves
pass through as they are.
"""

from __future__ import annotations

import importlib.util

from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayneuron.api import errors, routes
from rayneuron.api.fields import clean_id
from rayneuron.serve.readiness import Readiness, reply

GONE = "the process that answered this request has ended; it is being replaced"
RETRY_S = 5.0
STREAMS = ("text/event-stream", "application/jsonlines")


class Ending:
    """Wraps the proxy's application: a stream of events that is cut off gets an error event, an answer that never began an error body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        answer = _Answer(send, scope)
        scope["headers"] = [_fit(*header) for header in scope["headers"]]
        await self._app(scope, receive, answer.send)
        await answer.end()


class _Answer:
    """How far one answer has come."""

    def __init__(self, send: Send, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self._begun = self._whole = False
        self._kind = ""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            self._kind = next((v.decode("latin-1") for k, v in message.get("headers", ()) if k.lower() == b"content-type"), "")
        elif message["type"] == "http.response.body":
            self._whole = not message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """Say what is still to be said; nothing where the answer is whole, or of a kind that knows no errors."""
        gone, path = errors.error_reply(503, GONE, retry_after_s=RETRY_S), self._scope["path"]
        if not self._begun:
            await reply(self._send, routes.shaped(gone, path, self._scope["method"]))
        elif self._kind.startswith(STREAMS) and not self._whole:
            await self._send({"type": "http.response.body", "body": routes.cut_off(gone, path, self._kind)})


def _fit(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Serve logs and echoes a request id as it comes, however long it is."""
    return name, ((clean_id(value.decode("latin-1")) or "_").encode() if name == b"x-request-id" else value)


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
