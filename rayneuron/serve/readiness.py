"""What a caller is told whom no replica can answer: 503 while an application loads or where it failed, 404 where there is none; as JSON."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayneuron.api import errors, routes
from rayneuron.deployment_file import PREFILL

LOADING_RETRY_S = 2.0
LOOK_PERIOD_S = 1.0  # how old a picture of healthy applications may be
SHORT_PERIOD_S = 0.2  # between two looks while callers are refused
WORDLESS = ("UPDATING", "UNHEALTHY", "DEPLOY_FAILED")  # deployments that answer nothing where no replica runs; UPSCALING wakes one up
ANSWERING = ("RUNNING", "UPDATING", "PENDING_MIGRATION")  # replicas that take calls, now or once they have taken a new user_config
KEY, CARD = b"rayneuron:start:", b"rayneuron:card:"


@dataclass(frozen=True, slots=True)
class State:
    """One application, as Serve's controller sees it."""

    status: str
    ready: bool  # a replica answers, or one will where it is asked (scaled to zero)
    message: str = ""  # what Serve says of it, tracebacks included
    progress: str = ""  # how far a replica has come in its start


def refusal(path: str, routes: Mapping[str, str], states: Mapping[str, State]) -> errors.Triple | None:
    """Why nobody answers at `path`, None where somebody does. `routes`: route prefix to application, as Serve's proxy has them."""
    there = [prefix for prefix in routes if prefix == "/" or path == prefix or path.startswith(prefix + "/")]
    if there:
        name = routes[max(there, key=len)]
        state = states.get(name)
        return None if state is None or state.ready else _unready(name, state)
    for name, state in states.items():
        if name not in routes.values():  # its prefix is not known before it is built: it may be the one that is asked for
            return _unready(name, state)
    if not states:
        return errors.error_reply(503, "no application is deployed here yet", retry_after_s=LOADING_RETRY_S)
    known = ", ".join(f"{prefix} ({name})" for prefix, name in sorted(routes.items()))
    return errors.error_reply(404, f"no application answers at {path}; there are: {known}")


def _unready(name: str, state: State) -> errors.Triple:
    if state.status == "DEPLOY_FAILED":
        return errors.error_reply(503, f"{name} failed to start: {cause(state.message)}")
    if state.status == "DELETING":
        return errors.error_reply(503, f"{name} is shutting down", retry_after_s=LOADING_RETRY_S)
    say = "has failed and is being replaced" if state.status == "UNHEALTHY" else "is still loading"
    return errors.error_reply(503, f"{name} {say}" + (f": {state.progress}" if state.progress else ""), retry_after_s=LOADING_RETRY_S)


def cause(message: str) -> str:
    """The one line of Serve's account of a failure that says why: what we raised on purpose, else the last exception named."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"rayneuron\.errors\.\w+: ", line)]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit): ", line) and not line.endswith("(most recent call last):")]
    return re.sub(r"^rayneuron\.errors\.\w+: ", "", (ours or named or lines or ["the log of Ray Serve says why"])[-1])


def look() -> dict[str, State]:
    """The applications of this cluster. Blocks on Serve's controller."""
    return {name: _state(name, app) for name, app in serve.status().applications.items()}


def publish(application: str, progress: str) -> None:
    """Let the proxies say how far the start of a replica has come."""
    _internal_kv_put(KEY + application.encode(), progress.encode(), overwrite=True)


def show(application: str, card: bytes) -> None:
    """Let gateways see a replica before Serve knows that it is ready."""
    _internal_kv_put(CARD + application.encode(), card, overwrite=True)


def shown(application: str) -> bytes | None:
    """What a replica of an application has shown."""
    found: bytes | None = _internal_kv_get(CARD + application.encode())
    return found


def forget(application: str) -> None:
    """Nothing has been said of a start, and no card been shown."""
    for kind in (KEY, CARD):
        _internal_kv_del(kind + application.encode())


def _state(name: str, app: Any) -> State:
    deployments = [d for name, d in app.deployments.items() if name != PREFILL]  # without them it is slower, and answers
    running = any(int(d.replica_states.get(kind, 0)) for d in deployments for kind in ANSWERING)
    # An application that is built anew, or could not be, lists no deployments: those it had answer on, and one that had none has no route.
    ready = running or not any(d.status.value in WORDLESS for d in deployments)
    message = "\n".join([app.message, *(d.message for d in deployments)])
    progress = "" if ready else (_internal_kv_get(KEY + name.encode()) or b"").decode()
    return State(app.status.value, ready, message, progress)


class Readiness:
    """Wraps the application of Serve's HTTP proxy, which else holds such calls until a replica is there, or answers in plain text."""

    def __init__(self, app: ASGIApp, look: Callable[[], dict[str, State]] = look) -> None:
        self._app = app
        self._look = look
        self._routes: dict[str, str] = {}
        self._states: dict[str, State] = {}
        self._looked_s = -LOOK_PERIOD_S
        self._looking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] == "http" and not scope["path"].startswith("/-/"):
            refused = await self._refusal(scope["path"])
            if refused is not None:
                return await reply(send, routes.shaped(refused, scope["path"], scope["method"]))
        await self._app(scope, receive, send)

    async def _refusal(self, path: str) -> errors.Triple | None:
        """Callers of what answered a moment ago wait for nothing; nobody is refused by a look older than the call: HAProxy may send it
        here right after a replica has answered another."""
        came_s = time.monotonic()
        if refusal(path, self._routes, self._states) is None:
            if came_s - self._looked_s > LOOK_PERIOD_S:
                self._refreshed()
            return None
        while self._looked_s < came_s:
            await asyncio.shield(self._refreshed())
        return refusal(path, self._routes, self._states)

    def _refreshed(self) -> asyncio.Task[None]:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._refresh())
        return self._looking

    async def _refresh(self) -> None:
        await asyncio.sleep(max(0.0, self._looked_s + SHORT_PERIOD_S - time.monotonic()))
        began_s = time.monotonic()
        routes = await _routes(self._app)
        try:
            states = await asyncio.to_thread(self._look)
        except Exception:  # the controller is being replaced: what was known holds, and Serve answers as it would
            states = {name: State("RUNNING", True) for name in routes.values()}
        self._routes, self._states, self._looked_s = routes, states, began_s


async def _routes(app: ASGIApp) -> dict[str, str]:
    """What the proxy answers at /-/routes: route prefix to application; {} before it knows any."""
    out: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        out.append(message)

    path = "/-/routes"
    head = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": []}
    await app({**head, "http_version": "1.1", "scheme": "http", "client": None, "server": None}, receive, send)
    if out[0].get("status") != 200:
        return {}
    routes: dict[str, str] = json.loads(b"".join(message.get("body", b"") for message in out[1:]))
    return routes


async def reply(send: Send, triple: errors.Triple) -> None:
    """Send an error body as a whole answer."""
    status, body, headers = triple
    data = errors.encode(body)
    pairs = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    pairs += [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": data})
