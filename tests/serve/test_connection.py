"""Half-open connections: a head that does not come, or does not end; over real sockets, with uvicorn as Serve's proxy runs it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from rayneuron.serve import connection
from rayneuron.serve.ending import middlewares
from tests.serve.scripted import PATIENCE_S, eventually

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body; a body `wait` is never read."""
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


def test_three_hundred_half_open_connections_are_closed(port: int) -> None:
    idle = [opened(port) for _ in range(100)]
    begun = [opened(port, HEAD[:20]) for _ in range(100)]
    later = [opened(port, HEAD + b"\r\nword") for _ in range(100)]
    for client in later:
        assert client.recv(65536).endswith(b"word")
        client.sendall(HEAD)  # and then half a head
    assert {rest(client) for client in idle} == {b""}
    assert all(rest(client).startswith(b"HTTP/1.1 408 ") for client in begun + later)


def test_a_head_without_end_is_refused(port: int) -> None:
    client = opened(port, HEAD)
    client.settimeout(PATIENCE_S)
    with pytest.raises((ConnectionError, AssertionError)):  # whichever comes first: the reset, or the answer
        for number in range(64):
            client.sendall(b"x-%d: " % number + b"y" * 8192 + b"\r\n")
        raise AssertionError
    client = opened(port, HEAD + b"x: " + b"y" * (connection.HEAD_BYTES + 1))
    assert rest(client).startswith(b"HTTP/1.1 431 ")


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
