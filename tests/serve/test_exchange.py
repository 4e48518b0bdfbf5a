"""One HTTP exchange by itself: a body that does not come in time, who looks whether the client has gone; and how a call finds its route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from rayneuron.errors import RequestTimeout
from rayneuron.serve.connection import Past
from rayneuron.serve.exchange import UNWATCHED, Exchange
from rayneuron.serve.http import RouteTable
from rayneuron.serve.seams import PIPE


def scope(path: str = "/", root: str = "", method: str = "POST", headers: Any = (), **state: Any) -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "root_path": root, "headers": [*headers], "state": state}


async def nothing() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_body_has_so_long_to_arrive() -> None:
    exchange = Exchange(scope(), nothing, None)  # type: ignore[arg-type]
    with pytest.raises(RequestTimeout, match="did not arrive within 0.01 s"):
        await exchange.body(1000, 0.01)


async def test_whoever_cancels_what_waits_for_a_body_is_obeyed() -> None:
    reading = asyncio.create_task(Exchange(scope(), nothing, None).body(1000, 60.0))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_body_that_has_come_leaves_no_timer() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"word"}

    assert await Exchange(scope(), receive, None).body(1000, 0.01) == b"word"  # type: ignore[arg-type]
    await asyncio.sleep(0.05)  # it would cancel this task


@pytest.mark.parametrize(
    ("echo", "piped", "headers", "looks"),
    [
        (True, True, (), True),  # no Ray Serve around it
        (False, False, (), True),  # behind its proxy
        (False, True, (), False),  # its replica answers HTTP itself, and looks
        (False, True, ((UNWATCHED, b"?1"),), True),
    ],
)
async def test_one_of_us_looks_whether_the_client_has_gone(echo: bool, piped: bool, headers: Any, looks: bool) -> None:
    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    state = {PIPE: Past(None)} if piped else {}  # type: ignore[arg-type]
    exchange = Exchange(scope(headers=headers, **state), gone, None, echo)  # type: ignore[arg-type]
    waiting = asyncio.create_task(asyncio.sleep(0.02))
    exchange.watch(waiting)
    await asyncio.wait([waiting])
    assert (waiting.cancelled(), exchange.gone) == (looks, looks)


class Answers:
    """An application that says a status, and nothing else."""

    def __init__(self, status: int) -> None:
        self._status = status

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self._status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def found(app: Starlette, scope: dict[str, Any]) -> tuple[int, bytes]:
    said: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        said.append(message)

    await app(scope, nothing, send)
    return said[0]["status"], dict(said[0]["headers"]).get(b"access-control-allow-origin", b"")


@pytest.mark.parametrize("origins", [[], ["*"]])
async def test_a_call_finds_its_route_under_any_prefix_and_passes_what_is_around_it(origins: list[str]) -> None:
    routes = [Route("/one", Answers(201), methods=["POST"]), Route("/one", Answers(202), methods=["GET"])]
    routes += [Route("/{any}", Answers(203), methods=["POST"]), Route("/one", Answers(204), methods=["POST"])]
    around = [Middleware(CORSMiddleware, allow_origins=origins)] if origins else []
    app = RouteTable(routes=routes, middleware=around)
    origin = ((b"origin", b"http://elsewhere"),)
    for path, root, method, status in (
        ("/one", "", "POST", 201),
        ("/m/x/one", "/m/x", "POST", 201),
        ("/one", "", "GET", 202),
        ("/two", "", "POST", 203),
        ("/m/x/two", "/m/x", "POST", 203),
        ("/one", "", "PUT", 405),
        ("/one/two", "", "POST", 404),
    ):
        assert await found(app, scope(path, root, method, origin)) == (status, b"*" if origins else b""), path
