"""HTTP routes of one model's replica: OpenAI, the neuron_server note, health and metrics; a thin ASGI application."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from rayneuron import __version__
from rayneuron.api import anthropic, errors, openai, responses, sagemaker, tgi
from rayneuron.api import call as api
from rayneuron.api.adapters import Change, find_adapter, read_load, read_registration, read_unload
from rayneuron.api.fields import Fields
from rayneuron.api.retold import said_as
from rayneuron.api.routes import ADAPTERS, SPOKEN, shaped
from rayneuron.config import Serving
from rayneuron.errors import Conflict, NoRoom, NotReady, RayNeuronError, RequestError
from rayneuron.serve.adapters import Adapting, confined
from rayneuron.serve.exchange import Exchange
from rayneuron.serve.handles import stats_of
from rayneuron.serve.http import Endpoint, RouteApp, RouteTable, generate
from rayneuron.serve.page_files import page_routes
from rayneuron.serve.verbs import Reweighed, Server

CORS: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": ["x-request-id", "retry-after"], "max_age": 600}
MANAGED = ("", "/models/{model:name}")  # LMI leaves the model out where there is one
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class Name(PathConvertor):
    """`{...:name}` in a path: what a model or an adapter is called, slashes and all."""

    regex = ".+"


register_url_convertor("name", Name())


def application(server: Server, echo_request_id: bool = True) -> RouteTable:
    """The ASGI application of one replica. `echo_request_id`: False behind Ray Serve, whose own middleware echoes X-Request-Id already."""
    routes: list[BaseRoute] = [
        Route(path, RouteApp(server, path, endpoint, echo_request_id), methods=list(methods)) for path, endpoint, methods in ROUTES
    ]
    if server.door.page:
        routes += page_routes()
    return assembled(server, routes)


def assembled(server: Server, routes: list[BaseRoute]) -> RouteTable:
    """The application of some routes: its errors, and who may ask from other pages."""
    origins = server.door.allowed_origins
    app = RouteTable(
        routes=routes,
        exception_handlers={HTTPException: partial(no_route, server)},
        middleware=[Middleware(CORSMiddleware, allow_origins=origins, **CORS)] if origins else [],
    )
    app.router.redirect_slashes = False
    return app


async def _models(server: Server, exchange: Exchange) -> None:
    await exchange.reply(200, errors.encode(openai.models_list(server.now.cards())))


async def _model(server: Server, exchange: Exchange) -> None:
    name = exchange.params["model"]
    await exchange.reply(200, errors.encode(openai.find_model(name, server.now.cards(name))))


async def _tokens(convert: Callable[[Any, api.Context], Any], server: Server, exchange: Exchange) -> None:
    body = await exchange.json_body(server.now.limits.max_body_bytes, server.now.limits.body_timeout_s)
    await exchange.reply(200, await server.now.read(lambda fields, context: errors.encode(convert(fields, context)), body))


def _tokenize(body: Any, context: api.Context) -> Any:
    """vLLM's body, or TGI's."""
    return (tgi.tokenize if body.get("inputs") is not None else openai.tokenize)(body, context)


async def _info(server: Server, exchange: Exchange) -> None:
    waiting = server.now.limits.max_waiting
    await exchange.reply(200, await server.now.read(lambda _, context: errors.encode(tgi.info(context, waiting)), {}))


async def _named_models(server: Server, exchange: Exchange) -> None:
    """SageMaker's and LMI's view of what is served."""
    cards = server.now.cards()
    root, names = cards[0]["root"], [card["id"] for card in cards]
    name = exchange.params.get("model")
    await exchange.reply(200, errors.encode(sagemaker.models(names, root) if name is None else sagemaker.model(name, names, root)))


async def _unmanaged(verb: str, server: Server, exchange: Exchange) -> None:
    raise sagemaker.unmanaged(verb)


async def _no_response(server: Server, exchange: Exchange) -> None:
    raise responses.unknown(exchange.params["id"])


async def _tokenizer_info(server: Server, exchange: Exchange) -> None:
    await exchange.reply(200, await server.now.read(lambda _, context: errors.encode(openai.tokenizer_info(context)), {}))


async def _health(server: Server, exchange: Exchange) -> None:
    """Empty 200 where a first token is possible; 503 while loading, draining, stalled or dead."""
    try:
        server.now.health()
    except RayNeuronError as wrong:
        raise NotReady(wrong.message, retry_after_s=server.now.limits.retry_after_s) from wrong
    await exchange.reply(200, b"")


async def _metrics(server: Server, exchange: Exchange) -> None:
    server.load()  # nothing to say where there is none
    await exchange.reply(200, await server.metrics_text(), METRICS_TYPE)


async def _reset_prefix_cache(server: Server, exchange: Exchange) -> None:
    """vLLM's: every replica forgets what prefixes it knows. Whoever may do that slows others down, hence not everybody may."""
    if not server.door.reset_prefix_cache:
        raise RequestError("clients of this server may not reset its prefix cache (serving.reset_prefix_cache: true would allow it)")
    await exchange.reply(200, errors.encode({"blocks": await server.forget_prefixes()}))


async def _change_adapters(read: Callable[[Any], Change], done: str, server: Server, exchange: Exchange) -> None:
    """vLLM's: an adapter comes or goes."""
    if not isinstance(server, Adapting):
        raise RequestError("adapters are loaded and unloaded at the model's own application", param="lora_name")
    body = await exchange.json_body(server.now.limits.max_body_bytes, server.now.limits.body_timeout_s)
    change = read(openai.decode(body))
    try:
        await server.change_adapters(change)
    except Conflict as wrong:  # vLLM's 400
        raise RequestError(wrong.message, param=wrong.param) from None
    await exchange.reply(200, f"Success: LoRA adapter '{change.name}' {done} successfully.".encode(), "text/plain; charset=utf-8")


async def _register(server: Server, exchange: Exchange) -> None:
    """LMI's and SageMaker's: an adapter comes (POST, said in the query or the body), is given anew (update), or goes."""
    named, update = exchange.params.get("adapter"), exchange.path.endswith("/update")
    _of_this_model(server, exchange)
    if not isinstance(server, Adapting):
        raise RequestError("adapters are registered at the model's own application", param="name")
    if exchange.method == "DELETE":
        change, done = Change(str(named)), "unregistered"
    else:
        body = await exchange.json_body(server.now.limits.max_body_bytes, server.now.limits.body_timeout_s)
        said = (openai.decode(body) if body else {}) | dict(parse_qsl(exchange.query.decode("latin-1")))
        change, done = read_registration(Fields(said | ({} if named is None else {"name": named}))), "updated" if update else "registered"
    try:
        with said_as({"lora_name": "name", "lora_path": "src"}):
            await server.change_adapters(change._replace(replaces=update))
    except NoRoom as wrong:
        return await exchange.refuse(exchange.shape(errors.error_reply(507, wrong.message, retry_after_s=wrong.retry_after_s)))
    await exchange.reply(200, errors.encode({"status": f"Adapter {change.name} {done}"}))


async def _registered(server: Server, exchange: Exchange) -> None:
    """LMI's: which adapters there are, or one of them."""
    _of_this_model(server, exchange)
    name = exchange.params.get("adapter")

    def told(_: Any, context: api.Context) -> Any:
        listed = [find_adapter(each, context) for each in (context.adapters() if name is None else [name])]
        return {"adapters": listed} if name is None else listed[0]

    await exchange.reply(200, errors.encode(await server.now.read(told, {})))


def _of_this_model(server: Server, exchange: Exchange) -> None:
    cards = server.now.cards()
    if "model" in exchange.params:
        sagemaker.model(exchange.params["model"], [card["id"] for card in cards], cards[0]["root"])


async def _load_weights(server: Server, exchange: Exchange) -> None:
    """Every replica goes on with the weights of another directory."""
    if not isinstance(server, Reweighed) or not isinstance(server.door, Serving):
        raise RequestError("weights are changed at the model's own application", param="path")
    if server.door.weights_directory is None:
        said = "clients of this server may not change its weights (serving.weights_directory, which they lie under, would allow it)"
        raise RequestError(said, param="path")
    fields = Fields(openai.decode(await exchange.json_body(server.now.limits.max_body_bytes, server.now.limits.body_timeout_s)))
    path = confined(fields.string("path") or "", server.door.weights_directory, "path", "serving.weights_directory")
    await exchange.reply(200, errors.encode({"path": str(path), "fingerprint": await server.load_weights(str(path))}))


async def _version(server: Server, exchange: Exchange) -> None:
    await exchange.reply(200, errors.encode(openai.version(__version__)))


async def _load(server: Server, exchange: Exchange) -> None:
    """vLLM's {server_load}, and the engine's snapshot beside it."""
    stats = stats_of(server)
    await exchange.reply(200, errors.encode({"server_load": stats["open_calls"], **stats}))


async def no_route(server: Server, http: HttpRequest, wrong: Exception) -> Response:
    """404 and 405 in the error body of whoever calls such a path; a bare route prefix leads to the page, whose links need the slash."""
    assert isinstance(wrong, HTTPException)
    path = http.url.path
    if path and path == http.scope.get("root_path") and http.method in ("GET", "HEAD"):
        return Response(status_code=307, headers={"location": path + "/"})
    if wrong.status_code == 404:
        say = f"no such path: {path}" + _near(path, [str(getattr(route, "path", "")) for route in http.app.routes])
    else:
        say = f"{http.method} is not allowed on {path}; send {(wrong.headers or {}).get('Allow')}"
    status, body, headers = shaped(errors.error_reply(wrong.status_code, say), path, http.method)
    return Response(errors.encode(body), status, {**headers, **(wrong.headers or {})}, "application/json")


def _near(path: str, known: list[str]) -> str:
    """What may be meant: a path in this one (a slash, or /v1, too many), else one that this is in (/v1 too few)."""
    fixed = [each for each in known if len(each) > 1 and "{" not in each]
    within = max((each for each in fixed if each in path), key=len, default="")
    asked = path.rstrip("/")
    found = within or (min((each for each in fixed if asked in each), key=len, default="") if asked else "")
    return f"; there is {found}" if found else ""


ROUTES: tuple[tuple[str, Endpoint, tuple[str, ...]], ...] = (
    *((path, partial(generate, dialect), ("POST",)) for path, dialect in SPOKEN.items()),
    ("/v1/responses/input_tokens", partial(_tokens, responses.count_tokens), ("POST",)),
    ("/v1/responses/{id}", _no_response, ("GET", "DELETE")),
    ("/v1/responses/{id}/cancel", _no_response, ("POST",)),
    ("/v1/messages/count_tokens", partial(_tokens, anthropic.count_tokens), ("POST",)),
    ("/v1/models", _models, ("GET",)),
    ("/v1/models/{model:path}", _model, ("GET",)),
    ("/tokenize", partial(_tokens, _tokenize), ("POST",)),
    ("/chat_tokenize", partial(_tokens, tgi.chat_tokenize), ("POST",)),
    ("/info", _info, ("GET",)),
    *((prefix + path, _registered, ("GET",)) for prefix in MANAGED for path in ADAPTERS[:2]),
    *((prefix + path, _register, (verb,)) for prefix in MANAGED for path, verb in zip(ADAPTERS, ("POST", "DELETE", "POST"), strict=True)),
    ("/models", _named_models, ("GET",)),
    ("/models", partial(_unmanaged, "loaded"), ("POST",)),
    ("/models/{model:name}", _named_models, ("GET",)),
    ("/models/{model:name}", partial(_unmanaged, "scaled or unloaded"), ("PUT", "DELETE")),
    ("/detokenize", partial(_tokens, openai.detokenize), ("POST",)),
    ("/tokenizer_info", _tokenizer_info, ("GET",)),
    ("/health", _health, ("GET",)),
    ("/ping", _health, ("GET", "POST")),
    ("/metrics", _metrics, ("GET",)),
    ("/load", _load, ("GET",)),
    ("/reset_prefix_cache", _reset_prefix_cache, ("POST",)),
    ("/admin/weights", _load_weights, ("POST",)),
    ("/v1/load_lora_adapter", partial(_change_adapters, read_load, "added"), ("POST",)),
    ("/v1/unload_lora_adapter", partial(_change_adapters, read_unload, "removed"), ("POST",)),
    ("/version", _version, ("GET",)),
)
