"""Half-open connections: a head that does not come, or does not end; over real sockets, with uvicorn as Serve's proxy runs it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from rayneuron.serve import connection
from rayneuron.serve.ending import middlewares
from tests.serve.scripted import PATIENCE_S, eventually

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body; that of /deaf is never read, the answer of /slow never ends."""
    if scope["path"] == "/slow":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await receive()
    if scope["path"] == "/parts":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"two", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})
        return
    body = b"" if scope["path"] == "/deaf" else (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    middlewares()  # what Serve calls before its proxy listens
    monkeypatch.setattr(connection, "HEAD_S", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(echo, lifespan="off", log_level="critical", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    eventually(lambda: server.started, PATIENCE_S)
    yield listener.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(PATIENCE_S)


ROOTED = [("/x", "/api/x"), ("/api/x?a", "/api/x"), ("/api", "/api/"), ("/apix", "/api/apix"), ("/api?a", "/api/")]


@pytest.mark.parametrize(("asked", "path"), ROOTED)
def test_a_root_path_is_there_once_whether_a_proxy_took_it_off_or_not(asked: str, path: str) -> None:
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told.extend((scope["path"], scope["root_path"]))

    made = uvicorn.Config(app, http=connection.Connection, root_path="/api", lifespan="off", log_level="critical")

    async def once() -> None:
        made.load()
        listener = await asyncio.get_running_loop().create_server(
            lambda: connection.Connection(made, uvicorn.server.ServerState(), {}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.write(f"GET {asked} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await reader.read(1)
        writer.close()
        listener.close()

    asyncio.run(once())
    assert told == [path, "/api"]


def opened(port: int, data: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    client.sendall(data)
    return client


def rest(client: socket.socket) -> bytes:
    """Everything until the server closes."""
    got = b""
    with client:
        while data := client.recv(65536):
            got += data
    return got


def told(got: bytes) -> Any:
    """The JSON of a whole answer, behind which the connection was closed."""
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head and b"content-length: %d" % len(body) in head and b"connection: close" in head, got
    return json.loads(body)


def test_three_hundred_half_open_connections_are_closed(port: int) -> None:
    idle = [opened(port) for _ in range(100)]
    begun = [opened(port, HEAD[:20]) for _ in range(100)]
    later = [opened(port, HEAD + b"\r\nword") for _ in range(100)]
    for client in later:
        got = b""
        while not got.endswith(b"word"):  # the answer may come in parts
            got += (part := client.recv(65536))
            assert part, got
        client.sendall(HEAD)  # and then half a head
    assert {rest(client) for client in idle} == {b""}
    for got in map(rest, begun + later):
        assert got.startswith(b"HTTP/1.1 408 ") and "did not arrive" in str(told(got))


def test_a_head_without_end_is_refused(port: int) -> None:
    client = opened(port, HEAD)
    client.settimeout(PATIENCE_S)
    with pytest.raises((ConnectionError, AssertionError)):  # whichever comes first: the reset, or the answer
        for number in range(64):
            client.sendall(b"x-%d: " % number + b"y" * 8192 + b"\r\n")
        raise AssertionError
    client = opened(port, HEAD + b"x: " + b"y" * (connection.HEAD_BYTES + 1))
    got = rest(client)
    assert got.startswith(b"HTTP/1.1 431 ") and "65536 bytes" in told(got)["error"]
    whole = opened(port, HEAD[:-21] + b"x: " + b"y" * connection.HEAD_BYTES + b"\r\ncontent-length: 4\r\n\r\nword")
    assert rest(whole).startswith(b"HTTP/1.1 431 ")  # however it comes
    long = opened(port, b"GET /" + b"y" * (connection.HEAD_BYTES + 100) + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert rest(long).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("nonsense", [
    b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"FOO / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n", HEAD[:-3] + b"x\r\n\r\n", HEAD + b"no colon\r\n\r\n", HEAD + b"transfer-encoding: chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
])  # fmt: skip
def test_what_is_no_http_is_told_so_in_json(port: int, nonsense: bytes) -> None:
    got = rest(opened(port, nonsense))
    assert got.startswith(b"HTTP/1.1 400 ") and "not valid HTTP" in str(told(got)), got
    if b" / " not in nonsense:
        assert told(got)["error"]["type"] == "BadRequestError"


def test_it_is_told_so_in_the_dialect_of_the_path(port: int) -> None:
    got = rest(opened(port, b"POST /v1/messages?beta=true HTTP/1.1\r\nno colon\r\n\r\n"))
    assert told(got) == {"type": "error", "error": {"type": "invalid_request_error", "message": "this is not valid HTTP/1.1"}}


def test_nonsense_behind_a_request_is_not_written_into_its_answer(port: int) -> None:
    client = opened(port, b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na")
    assert client.recv(65536).endswith(b"begun")
    client.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
    assert b"HTTP/1.1" not in rest(client)


def test_http_1_0_knows_no_chunks(port: int) -> None:
    """An answer without a length ends where the connection does; one with a length has it."""
    head, _, body = rest(opened(port, b"GET /parts HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head and body == b"onetwo"
    assert b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n" in rest(opened(port, b"GET /parts HTTP/1.1\r\nconnection: close\r\n\r\n"))
    assert rest(opened(port, HEAD.replace(b"1.1", b"1.0") + b"\r\nword")).endswith(b"content-length: 4\r\nconnection: close\r\n\r\nword")


@pytest.mark.parametrize("word", [b"h2c", b"h2c, foo", b"TLS/1.0"])
def test_an_offer_of_http_2_costs_nobody_its_body(port: int, word: bytes) -> None:
    """Java's HttpClient and `curl --http2` make one with their first request; whoever does not take it up answers in HTTP/1.1."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABkAAQ\r\n\r\n" % word
    client = opened(port, HEAD + offer + b"word")
    assert client.recv(65536).endswith(b"\r\n\r\nword")
    client.sendall(HEAD + b"\r\n")
    time.sleep(0.05)  # a body apart from its head
    client.sendall(b"more")
    assert client.recv(65536).endswith(b"more"), "the connection is kept"


def test_whole_requests_are_left_alone(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", PATIENCE_S)
    client = opened(port)
    for data in (HEAD[:9], HEAD[9:] + b"\r\n", b"word"):
        client.sendall(data)
    assert client.recv(65536).endswith(b"word")
    client.sendall(HEAD + b"\r\nmore")
    assert client.recv(65536).endswith(b"more"), "the connection is kept"
    big = opened(port, b"POST /deaf HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    assert b"200 OK" in big.recv(65536)
    big.sendall(b"y" * 1_000_000)  # a body that was answered early is no head
    big.sendall(HEAD + b"\r\nlast")
    assert big.recv(65536).endswith(b"last")
