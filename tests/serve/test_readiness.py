"""What callers are told whom no replica can answer: by the controller's states, and by the ASGI messages that reach the server."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from rayneuron.serve import readiness
from rayneuron.serve.readiness import Readiness, State

RUNS = State("RUNNING", True)
LOADS = State("DEPLOYING", False, progress="weights 3/30, 2.0 s since start")
TRACEBACK = """Failed to update the deployments ['EngineServer'].
The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:chat:EngineServer.initialize_and_get_metadata() (pid=7, ip=127.0.0.1)
  File "/x/replica.py", line 9, in initialize
rayneuron.errors.CheckpointError: /models/x: model.safetensors has no tensor lm_head.weight

During handling of the above exception, another exception occurred:

RuntimeError: Traceback (most recent call last):
"""


@pytest.mark.parametrize(
    ("path", "routes", "states", "status", "says"),
    [
        ("/v1/models", {}, {}, 503, "no application is deployed"),
        ("/v1/models", {}, {"chat": State("DEPLOYING", False)}, 503, "chat is still loading"),
        ("/v1/models", {"/": "chat"}, {"chat": LOADS}, 503, "chat is still loading: weights 3/30, 2.0 s since start"),
        ("/health", {"/": "chat"}, {"chat": State("UNHEALTHY", False)}, 503, "is being replaced"),
        ("/", {}, {"chat": State("DEPLOY_FAILED", False, TRACEBACK)}, 503, "chat failed to start: /models/x: model.safetensors"),
        ("/", {}, {"chat": State("DELETING", False)}, 503, "shutting down"),
        ("/", {"/m/a": "a", "/m/b": "b"}, {"a": RUNS, "b": RUNS}, 404, "/m/a (a), /m/b (b)"),
        ("/m/ab", {"/m/a": "a"}, {"a": RUNS}, 404, "no application answers at /m/ab"),
        ("/m/b/v1/models", {"/m/a": "a", "/m/b": "b"}, {"a": RUNS, "b": LOADS}, 503, "b is still loading"),
        ("/x", {"/": "a", "/x": "b"}, {"a": LOADS, "b": RUNS}, None, ""),  # the longest prefix
        ("/m/a/v1/models", {"/m/a": "a", "/m/b": "b"}, {"a": RUNS, "b": LOADS}, None, ""),
        ("/", {"/": "chat"}, {"chat": State("DEPLOY_FAILED", True)}, None, ""),  # a wrong update: what ran before runs on
    ],
)
def test_refusals(path: str, routes: dict[str, str], states: dict[str, State], status: int | None, says: str) -> None:
    refused = readiness.refusal(path, routes, states)
    if status is None:
        assert refused is None
        return
    assert refused is not None and refused[0] == refused[1]["error"]["code"] == status and says in refused[1]["error"]["message"]
    assert "\n" not in refused[1]["error"]["message"]
    assert ("Retry-After" in refused[2]) == (status == 503 and "failed to start" not in says)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (TRACEBACK, "/models/x: model.safetensors has no tensor lm_head.weight"),
        ("Deploying 'x' failed:\nTraceback (most recent call last):\nModuleNotFoundError: No module\n", "ModuleNotFoundError: No module"),
        ("", "the log of Ray Serve says why"),
    ],
)
def test_the_cause_is_one_line(message: str, line: str) -> None:
    assert readiness.cause(message).startswith(line)


class Proxy:
    """Stands where Serve's HTTP proxy stands."""

    def __init__(self) -> None:
        self.routes: dict[str, str] = {}
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        body = json.dumps(self.routes).encode() if scope["path"] == "/-/routes" else b"answered"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def ask(app: Any, path: str) -> tuple[int, bytes]:
    out: list[Any] = []

    async def send(message: Any) -> None:
        out.append(message)

    await app({"type": "http", "method": "GET", "path": path, "headers": []}, None, send)
    return out[0]["status"], b"".join(message.get("body", b"") for message in out[1:])


async def test_a_start_as_its_callers_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "SHORT_PERIOD_S", -1.0)
    proxy, states, looks = Proxy(), dict[str, State](), []

    def look() -> dict[str, State]:
        looks.append(1)
        return dict(states)

    app = Readiness(proxy, look)
    assert (await ask(app, "/health"))[0] == 503
    states["chat"] = State("DEPLOYING", False)
    assert b"chat is still loading" in (await ask(app, "/health"))[1]
    proxy.routes["/"], states["chat"] = "chat", LOADS
    status, body = await ask(app, "/health")
    assert status == 503 and json.loads(body)["error"]["message"].endswith("since start")
    states["chat"] = RUNS
    assert await ask(app, "/health") == (200, b"answered")
    seen = len(looks)
    assert [await ask(app, "/v1/models") for _ in range(9)] == [(200, b"answered")] * 9
    assert len(looks) == seen, "while all is well nobody asks the controller for each call"
    assert await ask(app, "/-/healthz") == (200, b"answered")
    monkeypatch.setattr(readiness, "LOOK_PERIOD_S", -1.0)
    states["chat"] = LOADS
    assert await ask(app, "/health") == (200, b"answered"), "nobody waits for a look that finds all well"
    assert app._looking is not None
    await asyncio.wait_for(app._looking, 10)
    assert (await ask(app, "/health"))[0] == 503


async def test_nobody_is_refused_by_a_look_older_than_the_call() -> None:
    """A replica has become ready while another caller's look was under way, and has answered since."""
    proxy, looks, entered, over = Proxy(), [], threading.Event(), threading.Event()
    proxy.routes["/"] = "chat"

    def look() -> dict[str, State]:
        looks.append(1)
        entered.set()
        if len(looks) == 1:
            over.wait(60)
            return {"chat": LOADS}
        return {"chat": RUNS}

    app = Readiness(proxy, look)
    first = asyncio.ensure_future(ask(app, "/health"))
    await asyncio.to_thread(entered.wait, 60)
    second = asyncio.ensure_future(ask(app, "/v1/models"))
    await asyncio.sleep(0)
    over.set()
    assert (await first)[0] == 503 and await second == (200, b"answered") and len(looks) == 2


async def test_where_the_controller_is_away_serve_answers_as_it_would() -> None:
    proxy = Proxy()
    proxy.routes["/"] = "chat"

    def look() -> dict[str, State]:
        raise RuntimeError("the controller is being replaced")

    assert await ask(Readiness(proxy, look), "/health") == (200, b"answered")
