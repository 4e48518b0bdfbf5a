"""What Serve's proxy says to a client whose replica has died, by the ASGI messages that reach the server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayneuron.serve.ending import middlewares
from rayneuron.serve.profile import profile_env

EVENTS = {"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"text/event-stream; charset=utf-8")]}
JSON = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}


def body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def through(*messages: dict[str, Any], kind: str = "http") -> list[dict[str, Any]]:
    """What comes out where an application sends these messages and returns."""
    out: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async def send(message: Any) -> None:
        out.append(message)

    (only,) = middlewares()
    await only.cls(app, *only.args, **only.kwargs)({"type": kind}, None, send)  # type: ignore[arg-type]
    return out


async def test_a_stream_that_is_cut_off_gets_an_error_event() -> None:
    first = (EVENTS, body(b"data: 1\n\n"))
    *passed, last = await through(*first)
    assert passed == [*first] and not last.get("more_body")
    error, done, _ = last["body"].decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500 and done == "data: [DONE]"


async def test_an_answer_that_never_began_is_an_error_body() -> None:
    start, only = await through()
    assert start["status"] == 500 and (b"retry-after", b"5") in start["headers"]
    assert json.loads(only["body"])["error"]["type"] == "InternalServerError"


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


async def test_websockets_are_left_alone() -> None:
    assert await through(kind="websocket") == []


def test_serve_finds_it_where_the_profile_says() -> None:
    from ray.serve._private.http_util import validate_http_proxy_callback_return
    from ray.serve._private.utils import call_function_from_import_path

    path = profile_env("plain")["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    assert [m.cls.__name__ for m in validate_http_proxy_callback_return(call_function_from_import_path(path))] == ["Ending"]
