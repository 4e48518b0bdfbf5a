"""The load client against a fake server: event splits, keep-alive, failures; and the arithmetic of its summary."""

from __future__ import annotations

import asyncio
import json

import client
import pytest
from client import Connection, Load, Reply
from fake_http import STREAM, Fake, Handler, chunk, event


def streaming(cuts: int = 0, stay: bool = True) -> Handler:
    """Stream STREAM, in pieces of `cuts` bytes (0: one piece an event)."""

    async def handler(method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        assert (method, path) == ("POST", "/v1/completions") and json.loads(body)["stream"] is True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        whole = b"".join(STREAM)
        for piece in [whole[i : i + cuts] for i in range(0, len(whole), cuts)] if cuts else STREAM:
            writer.write(chunk(piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return stay

    return handler


@pytest.mark.parametrize("cuts", [0, 1, 2, 7, 1000])
async def test_a_stream_cut_anywhere(cuts: int) -> None:
    async with Fake(streaming(cuts)) as fake:
        connection = Connection(fake.url)
        reply = await client.complete(connection, "/v1/completions", {"prompt": "x"})
        connection.close()
    assert reply.error == ""
    assert (reply.tokens, reply.prompt_tokens, len(reply.stamps)) == (3, 7, 2), "an event without text is no token on the screen"
    assert reply.sent_s <= reply.stamps[0] <= reply.stamps[1] <= reply.ended_s


async def test_closed_loop_sends_everything_once_and_keeps_connections() -> None:
    seen: list[int] = []

    async def handler(method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        seen.append(json.loads(body)["prompt"])
        return await streaming()(method, path, body, writer)

    async with Fake(handler) as fake:
        load = await client.closed_loop(fake.url, "/v1/completions", [{"prompt": i} for i in range(12)], clients=3)
        assert fake.connections == 3
    assert sorted(seen) == list(range(12)) and [r.error for r in load.replies] == [""] * 12


async def test_a_server_that_closes_idle_connections_is_no_failure() -> None:
    async with Fake(streaming(stay=False)) as fake:
        load = await client.closed_loop(fake.url, "/v1/completions", [{"prompt": i} for i in range(4)], clients=1)
        assert fake.connections == 4
    assert [r.error for r in load.replies] == [""] * 4


async def test_a_refusal_is_counted_with_its_body() -> None:
    async def handler(method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\nqueue big")
        return True

    async with Fake(handler) as fake:
        load = await client.closed_loop(fake.url, "/v1/completions", [{"prompt": 1}], clients=1)
    assert load.replies[0].status == 429 and "queue big" in load.replies[0].error
    summary = client.summary([load])
    assert (summary["failed"], summary["requests"], summary["output_tok_s"]) == (1, 0, [0.0])


@pytest.mark.parametrize(
    ("pieces", "finding"),
    [
        ([event("Hi"), b'data: {"error": {"message": "out of memory"}}\n\n'], "out of memory"),
        ([event("Hi")], "without text or usage"),
        ([event("", {"completion_tokens": 3})], "without text or usage"),
    ],
)
async def test_a_broken_stream_is_a_failure(pieces: list[bytes], finding: str) -> None:
    async def handler(method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, pieces)) + b"0\r\n\r\n")
        return True

    async with Fake(handler) as fake:
        load = await client.closed_loop(fake.url, "/v1/completions", [{"prompt": 1}], clients=1)
    assert finding in load.replies[0].error


async def test_a_stream_that_breaks_off_is_a_failure() -> None:
    async def handler(method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(event("Hi")) + b"40\r\nhalf")
        return False

    async with Fake(handler) as fake:
        load = await client.closed_loop(fake.url, "/v1/completions", [{"prompt": 1}], clients=1)
    assert "IncompleteReadError" in load.replies[0].error


async def test_fetch() -> None:
    async def handler(method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" if path == "/health" else b"nonsense\r\n\r\n")
        return False

    async with Fake(handler) as fake:
        assert await client.fetch(fake.url, "/health") == (200, b"ok")
        with pytest.raises(ConnectionError, match="not an HTTP reply"):
            await client.fetch(fake.url, "/other")
        url = fake.url
    with pytest.raises(OSError):
        await client.fetch(url, "/health")


async def test_fetch_does_not_wait_for_ever() -> None:
    async def handler(method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        return True

    async with Fake(handler) as fake:
        with pytest.raises(asyncio.TimeoutError):
            await client.fetch(fake.url, "/health", timeout_s=0.05)


def test_summary_by_hand() -> None:
    first = Reply(sent_s=10.0, stamps=[10.1, 10.2, 10.4], ended_s=10.5, tokens=3)
    second = Reply(sent_s=10.0, stamps=[10.3, 10.35], ended_s=10.5, tokens=5)  # events of several tokens
    lost = Reply(sent_s=10.0, ended_s=10.1, error="ConnectionError: gone")
    summary = client.summary([Load([first, second, lost], wall_s=0.5, client_cpu_s=0.05)])
    assert summary["output_tok_s"] == [16.0]
    assert summary["ttft_ms"]["p50"] == pytest.approx(200.0) and summary["ttft_ms"]["max"] == pytest.approx(300.0)
    assert summary["itl_ms"]["p50"] == pytest.approx(100.0) and summary["itl_ms"]["max"] == pytest.approx(200.0)
    assert summary["tpot_ms"]["p50"] == pytest.approx((150.0 + 12.5) / 2)
    assert (summary["tokens"], summary["events"], summary["failed"], summary["errors"]) == (8, 5, 1, ["ConnectionError: gone"])
    assert summary["client_cpu_share"] == pytest.approx(0.1)
