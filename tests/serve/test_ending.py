"""What Serve's proxy says to a client whose replica has died, by the ASGI messages that reach the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayneuron.api import errors, routes
from rayneuron.errors import TIMED_OUT
from rayneuron.serve.ending import Ending
from rayneuron.serve.profile import profile_env

EVENTS = {"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")]}
JSON = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def through(
    *messages: dict[str, Any], kind: str = "http", path: str = "/v1/completions", headers: Any = (), seen: Any = None
) -> list[dict[str, Any]]:
    """What comes out where an application sends these messages and returns."""
    out: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if seen is not None:
            seen.extend(scope["headers"])
        for message in messages:
            await send(message)

    async def send(message: Any) -> None:
        out.append(message)

    await Ending(app)({"type": kind, "method": "POST", "path": path, "headers": headers}, None, send)  # type: ignore[arg-type]
    return out


async def test_a_stream_that_is_cut_off_gets_an_error_event() -> None:
    first = (EVENTS, body(b"data: 1\n\n"))
    *passed, last = await through(*first)
    assert passed == [*first] and not last.get("more_body")
    error, done, _ = last["body"].decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503 and done == "data: [DONE]"


async def test_both_are_said_in_the_dialect_of_the_route() -> None:
    *_, last = await through(EVENTS, body(b"event: ping\n\n"), path="/m/x/v1/messages")
    assert last["body"].startswith(b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"')
    start, only = await through(path="/generate_stream")
    assert start["status"] == 503 and json.loads(only["body"])["error_type"] == "overloaded"


async def test_an_answer_that_never_began_is_an_error_body() -> None:
    start, only = await through()
    assert start["status"] == 503 and (b"retry-after", b"5") in start["headers"]
    assert json.loads(only["body"])["error"]["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize(
    "messages",
    [
        (EVENTS, body(b"data: 1\n\n"), body(b"data: [DONE]\n\n", more=False)),
        (JSON, body(b"{}", more=False)),
        (JSON, body(b"half of something that is not ours")),  # a length was promised: only the server may break it
    ],
)
async def test_everything_else_passes_as_it_is(messages: tuple[dict[str, Any], ...]) -> None:
    assert await through(*messages) == [*messages]


def said(status: int, data: bytes, *headers: tuple[bytes, bytes], kind: bytes = b"text/plain; charset=utf-8") -> tuple[dict[str, Any], ...]:
    """As ray.serve._private.http_util.convert_object_to_asgi_messages has it, behind Serve's own middleware."""
    start = {"type": "http.response.start", "status": status, "headers": [[b"content-type", kind], *headers]}
    return start, {"type": "http.response.body", "body": data}


@pytest.mark.parametrize("status", [404, 408, 429, 500, 503])
async def test_what_serve_says_itself_is_an_error_body_in_the_dialect_of_the_route(status: int) -> None:
    say = "Request 7 timed out after Nones."
    words = said(status, say.encode(), (b"retry-after", b"3"), (b"X-Request-ID", b"7"))
    for path, theirs in (("/v1/completions", status), ("/v1/messages", {503: 529}.get(status, status)), ("/generate_stream", None)):
        start, only = await through(*words, path=path)
        expected = routes.shaped(errors.error_reply(status, TIMED_OUT if status == 408 else say), path)
        assert (start["status"], json.loads(only["body"])) == expected[:2] and theirs in (None, start["status"])
        headers = {name.lower(): value for name, value in start["headers"]}
        assert headers[b"content-type"] == b"application/json" and headers[b"content-length"] == str(len(only["body"])).encode()
        assert headers[b"x-request-id"] == b"7" and headers[b"retry-after"] == b"3"


@pytest.mark.parametrize(
    "messages",
    [
        said(404, b"no", (b"content-length", b"2")),  # Starlette's, of another application
        (said(503, b"")[0], body(b"so "), body(b"it goes", more=False)),
        said(200, b"ok"),
        said(403, b"<p>no</p>", kind=b"text/html"),
    ],
)
async def test_what_other_applications_say_passes_as_it_is(messages: tuple[dict[str, Any], ...]) -> None:
    assert await through(*messages) == [*messages]


async def test_a_proxy_that_fails_says_so_in_json(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/begun":
            await send(JSON)
        raise ValueError("secret")

    out: list[Any] = []

    async def send(message: Any) -> None:
        out.append(message)

    head = {"type": "http", "method": "POST", "headers": ()}
    await Ending(app)({**head, "path": "/v1/messages"}, None, send)  # type: ignore[arg-type]
    assert out[0]["status"] == 500 and json.loads(out[1]["body"])["error"]["type"] == "api_error"
    assert b"secret" not in out[1]["body"] and "secret" in caplog.text
    with pytest.raises(ValueError, match="secret"):
        await Ending(app)({**head, "path": "/begun"}, None, send)  # type: ignore[arg-type]


async def test_headers_are_what_serve_can_read() -> None:
    """It decodes some of them as UTF-8, and fails where they are not."""
    seen: list[Any] = []
    given = [(b"x-session-id", b"\xff"), (b"x-request-timeout-seconds", b"\xe9"), (b"authorization", "Bearer ä".encode()), (b"a", b"b")]
    await through(JSON, body(b"{}", more=False), headers=given, seen=seen)
    assert seen == [(b"x-session-id", "ÿ".encode()), (b"x-request-timeout-seconds", "é".encode()), *given[2:]]


async def test_websockets_are_left_alone() -> None:
    assert await through(kind="websocket") == []


def test_serve_finds_it_where_the_profile_says() -> None:
    from ray.serve._private.http_util import validate_http_proxy_callback_return
    from ray.serve._private.utils import call_function_from_import_path

    path = profile_env("plain")["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    assert [m.cls.__name__ for m in validate_http_proxy_callback_return(call_function_from_import_path(path))] == ["Readiness", "Ending"]


@pytest.mark.parametrize(("given", "passed"), [(b"mine-1", b"mine-1"), (b"x" * 1_000_000, b"x" * 256), (b"a\tb", b"a_b"), (b"", b"_")])
async def test_a_request_id_is_cut_before_serve_logs_and_echoes_it(given: bytes, passed: bytes) -> None:
    seen: list[Any] = []
    other = (b"x-other", b"y" * 1000)
    await through(JSON, body(b"{}", more=False), headers=[(b"x-request-id", given), other], seen=seen)
    assert seen == [(b"x-request-id", passed), other]


def test_deployment_files_say_what_the_profile_says() -> None:
    """So that a bare `serve run` has it too."""
    for path in sorted((Path(__file__).parents[2] / "deployments").glob("*.yaml")):
        said = yaml.safe_load(path.read_text())["controller_options"]["runtime_env"]["env_vars"]
        assert said and said.items() <= profile_env("plain").items(), path
        assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in said
