"""A small random model behind the whole server in this process: the real engine, runner and kernels, ASGI without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rayneuron.serve.ingress import application
from rayneuron.serve.replica import Replica
from tests.serve.scripted import PATIENCE_S

HEALTHY = 8


class Server:
    """One Replica and its ASGI application."""

    def __init__(self, server: Replica) -> None:
        self.server = server
        self.app = application(server)
        self.said: dict[str, str] = {}  # headers of the last reply

    async def post(
        self, path: str, body: bytes, each: Callable[[bytes], None] = lambda part: None, method: str = "POST"
    ) -> tuple[int, bytes]:  # fmt: skip
        """Status and body of one call; `each` sees every part as it comes."""
        status, parts, sent = 0, [], False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # a client that stays
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.said = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                parts.append(message.get("body", b""))
                each(parts[-1])

        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "root_path": "", "scheme": "http", "query_string": query.encode(), "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        await asyncio.wait_for(self.app(scope, receive, send), PATIENCE_S * 5)
        return status, b"".join(parts)

    async def stream(self, number: int, tokens: int = 60, each: Callable[[bytes], None] = lambda part: None) -> str:
        """The text of one healthy stream; half of them greedy, half drawn with a seed."""
        body = {"prompt": f"stream {number}", "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": number, "top_k": 20}
        body |= {"temperature": 0 if number % 2 else 1, "logprobs": number % 3 or None, "stream_options": {"include_usage": True}}
        status, reply = await self.post("/v1/completions", json.dumps(body).encode(), each)
        events = [line.removeprefix(b"data: ") for line in reply.split(b"\n") if line]
        assert status == 200 and events[-1] == b"[DONE]" and b'"error"' not in reply, reply
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[-1]["usage"]["completion_tokens"] == tokens
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    async def settle(self) -> None:
        """Assert that the engine lives and everything returns to its baseline."""
        engine, flights = self.server.served.opened.engine, self.server.served.flights
        async with asyncio.timeout(PATIENCE_S):
            while engine.has_work or self.server.served.engine.pending() or len(flights):  # whose last words are under way
                await asyncio.sleep(0.001)
        self.server.check_health()
        engine.check_ledger()
        load = self.server.load()
        assert (load.calls, load.sequences, flights.waiting_tokens, len(flights.by_request)) == (0, 0, 0, 0)
        snapshot = load.snapshot
        assert (snapshot.running, snapshot.waiting, snapshot.waiting_tokens, snapshot.kv_tokens_used) == (0, 0, 0, 0)
        assert snapshot.slots_free == snapshot.slots_total


@contextlib.asynccontextmanager
async def serving(path: Path, **config: Any) -> AsyncIterator[Server]:
    """The model of `path`, served."""
    words = {"model": {"path": str(path), "name": "tiny"}, "dtype": "fp32", "threads": 1, "limits": {"max_waiting": 4000}}
    server = Replica({**words, **config})
    await server.open()
    try:
        yield Server(server)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def beside(server: Server) -> AsyncIterator[list[int]]:
    """Healthy streams, over and over; every text must be that of the stream's solo run. Yields how often each has come to its end."""
    alone = [await server.stream(number) for number in range(HEALTHY)]
    rounds, over = [0] * HEALTHY, False

    async def again(number: int) -> None:
        while not (over and rounds[number]):
            assert await server.stream(number) == alone[number]
            rounds[number] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(HEALTHY):
            group.create_task(again(number))
        yield rounds
        over = True
