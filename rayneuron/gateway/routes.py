"""HTTP routes of a gateway: those of a model's replica, behind the choice of the model, and what it says of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Match, Mount, Route, Router
from starlette.types import Scope

from rayneuron.api import errors, openai, sagemaker
from rayneuron.errors import Conflict, RequestError
from rayneuron.gateway import hosts_page
from rayneuron.gateway.catalogue import Catalogue
from rayneuron.gateway.entry import CatalogueEntry
from rayneuron.policies.desk import REMEMBERED
from rayneuron.serve.exchange import Exchange
from rayneuron.serve.http import Endpoint, RouteApp
from rayneuron.serve.ingress import METRICS_TYPE, ROUTES, assembled
from rayneuron.serve.page_files import page_routes
from rayneuron.serve.served import LONG_BYTES

Told = TypeVar("Told")
PROGRESS = "x-rayneuron-progress"  # whoever says 1 is told how far a model has come that wakes for it
EVENTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")  # whose streams are events in every case
TARGET = "x-amzn-sagemaker-target-model"  # SageMaker's way to name a model


class Named(msgspec.Struct):
    """What a body says of whom it is for; all else is for the model to read."""

    model: str | None = None


class Streamed(msgspec.Struct):
    """Whether a body asks for a stream."""

    stream: bool = False


class Below(Mount):
    """The routes of one model, below /m/<name>/. A name may hold slashes: the longest that is known goes first, then one that nobody knows,
    and what has such a route below it before what has none. `names`: those that are known now."""

    def __init__(self, names: Callable[[], Iterable[str]], routes: list[BaseRoute]) -> None:
        super().__init__("/m", Router(routes=routes, redirect_slashes=False))
        self._names = names

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As Mount's."""
        found, child = super().matches(scope)
        if found is Match.NONE or (rest := scope["path"][len(below := child["root_path"] + "/") :])[:1] in ("", "/"):
            return Match.NONE, {}
        known = sorted((name for name in self._names() if f"{rest}/".startswith(f"{name}/")), key=len, reverse=True)
        ways = dict.fromkeys((*known, *("/".join(rest.split("/", 2)[:most]) for most in (1, 2))))
        children = [{**child, "path_params": {**child["path_params"], "name": name}, "root_path": below + name} for name in ways]
        return found, next((each for each in children if self._answers({**scope, **each})), children[0])

    def _answers(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self.routes)


def application(catalogue: Catalogue, echo_request_id: bool = True) -> Starlette:
    """The ASGI application of a gateway: the routes at /, and once more at /m/<name>/ for each model."""

    def made(path: str, endpoint: Endpoint, methods: tuple[str, ...], under: str) -> Route:
        run: Any = OF_ALL.get(path, endpoint if path in AS_THEY_ARE else None) if not under else None
        return Route(path, RouteApp(catalogue, f"{under}{path}", run or partial(_chosen, endpoint), echo_request_id), methods=list(methods))

    hosts = Route("/debug/hosts", RouteApp(catalogue, "/debug/hosts", _hosts, echo_request_id), methods=["GET"])  # type: ignore[arg-type]
    decisions = Route("/debug/routes", RouteApp(catalogue, "/debug/routes", _decisions, echo_request_id), methods=["GET"])  # type: ignore[arg-type]
    page = page_routes() if catalogue.door.page else []
    one = [*(made(*route, "/m/{name}") for route in ROUTES), *page]
    below = Below(lambda: (name for entry in catalogue.entries for name in entry.names), one)
    routes: list[BaseRoute] = [*(made(*route, "") for route in ROUTES), below, decisions, hosts, *page]
    return assembled(catalogue, routes)


async def _chosen(endpoint: Endpoint, catalogue: Catalogue, exchange: Exchange) -> None:
    entry = await choose(catalogue, exchange)
    if catalogue.waking is not None and exchange.method == "POST":
        body = await exchange.json_body(catalogue.door.max_body_bytes, catalogue.door.body_timeout_s)
        await catalogue.waking.hold(entry, exchange, exchange.header(PROGRESS) == "1" and await _of(body, _streams, exchange.path))
    await endpoint(entry, exchange)


async def choose(catalogue: Catalogue, exchange: Exchange) -> CatalogueEntry:
    """Whom a call is for: its path says it, else SageMaker's header, else the body. Raises UnknownModel."""
    if (name := exchange.params.get("name") or exchange.params.get("model")) is not None:
        return catalogue.named(name, "path")
    if (target := exchange.header(TARGET)) is not None:
        return catalogue.named(target, TARGET)
    if exchange.method != "POST":
        return catalogue.named(None)
    body = await exchange.json_body(catalogue.door.max_body_bytes, catalogue.door.body_timeout_s)
    return catalogue.named(await _of(body, _name))


async def _of(body: bytes, read: Callable[..., Told], *more: str) -> Told:
    """What is read of a body, on a thread where it is long."""
    return read(body, *more) if len(body) <= LONG_BYTES else await asyncio.to_thread(read, body, *more)


def _streams(body: bytes, path: str) -> bool:
    """Whether events answer it, among which comments may be."""
    try:
        return path.endswith(EVENTS) and msgspec.json.decode(body, type=Streamed).stream
    except msgspec.MsgspecError:
        return False


def _name(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        named = openai.decode(body).get("model")  # says what is wrong with it, but for a mark before UTF-8
        return named if isinstance(named, str) else None  # a model that is no text: whoever reads the body says so


async def _models(catalogue: Catalogue, exchange: Exchange) -> None:
    await exchange.reply(200, errors.encode(await catalogue.models()))


async def _model(catalogue: Catalogue, exchange: Exchange) -> None:
    name = exchange.params["model"]
    entry = catalogue.named(name, "model")
    await exchange.reply(200, errors.encode(openai.find_model(name, entry.cards())))


async def _health(catalogue: Catalogue, exchange: Exchange) -> None:
    catalogue.health()
    await exchange.reply(200, b"")


async def _metrics(catalogue: Catalogue, exchange: Exchange) -> None:
    await exchange.reply(200, await catalogue.metrics_text(), METRICS_TYPE)


async def _load(catalogue: Catalogue, exchange: Exchange) -> None:
    told = await catalogue.stats()
    await exchange.reply(200, errors.encode({"server_load": told["open_calls"], **told}))


async def _decisions(catalogue: Catalogue, exchange: Exchange) -> None:
    asked = parse_qs(exchange.query.decode("latin-1")).get("n", ["64"])[0]
    if not asked.isdigit() or not 0 < int(asked) <= REMEMBERED:
        raise RequestError(f"n must be a number from 1 to {REMEMBERED}, got {asked!r}", param="n")
    await exchange.reply(200, errors.encode(catalogue.decisions(int(asked))))


async def _hosts(catalogue: Catalogue, exchange: Exchange) -> None:
    """Nodes, seats and models of the host: JSON, or a page for whoever would rather look."""
    told = await catalogue.hosts()
    if "text/html" in (exchange.header("accept") or ""):
        return await exchange.reply(200, hosts_page.page(told), "text/html; charset=utf-8")
    await exchange.reply(200, errors.encode(told))


async def _asked(catalogue: Catalogue, exchange: Exchange) -> str:
    """The model that is to be loaded: LMI says it in the query, SageMaker in the body."""
    name: Any = parse_qs(exchange.query.decode("latin-1")).get("model_name", [None])[0]
    if name is None:
        body = await exchange.json_body(catalogue.door.max_body_bytes, catalogue.door.body_timeout_s)
        name = openai.decode(body).get("model_name")
    if not isinstance(name, str) or not name:
        raise RequestError("say which model as `model_name`, in the query or the body", param="model_name")
    return name


async def _named(catalogue: Catalogue, exchange: Exchange) -> None:
    """As SageMaker's containers list them; which there are, the file says: one more is refused, one that is there already 409."""
    if exchange.method == "POST":
        name = await _asked(catalogue, exchange)
        if any(name in entry.names for entry in catalogue.entries):
            raise Conflict(f"the model {name[:256]} is here already", param="model_name")
        raise sagemaker.unmanaged("loaded")
    names = [card["id"] for card in (await catalogue.models())["data"]]
    await exchange.reply(200, errors.encode(sagemaker.models(names, "")))


OF_ALL: dict[str, Any] = {
    "/models": _named,
    "/v1/models": _models,
    "/v1/models/{model:path}": _model,
    "/health": _health,
    "/ping": _health,
    "/metrics": _metrics,
    "/load": _load,
}
AS_THEY_ARE = ("/version", "/reset_prefix_cache")
