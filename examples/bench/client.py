"""Load from the outside: streamed completions over HTTP/1.1, closed loop, each token stamped when it arrives (standard library only).

Written against bare streams because the client shares the cores with the server it measures; its own share of CPU is reported.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import report

LINE_LIMIT_BYTES = 1 << 20
NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Reply:
    """One request as its client saw it; times in perf_counter seconds. `stamps`: arrival of each event that carried text."""

    sent_s: float
    stamps: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    status: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Sent to first text."""
        return self.stamps[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; nan for a single token."""
        return (self.stamps[-1] - self.stamps[0]) / (self.tokens - 1) if self.tokens > 1 else float("nan")


class Connection:
    """One keep-alive connection. A server may close it while idle, so the first write on a reused one is tried again on a new one."""

    def __init__(self, url: str, headers: Mapping[str, str] = NONE) -> None:
        parts, self._more = urlsplit(url), "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.told: dict[str, str] = {}  # headers of the last reply
        self._host, self._port, self._base = parts.hostname or "127.0.0.1", parts.port or 80, parts.path.rstrip("/")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, AsyncIterator[bytes]]:
        """Status and the pieces of the reply's body."""
        return await self.request("POST", path, json.dumps(body).encode())

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, AsyncIterator[bytes]]:
        """As `post`, any method."""
        head = f"{method} {self._base}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{self._more}\r\n"
        line = await self._first_line(head.encode() + body)
        status, self.told = int(line.split()[1]), await self._headers()
        return status, self._pieces(self.told)

    def close(self) -> None:
        """Drop the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _first_line(self, request: bytes) -> bytes:
        for reused in (self._writer is not None, False):
            if self._writer is None:
                self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=LINE_LIMIT_BYTES)
            assert self._reader is not None
            line = b""
            try:
                self._writer.write(request)
                await self._writer.drain()
                line = await self._reader.readline()
            except ConnectionError:
                if not reused:
                    raise
            if line:
                return line
            self.close()
            if not reused:
                break
        raise ConnectionError("the server closed the connection without an answer")

    async def _headers(self) -> dict[str, str]:
        assert self._reader is not None
        headers = {}
        while (line := (await self._reader.readline()).strip()) != b"":
            name, _, value = line.decode("latin1").partition(":")
            headers[name.lower()] = value.strip().lower()
        return headers

    async def _pieces(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        reader = self._reader
        assert reader is not None
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readline()).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while piece := await reader.read(1 << 16):
                yield piece
            self.close()
        if headers.get("connection") == "close":
            self.close()


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """The JSON of every server-sent event with its time of arrival, up to [DONE]. Raises RuntimeError for an error event."""
    rest = b""
    async for piece in pieces:
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"error event: {event['error']}")
            yield now, event


async def complete(connection: Connection, path: str, body: dict[str, Any]) -> Reply:
    """One streamed completion. What goes wrong is in `error`, so that a failure is counted and never lost."""
    reply = Reply(time.perf_counter())
    try:
        reply.status, pieces = await connection.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        if reply.status != 200:
            raise RuntimeError(b"".join([piece async for piece in pieces]).decode(errors="replace")[:300])
        async for now, event in events(pieces):
            usage = event.get("usage") or {}
            reply.tokens = usage.get("completion_tokens", reply.tokens)
            reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
            if any(_text(choice) for choice in event.get("choices", ())):
                reply.stamps.append(now)
        if not reply.stamps or not reply.tokens:
            raise RuntimeError("the stream ended without text or usage")
    except (OSError, RuntimeError, ValueError, asyncio.IncompleteReadError) as error:
        reply.error = f"{type(error).__name__}: {error}"
        connection.close()
    reply.ended_s = time.perf_counter()
    return reply


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


@dataclass(slots=True)
class Load:
    """All replies of one closed loop, the seconds it took, and the CPU seconds the client itself used."""

    replies: list[Reply]
    wall_s: float
    client_cpu_s: float


async def closed_loop(url: str, path: str, bodies: Iterable[dict[str, Any]], clients: int) -> Load:
    """`clients` clients, each sending the next body when its last reply has ended."""
    queue, replies = iter(bodies), []

    async def client() -> None:
        connection = Connection(url)
        for body in queue:
            replies.append(await complete(connection, path, body))
        connection.close()

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(replies, time.perf_counter() - started, time.process_time() - cpu)


async def fetch(url: str, path: str, timeout_s: float = 5.0, headers: Mapping[str, str] = NONE) -> tuple[int, bytes]:
    """One GET on a connection of its own. Raises OSError or asyncio.TimeoutError where no reply comes."""
    connection = Connection(url, headers)

    async def get() -> tuple[int, bytes]:
        status, pieces = await connection.request("GET", path)
        return status, b"".join([piece async for piece in pieces])

    try:
        return await asyncio.wait_for(get(), timeout_s)
    except (ValueError, IndexError, asyncio.IncompleteReadError) as error:
        raise ConnectionError(f"not an HTTP reply: {error}") from error
    finally:
        connection.close()


def summary(loads: Sequence[Load]) -> dict[str, Any]:
    """Output tokens a second of every load, and percentiles in milliseconds over all replies that succeeded."""
    good = [reply for load in loads for reply in load.replies if not reply.error]
    bad = [reply for load in loads for reply in load.replies if reply.error]
    gaps = [b - a for reply in good for a, b in zip(reply.stamps, reply.stamps[1:], strict=False)]
    return {
        "output_tok_s": [sum(reply.tokens for reply in load.replies if not reply.error) / load.wall_s for load in loads],
        "ttft_ms": report.spread([reply.ttft_s for reply in good], 1e3),
        "itl_ms": report.spread(gaps, 1e3),
        "tpot_ms": report.spread([reply.tpot_s for reply in good if reply.tokens > 1], 1e3),
        "tokens": sum(reply.tokens for reply in good),
        "events": sum(len(reply.stamps) for reply in good),
        "requests": len(good),
        "failed": len(bad),
        "errors": sorted({reply.error for reply in bad})[:5],
        "client_cpu_share": sum(load.client_cpu_s for load in loads) / sum(load.wall_s for load in loads),
    }
