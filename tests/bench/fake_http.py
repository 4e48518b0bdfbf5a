"""A small HTTP/1.1 server whose every byte the test decides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

Handler = Callable[[str, str, bytes, asyncio.StreamWriter], Awaitable[bool]]


class Fake:
    """An HTTP/1.1 server on a free port; `handler` answers and says whether the connection stays open."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections = 0

    async def __aenter__(self) -> Fake:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self.server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        stay = True
        while stay and (line := await reader.readline()):
            method, path, _ = line.decode().split()
            length = 0
            while (header := (await reader.readline()).strip()) != b"":
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            stay = await self.handler(method, path, await reader.readexactly(length), writer)
        writer.close()


def event(text: str, usage: dict | None = None) -> bytes:
    choices = [{"index": 0, "text": text}] if usage is None else []
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


STREAM = [event("Hello"), event(""), event(" wörld"), event("", {"prompt_tokens": 7, "completion_tokens": 3}), b"data: [DONE]\n\n"]
