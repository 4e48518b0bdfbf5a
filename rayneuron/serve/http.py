"""Routes over ASGI: who may ask, what generates, whole or as events, and the one reply to whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rayneuron import keys, metrics
from rayneuron.api import call as api
from rayneuron.api import errors
from rayneuron.errors import RayNeuronError
from rayneuron.serve.exchange import STREAM_HEADERS, ClientGone, Exchange
from rayneuron.serve.flight import Flight
from rayneuron.serve.verbs import Server

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/"})  # answered without the API key: they reveal and cost nothing

Endpoint = Callable[[Server, Exchange], Awaitable[None]]


class RouteApp:
    """One route as an ASGI application: runs its endpoint and turns whatever it raises into the one reply there is."""

    def __init__(self, server: Server, path: str, endpoint: Endpoint, echo_request_id: bool) -> None:
        self._server = server
        self._path = path
        self._endpoint = endpoint
        self._echo = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server, exchange = self._server, Exchange(scope, receive, send, self._echo)
        try:
            _check_key(server, exchange, self._path)
            await self._endpoint(server, exchange)
        except ClientGone:
            _left(server, exchange)
        except asyncio.CancelledError:
            _left(server, exchange)
            if not exchange.gone:
                raise  # Ray Serve cancels the task itself when the client goes
        except Exception as wrong:
            await self._refuse(exchange, wrong)
        finally:
            exchange.unwatch()
            server.telemetry.replied(exchange.method, self._path, exchange.status or 499)

    async def _refuse(self, exchange: Exchange, wrong: Exception) -> None:
        if not isinstance(wrong, RayNeuronError):
            log.exception("%s %s failed [%s]", exchange.method, exchange.path, exchange.request_id)
        if exchange.status == 0:
            await exchange.refuse(exchange.shape(errors.error_body(wrong)))
        elif exchange.held_open:
            await exchange.write(b"data: " + errors.encode(exchange.shape(errors.error_body(wrong))[1]) + b"\n\n", more=False)


class RouteTable(Starlette):
    """What generates goes straight to its route: Starlette would look for it among all of them, and wrap whatever it says three times."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**words)
        plain = [route for route in self.routes if isinstance(route, Route) and "{" not in route.path and route.methods == {"POST"}]
        self._posted = {route.path: route.app for route in reversed(plain)} if not self.user_middleware else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] == "http" and scope["method"] == "POST":
            root, path = scope.get("root_path", ""), scope["path"]
            if (app := self._posted.get(path[len(root) :] if path.startswith(root) else path)) is not None:
                return await app(scope, receive, send)
        await super().__call__(scope, receive, send)


def _left(server: Server, exchange: Exchange) -> None:
    log.info("%s %s: the client has gone [%s]", exchange.method, exchange.path, exchange.request_id)
    server.telemetry.series[metrics.DISCONNECTS].add()


def _check_key(server: Server, exchange: Exchange, path: str) -> None:
    if not server.keys or path in OPEN_PATHS:
        return
    if server.account(keys.shown(exchange.headers)) is None:
        raise _WrongKey("the API key is missing or wrong; send `Authorization: Bearer <key>`")


class _WrongKey(RayNeuronError):
    status = 401


async def generate(dialect: api.Dialect, server: Server, exchange: Exchange) -> None:
    """Any endpoint that generates: admit, read, parse, run, answer whole or piece by piece."""

    def parse(body: api.Json, context: api.Context, **words: Any) -> api.Call:
        spoken = dialect if dialect.choose is None else dialect.choose(body)
        exchange.shape = spoken.error
        said = {} if dialect.head is None else dialect.head(exchange.params, exchange.header)
        return spoken.parse({**body, **said}, context, **words)

    arrival_s = time.monotonic()
    server.now.admit()
    limits = server.now.limits
    limit_s = exchange.time_limit_s(limits.request_timeout_s)
    body = await exchange.json_body(limits.max_body_bytes, limits.body_timeout_s)
    task = asyncio.current_task()
    assert task is not None
    exchange.watch(task)
    call, now = await server.now.parse(parse, body, exchange.client_id), server.now
    with now.flight(call, arrival_s, limit_s, exchange.headers) as flight:
        if call.head.stream:
            await _stream(call, flight, exchange)
        else:
            body = await now.write(call, await flight.finish(), errors.encode)
            await exchange.reply(200, body, headers=flight.headers)


async def _stream(call: api.Call, flight: Flight, exchange: Exchange) -> None:
    """Headers once the first step has come back; then whatever is there at every write."""
    await flight.started()
    stream, pipe = call.answer.open(call), exchange.pipe
    await exchange.begin(200, stream.content_type, [*STREAM_HEADERS, *((k.encode(), v.encode()) for k, v in flight.headers.items())])

    def pour() -> bool:
        if pipe is None or not pipe.open:
            return False
        if part := b"".join([stream.chunk(delta) for delta in flight.ready()]):
            pipe.write(part)
        return not stream.done

    try:
        out = stream.first() + b"".join([stream.chunk(delta) for delta in flight.ready()])
        while not stream.done:
            if out and pipe is not None and pipe.open:
                pipe.write(out)
            elif out:
                await exchange.write(out)
            out = b""
            await flight.rest(pour)
            if stream.done or not (deltas := await flight.take()):
                break
            out = b"".join([stream.chunk(delta) for delta in deltas])
        out += b"" if stream.failed else stream.last()
    except Exception as wrong:
        if not isinstance(wrong, RayNeuronError):
            log.exception("stream %s failed [%s]", call.id, exchange.request_id)
        out = stream.error(wrong)
    await exchange.write(out, more=False)
