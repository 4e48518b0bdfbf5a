"""HTTP routes of one model's replica: OpenAI, the neuron_server note, health and metrics; a thin ASGI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from rayneuron import __version__, keys, metrics
from rayneuron.api import call as api
from rayneuron.api import errors, neuron_server, openai
from rayneuron.errors import NotReady, RayNeuronError
from rayneuron.serve.flight import Flight
from rayneuron.serve.handles import reader, stats_of
from rayneuron.serve.http import ClientGone, Exchange
from rayneuron.serve.page_files import page_routes
from rayneuron.serve.verbs import Verbs

log = logging.getLogger(__name__)

Endpoint = Callable[[Verbs, Exchange], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/"})  # answered without the API key: they reveal and cost nothing
CORS: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["x-request-id", "retry-after"], "max_age": 600}
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


def application(server: Verbs, echo_request_id: bool = True) -> Starlette:
    """The ASGI application of one replica. `echo_request_id`: False behind Ray Serve, whose own middleware echoes X-Request-Id already."""
    routes: list[BaseRoute] = [
        Route(path, _Answer(server, path, endpoint, echo_request_id), methods=list(methods)) for path, endpoint, methods in ROUTES
    ]
    if server.config.serving.page:
        routes += page_routes()
    origins = server.config.serving.allowed_origins
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: partial(_no_route, server)},
        middleware=[Middleware(CORSMiddleware, allow_origins=origins, **CORS)] if origins else [],
    )
    app.router.redirect_slashes = False
    return app


class _Answer:
    """One route: runs its endpoint and turns whatever it raises into the one reply there is."""

    def __init__(self, server: Verbs, path: str, endpoint: Endpoint, echo_request_id: bool) -> None:
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
            await exchange.refuse(errors.error_body(wrong))


def _left(server: Verbs, exchange: Exchange) -> None:
    log.info("%s %s: the client has gone [%s]", exchange.method, exchange.path, exchange.request_id)
    server.telemetry.series[metrics.DISCONNECTS].add()


def _check_key(server: Verbs, exchange: Exchange, path: str) -> None:
    if not server.config.serving.api_keys or path in OPEN_PATHS:
        return
    scheme, _, given = (exchange.header("authorization") or "").partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else ""
    if not keys.accepts(server.keys, given.encode("latin-1")):
        raise _WrongKey("the API key is missing or wrong; send `Authorization: Bearer <key>`")


class _WrongKey(RayNeuronError):
    status = 401


async def _generate(parse: Callable[..., api.Call], server: Verbs, exchange: Exchange) -> None:
    """Any endpoint that generates: admit, read, parse, run, answer whole or piece by piece."""
    arrival_s = time.monotonic()
    server.admit()
    limit_s = exchange.time_limit_s(server.limits.request_timeout_s)
    body = await exchange.json_body(server.limits.max_body_bytes, server.limits.body_timeout_s)
    task = asyncio.current_task()
    assert task is not None
    exchange.watch(task)
    call = await server.parse(reader(parse, exchange.client_id), body)
    with server.flight(call, arrival_s, limit_s, exchange.headers) as flight:
        if call.stream:
            await _stream(call, flight, exchange)
        else:
            await exchange.reply(200, await server.text_thread.write(call, await flight.finish(), errors.encode))


async def _stream(call: api.Call, flight: Flight, exchange: Exchange) -> None:
    """Headers once the first step has come back; then whatever is there at every write."""
    await flight.started()
    stream = call.open()
    await exchange.begin(200, stream.content_type, STREAM_HEADERS)
    try:
        out = stream.first() + b"".join([stream.chunk(delta) for delta in flight.ready()])
        while not stream.done:
            if out:
                await exchange.write(out)
            await flight.rest(flight.pace_s())
            deltas = await flight.take()
            if not deltas:
                break
            out = b"".join([stream.chunk(delta) for delta in deltas])
        out += b"" if stream.failed else stream.last()
    except Exception as wrong:
        if not isinstance(wrong, RayNeuronError):
            log.exception("stream %s failed [%s]", call.id, exchange.request_id)
        out = stream.error(wrong)
    await exchange.write(out, more=False)


STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


async def _models(server: Verbs, exchange: Exchange) -> None:
    await exchange.reply(200, errors.encode(openai.models_list(server.cards())))


async def _model(server: Verbs, exchange: Exchange) -> None:
    name = exchange.params["model"]
    await exchange.reply(200, errors.encode(openai.find_model(name, server.cards(name))))


async def _tokens(convert: Callable[[Any, api.Context], Any], server: Verbs, exchange: Exchange) -> None:
    body = await exchange.json_body(server.limits.max_body_bytes, server.limits.body_timeout_s)
    await exchange.reply(200, await server.parse(lambda fields, context: errors.encode(convert(fields, context)), body))


async def _tokenizer_info(server: Verbs, exchange: Exchange) -> None:
    await exchange.reply(200, await server.parse(lambda _, context: errors.encode(openai.tokenizer_info(context)), {}))


async def _health(server: Verbs, exchange: Exchange) -> None:
    """Empty 200 where a first token is possible; 503 while loading, draining, stalled or dead."""
    try:
        server.health()
    except RayNeuronError as wrong:
        raise NotReady(wrong.message, retry_after_s=server.limits.retry_after_s) from wrong
    await exchange.reply(200, b"")


async def _metrics(server: Verbs, exchange: Exchange) -> None:
    server.load()  # nothing to say where there is none
    await exchange.reply(200, await server.metrics_text(), METRICS_TYPE)


async def _version(server: Verbs, exchange: Exchange) -> None:
    await exchange.reply(200, errors.encode(openai.version(__version__)))


async def _load(server: Verbs, exchange: Exchange) -> None:
    """vLLM's {server_load}, and the engine's snapshot beside it."""
    stats = stats_of(server)
    await exchange.reply(200, errors.encode({"server_load": stats["open_calls"], **stats}))


async def _no_route(server: Verbs, http: HttpRequest, wrong: Exception) -> Response:
    """404 and 405 in OpenAI's error body; a bare route prefix leads to the page, whose links need the slash."""
    assert isinstance(wrong, HTTPException)
    path = http.url.path
    if path and path == http.scope.get("root_path") and http.method in ("GET", "HEAD"):
        return Response(status_code=307, headers={"location": path + "/"})
    say = f"no such path: {path}" if wrong.status_code == 404 else f"{http.method} is not allowed on {path}"
    status, body, headers = errors.error_reply(wrong.status_code, say)
    return Response(errors.encode(body), status, {**headers, **(wrong.headers or {})}, "application/json")


ROUTES: tuple[tuple[str, Endpoint, tuple[str, ...]], ...] = (
    ("/v1/chat/completions", partial(_generate, openai.parse_chat), ("POST",)),
    ("/v1/completions", partial(_generate, openai.parse_completions), ("POST",)),
    ("/generate", partial(_generate, neuron_server.parse), ("POST",)),
    ("/v1/models", _models, ("GET",)),
    ("/v1/models/{model:path}", _model, ("GET",)),
    ("/tokenize", partial(_tokens, openai.tokenize), ("POST",)),
    ("/detokenize", partial(_tokens, openai.detokenize), ("POST",)),
    ("/tokenizer_info", _tokenizer_info, ("GET",)),
    ("/health", _health, ("GET",)),
    ("/ping", _health, ("GET", "POST")),
    ("/metrics", _metrics, ("GET",)),
    ("/load", _load, ("GET",)),
    ("/version", _version, ("GET",)),
)
