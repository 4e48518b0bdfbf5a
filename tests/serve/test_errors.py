"""What goes wrong before, at and after the first token; every refusal is an OpenAI error object."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayneuron.errors import NotReady
from rayneuron.serve.ingress import application
from tests.serve.scripted import PATIENCE_S, Site, eventually, site, sse
from tests.serve.wire import Wire

GO = {"model": "scripted", "prompt": "go on", "max_tokens": 8}
PATHS = ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize")


def error(reply: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    """The error object of a reply, its shape checked."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status and body["error"]["type"] == kind and body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000])
def test_bad_json(client: httpx.Client, path: str, body: bytes) -> None:
    error(client.post(path, content=body, headers={"content-type": "application/json"}), 400, "BadRequestError")


def test_a_mark_before_utf_8_says_nothing(client: httpx.Client) -> None:
    body = b"\xef\xbb\xbf" + json.dumps(GO).encode()
    assert client.post("/v1/completions", content=body, headers={"content-type": "application/json"}).status_code == 200


def test_an_empty_body_is_called_so(client: httpx.Client) -> None:
    for body in (b"", b" \n"):
        reply = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert error(reply, 400, "BadRequestError")["message"] == "the body is not valid JSON: it is empty"


@pytest.mark.parametrize("path", PATHS)
def test_wrong_content_type(client: httpx.Client, path: str) -> None:
    reply = client.post(path, content=b"prompt=hi", headers={"content-type": "application/x-www-form-urlencoded"})
    assert "application/json" in error(reply, 415, "UnsupportedMediaTypeError")["message"]
    for encoding in ("gzip", "deflate", "br", "identity, gzip"):
        reply = client.post(path, content=gzip.compress(b'{"prompt": "hi"}'), headers={"content-encoding": encoding})
        wrong = error(reply, 415, "UnsupportedMediaTypeError")
        assert wrong["param"] == "content-encoding" and encoding in wrong["message"]
    reply = client.post("/v1/completions", json=GO, headers={"content-encoding": "identity"})
    assert reply.status_code == 200
    reply = client.post("/v1/completions", content=json.dumps(GO), headers={"content-type": "application/json; charset=utf-8"})
    assert reply.status_code == 200


def test_unknown_paths_and_methods(client: httpx.Client) -> None:
    assert "/v1/nothing" in error(client.get("/v1/nothing"), 404, "NotFoundError")["message"]
    error(client.get("/v1/models/"), 404, "NotFoundError")
    for path in PATHS:
        reply = client.get(path)
        error(reply, 405, "MethodNotAllowedError")
        assert reply.headers["allow"] == "POST"
    error(client.post("/v1/models", json={}), 405, "MethodNotAllowedError")
    error(client.delete("/health"), 405, "MethodNotAllowedError")
    assert error(client.get("/v1/completions"), 405, "MethodNotAllowedError")["message"].endswith("; send POST")
    for path, meant in (
        *(("/chat/completions", "/v1/chat/completions"), ("/v1/v1/chat/completions", "/v1/chat/completions")),
        *(("/v1/chat/completions/chat/completions", "/v1/chat/completions"), ("/v1/completions/", "/v1/completions")),
        ("/healthz", "/health"),
    ):
        assert error(client.post(path, json={}), 404, "NotFoundError")["message"] == f"no such path: {path}; there is {meant}"
    assert error(client.get("/v1/files"), 404, "NotFoundError")["message"] == "no such path: /v1/files"
    assert client.get("/v1/messages/batches").json()["type"] == "error"


async def _under_a_prefix(site: Site, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(application(site.server), root_path="/m/x")
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as http:
        return await http.get(path)


def test_a_bare_route_prefix_leads_to_the_page(scripted_site: Site) -> None:
    reply = asyncio.run(_under_a_prefix(scripted_site, "/m/x"))
    assert (reply.status_code, reply.headers["location"]) == (307, "/m/x/")
    error(asyncio.run(_under_a_prefix(scripted_site, "/m/x/nothing")), 404, "NotFoundError")
    assert asyncio.run(_under_a_prefix(scripted_site, "/m/x/version")).status_code == 200


def test_unknown_model(client: httpx.Client) -> None:
    assert error(client.post("/v1/completions", json=GO | {"model": "other"}), 404, "NotFoundError")["param"] == "model"
    error(client.get("/v1/models/other/name"), 404, "NotFoundError")


def test_the_body_limit(tiny: Path) -> None:
    with site(tiny, {"limits": {"max_body_bytes": 2048}}) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        error(http.post("/v1/completions", json=GO | {"prompt": "x" * 3000}), 413, "RequestTooLargeError")

        def chunks() -> Iterator[bytes]:
            for _ in range(30):
                yield b" " * 100

        error(http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"}), 413, "RequestTooLargeError")
        assert http.post("/v1/completions", json=GO | {"prompt": "x" * 100}).status_code == 200
        wire = Wire(running)  # a declared length alone is enough; nothing has been sent yet
        wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999999\r\n\r\n")
        assert wire.read_until(b"\r\n").startswith(b"HTTP/1.1 413 ")
        wire.close()
        running.settle()


def test_a_body_that_does_not_come_is_a_408_and_the_connection_ends(tiny: Path) -> None:
    with site(tiny, {"limits": {"body_timeout_s": 0.3}}) as running:
        for path in PATHS:
            wire = Wire(running)
            wire.send(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode() + b'{"prompt": "h')
            got = wire.read_until(b"}}")
            assert got.startswith(b"HTTP/1.1 408 ") and b"connection: close" in got.lower() and b"RequestTimeoutError" in got
            with pytest.raises(EOFError):
                wire.read_until(b"never")
        running.settle()


async def test_a_body_whose_proxy_has_forgotten_it_is_a_client_that_has_gone(scripted_site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Behind Serve's proxy `receive` is a call to another process, which raises where the client left or the proxy died."""
    sent: list[Any] = []

    async def receive() -> Any:
        raise KeyError("Request ID not found")

    async def send(message: Any) -> None:
        sent.append(message)

    head = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "root_path": "", "headers": []}
    with caplog.at_level(logging.INFO, "rayneuron"):
        await application(scripted_site.server)(head, receive, send)
    assert sent == [] and [r.levelname for r in caplog.records] == ["INFO"] and "the client has gone" in caplog.text
    counted = [line for line in httpx.get(f"{scripted_site.url}/metrics").text.splitlines() if '"/v1/completions"' in line]
    assert any('"499"' in line for line in counted), counted


def test_pages_of_other_origins(tiny: Path, client: httpx.Client) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert client.options("/v1/completions", headers=ask).status_code == 405, "nobody is let in by default"
    assert "access-control-allow-origin" not in client.get("/version", headers=ask).headers
    for origins, allowed in ((["*"], "*"), (["https://a.example"], "https://a.example")):
        with site(tiny, {"serving": {"allowed_origins": origins, "api_keys": [f"sha256:{hashlib.sha256(b'k').hexdigest()}"]}}) as running:
            reply = httpx.options(f"{running.url}/v1/completions", headers=ask)
            assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == allowed
            reply = httpx.post(f"{running.url}/v1/completions", json=GO, headers={"origin": "https://a.example"})
            assert reply.status_code == 401 and reply.headers["access-control-allow-origin"] == allowed, "a page may read why"
            if allowed != "*":
                assert httpx.options(f"{running.url}/v1/completions", headers=ask | {"origin": "https://b.example"}).status_code == 400


def test_too_long(client: httpx.Client) -> None:
    """The scripted model holds 256 tokens."""
    wrong = error(client.post("/v1/completions", json=GO | {"prompt": [9] * 300}), 400, "BadRequestError")
    assert "300" in wrong["message"] and "256" in wrong["message"]
    wrong = error(client.post("/v1/completions", json=GO | {"max_tokens": 999}), 400, "BadRequestError")
    assert "999" in wrong["message"] and "256" in wrong["message"]


@pytest.mark.parametrize("ids", [[-1], [512], [9, 10**9], [2**63], [True], [1.5]])
def test_token_ids_outside_the_vocabulary(client: httpx.Client, ids: list[Any]) -> None:
    assert error(client.post("/v1/completions", json=GO | {"prompt": ids}), 400, "BadRequestError")["param"] == "prompt"


@pytest.mark.parametrize("stream", [True, False])
def test_a_step_that_fails_at_the_first_token_is_a_503(tiny: Path, stream: bool) -> None:
    with site(tiny) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        reply = http.post("/v1/completions", json=GO | {"prompt": "boom:0:", "stream": stream})
        error(reply, 503, "ServiceUnavailableError")
        assert int(reply.headers["retry-after"]) >= 1
        eventually(lambda: http.get("/health").status_code == 503, PATIENCE_S)
        refused = http.post("/v1/completions", json=GO)
        error(refused, 503, "ServiceUnavailableError")
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(Exception, match="scripted step fails"):
            running.call(running.server.check_health)
        assert not any(value for key, value in running.idle().items() if key in ("calls", "sequences", "registered"))


def test_a_step_that_fails_later_is_an_error_event(tiny: Path) -> None:
    with site(tiny) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        reply = http.post("/v1/completions", json=GO | {"prompt": "boom:3:", "stream": True})
        assert reply.status_code == 200
        events = sse(reply.text.split("\n"))
        assert events[-1] == "[DONE]"
        assert len("".join(json.loads(event)["choices"][0]["text"] for event in events[:-2])) == 3  # what was generated before is not lost
        wrong = json.loads(events[-2])["error"]
        assert "scripted" not in wrong["message"]
        assert wrong["code"] == 503 and wrong["type"] == "ServiceUnavailableError"
        unary = http.post("/v1/completions", json=GO)
        error(unary, 503, "ServiceUnavailableError")


def test_a_step_that_fails_later_is_a_503_for_a_unary_call(tiny: Path) -> None:
    with site(tiny) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        error(http.post("/v1/completions", json=GO | {"prompt": "boom:3:"}), 503, "ServiceUnavailableError")


def test_the_time_limit(tiny: Path) -> None:
    """The server's own is far off, so whatever ends here was ended by the header."""
    with site(tiny, {"limits": {"request_timeout_s": 600.0}}) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        running.runner.hold()
        for stream in (True, False):
            reply = http.post("/v1/completions", json=GO | {"stream": stream}, headers={"x-request-timeout-seconds": "0.3"})
            error(reply, 408, "RequestTimeoutError")
        running.runner.allow(1)  # the step that waits since then
        for limit_s in (0.3, 3.0, 30.0):  # on a slow machine the first token is later than the least of them, and that is a 408 too
            running.runner.allow(1)  # one that brings the first token; the limit ends the rest
            limited = {"x-request-timeout-seconds": str(limit_s)}
            with http.stream("POST", "/v1/completions", json=GO | {"stream": True}, headers=limited) as reply:
                reply.read()
            if reply.status_code == 200:
                break
            error(reply, 408, "RequestTimeoutError")
        events = sse(reply.text.split("\n"))
        assert reply.status_code == 200 and events[-1] == "[DONE]" and json.loads(events[-2])["error"]["code"] == 408
        wrong = error(http.post("/v1/completions", json=GO, headers={"x-request-timeout-seconds": "soon"}), 400, "BadRequestError")
        assert wrong["param"] == "x-request-timeout-seconds"
        running.runner.free()
        running.settle()
        assert http.post("/v1/completions", json=GO, headers={"x-request-timeout-seconds": "-1"}).status_code == 200


def test_the_keys(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RN_TEST_KEY", "s3cret")
    (tmp_path / "keys").write_text("schlüssel\n")
    serving = {"serving": {"api_keys": ["env:RN_TEST_KEY", f"file:{tmp_path / 'keys'}"]}}
    caplog.set_level(logging.DEBUG)
    with site(tiny, serving) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic s3cret"}):
            error(http.post("/v1/completions", json=GO, headers=headers), 401, "AuthenticationError")
            error(http.get("/v1/models", headers=headers), 401, "AuthenticationError")
            error(http.post("/generate", json=GO, headers=headers), 401, "AuthenticationError")
            assert http.get("/health", headers=headers).status_code == 200
            assert http.get("/metrics", headers=headers).status_code == 200
        assert http.post("/v1/completions", json=GO, headers={"authorization": "Bearer s3cret"}).status_code == 200
        second = {"authorization": "Bearer schlüssel".encode()}
        assert http.post("/v1/completions", json=GO, headers=second).status_code == 200
        assert "s3cret" not in repr(vars(running.server)) + caplog.text


def test_names(tiny: Path) -> None:
    """Every name a model has is answered and listed, any other is a 404; with `any_name` none is."""
    model = {"model": {"path": str(tiny), "name": "big", "aliases": ["gpt-4"]}}
    with site(tiny, model) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        for name in ("big", "gpt-4"):
            assert http.post("/v1/completions", json=GO | {"model": name}).json()["model"] == name
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["big", "gpt-4"]
        error(http.post("/v1/completions", json=GO | {"model": "dummy"}), 404, "NotFoundError")
    with site(tiny, {"model": {**model["model"], "any_name": True}}) as running, httpx.Client(base_url=running.url) as http:
        assert http.post("/v1/completions", json=GO | {"model": "dummy"}).json()["model"] == "dummy"
        assert http.get("/v1/models/dummy").json()["id"] == "dummy"
        error(http.post("/v1/completions", json=GO | {"model": "x" * 257}), 404, "NotFoundError")


def test_an_empty_key_is_fine_where_none_is_wanted(scripted_site: Site) -> None:
    """lm-eval sends the header without a key; httpx refuses to."""
    wire = Wire(scripted_site)
    wire.post("/v1/completions", GO, authorization="Bearer ")
    assert wire.read_until(b"\r\n").startswith(b"HTTP/1.1 200")
    wire.close()


def test_request_ids(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rayneuron"):
        reply = client.post("/v1/completions", json=GO | {"prompt": "a secret prompt"}, headers={"x-request-id": "abc-123"})
        assert reply.headers.get_list("x-request-id") == ["abc-123"]
        eventually(lambda: "abc-123" in caplog.text, PATIENCE_S)
    assert "secret" not in caplog.text and "complete" in caplog.text
    own = client.post("/v1/completions", json=GO).headers["x-request-id"]
    assert len(own) >= 16
    wrong = client.post("/v1/completions", json={}, headers={"x-request-id": "abc-124"})
    assert wrong.status_code == 400 and wrong.headers["x-request-id"] == "abc-124"


def test_two_calls_with_one_client_id_do_not_mix(client: httpx.Client) -> None:
    import concurrent.futures

    def ask(word: str) -> str:
        body = {"model": "scripted", "prompt": f"say:{word}", "max_tokens": 30}
        return client.post("/v1/completions", json=body, headers={"x-request-id": "same"}).json()["choices"][0]["text"]

    words = [f"word {i}" for i in range(16)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, words)) == words


def test_draining(tiny: Path) -> None:
    """New work is turned away with 503 and Retry-After, running work finishes."""
    with site(tiny) as running, httpx.Client(base_url=running.url, timeout=PATIENCE_S) as http:
        running.runner.hold()
        wire = Wire(running)
        wire.post("/v1/completions", GO | {"stream": True})
        eventually(lambda: running.server.served.flights.sequences == 1, PATIENCE_S)
        running.await_(running.server.drain())
        for reply in (http.post("/v1/completions", json=GO), http.get("/health"), http.post("/ping")):
            error(reply, 503, "ServiceUnavailableError")
            assert reply.headers["retry-after"] == "1"
        running.runner.free()
        assert b"[DONE]" in wire.read_until(b"[DONE]")
        wire.close()
        running.settle()


def test_draining_for_so_long(tiny: Path) -> None:
    """What ends by itself does, what does not ends with an event, and who asks meanwhile gets 503."""
    with site(tiny) as running:
        running.runner.hold()
        short, long = Wire(running), Wire(running)
        short.post("/v1/completions", GO | {"stream": True, "max_tokens": 3})
        long.post("/v1/completions", GO | {"stream": True, "max_tokens": 200, "ignore_eos": True})
        eventually(lambda: running.server.served.flights.sequences == 2, PATIENCE_S)
        draining = asyncio.run_coroutine_threadsafe(running.server.drain(2.0), running._loop)
        eventually(lambda: running.server.state == "leaving", PATIENCE_S)
        assert error(httpx.get(f"{running.url}/health"), 503, "ServiceUnavailableError")
        assert httpx.post(f"{running.url}/v1/completions", json=GO).headers["retry-after"] == "1"
        running.runner.allow(6)
        assert b"[DONE]" in short.read_until(b"[DONE]")
        ended = long.read_until(b"[DONE]")
        assert b'"code":503' in ended and b"shutting down" in ended
        draining.result(PATIENCE_S)
        running.runner.free()
        running.settle()


def test_closing_ends_what_is_left_with_an_error(tiny: Path) -> None:
    with site(tiny) as running:
        running.runner.hold()
        running.runner.allow(1)
        wire = Wire(running)
        wire.post("/v1/completions", GO | {"stream": True})
        wire.read_until(b"data: ")
        running.call(lambda: running.server.served.flights.fail_all(NotReady("the server is shutting down")))
        rest = wire.read_until(b"[DONE]")
        assert b'"code":503' in rest
        wire.close()
