"""A model that says what the test wants: the real engine, scheduler, slots and loop over a runner with chosen token ids.

A prompt that begins with `say:` is answered by the rest of the prompt, token for token, then EOS. `boom:K:` makes the step fail in which
the K-th token would be sampled. Any other prompt is answered by an endless run of letters that depends on the prompt alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn

from rayneuron.config import Deployment
from rayneuron.devices.base import LOGITS, SCORES, Ended, StepOutput
from rayneuron.engine.buckets import capacity
from rayneuron.engine.engine import Engine
from rayneuron.engine.runner import _want
from rayneuron.engine.sequence import Plan
from rayneuron.loading import Opened
from rayneuron.serve.connection import Own
from rayneuron.serve.ingress import application
from rayneuron.serve.replica import Replica
from rayneuron.text.text import Text
from rayneuron.types import Request

LETTERS = "etaoinshrdlcumwfg"
PATIENCE_S = 60.0  # how long a test waits for what will come before it calls it lost; no promise, however busy the machine


class ScriptedRunner:
    """Stands where engine.runner.Runner stands. `pace_s` is how long a step takes."""

    overlaps = False

    def __init__(self, text: Text, rows: int, length: int, chunk: int, pace_s: float) -> None:
        self.capacity = capacity(rows=rows, length=length, chunk=chunk, smallest_context=chunk, smallest=length, block=16)
        self.pace_s = pace_s
        self._gate = threading.Condition()
        self._permits: int | None = None  # steps that may still run; None: all
        self.log: list[tuple[str, list[str]]] = []  # kind of each step and the requests in it
        self.closed = False
        self._say = tuple(text.encode("say:"))
        self._text = text
        self._letters = [text.encode(letter)[0] for letter in LETTERS]
        self._eos = min(text.eos_ids)
        self._vocab = text.vocab_size

    def hold(self) -> None:
        """Let no further step run."""
        with self._gate:
            self._permits = 0

    def allow(self, steps: int) -> None:
        """Let so many more run."""
        with self._gate:
            self._permits = (self._permits or 0) + steps
            self._gate.notify_all()

    def free(self) -> None:
        """Let every step run."""
        with self._gate:
            self._permits = None
            self._gate.notify_all()

    def start(self, plan: Plan) -> Ended:
        return Ended(self._run(plan))

    def _run(self, plan: Plan) -> StepOutput:
        with self._gate:
            self._gate.wait_for(lambda: self._permits is None or self._permits > 0)
            if self._permits is not None:
                self._permits -= 1
        self.log.append((plan.tag, [work.sequence.request.id for work in plan.works]))
        if self.pace_s:
            time.sleep(self.pace_s)
        ids = [self.token(w.sequence.request, w.sequence.index, w.sequence.generated) if w.last else 0 for w in plan.works]
        want = _want(plan)
        chosen = torch.tensor(ids, dtype=torch.int32)[:, None]
        if want == SCORES:
            work = plan.works[0]
            following = work.sequence.ids[work.start + 1 : work.start + work.count + 1]
            targets = [*following, *ids][: work.count]
            return StepOutput(ids=None, logits=torch.stack([self._scores(t) for t in targets])[None])
        if want == LOGITS:
            return StepOutput(
                ids=chosen, complete=torch.ones(len(ids), dtype=torch.bool), logits=torch.stack([self._scores(t) for t in ids])
            )
        return StepOutput(ids=chosen, complete=torch.ones(len(ids), dtype=torch.bool))

    def token(self, request: Request, index: int, place: int) -> int:
        prompt = request.prompt_ids
        head = self._text.decode(prompt[:16])
        if head.startswith("boom:") and place == int(head.split(":")[1]):
            raise RuntimeError("the scripted step fails here")
        if tuple(prompt[: len(self._say)]) == self._say:
            reply = [*prompt[len(self._say) :], self._eos]
            return reply[min(place, len(reply) - 1)]
        return self._letters[(sum(prompt) + 7 * place + place * place + 3 * index) % len(self._letters)]

    def close(self) -> None:
        self.closed = True

    def _scores(self, target: int) -> torch.Tensor:
        row = torch.full((self._vocab,), -4.0)
        row[target] = 4.0
        return row


def opener_of(
    path: Path, *, rows: int = 4, length: int = 256, chunk: int = 32, pace_s: float = 0.0, kv_tokens: int | None = None
) -> Callable[..., Opened]:
    """What a test passes where loading.open_engine would be."""

    def open_scripted(config: Deployment, progress: Any = None) -> Opened:
        text = Text(path)
        runner = ScriptedRunner(text, rows, length, chunk, pace_s)
        engine = Engine(runner, vocab=text.vocab_size, eos_ids=text.eos_ids)  # type: ignore[arg-type]
        if progress is not None:
            progress("graphs", 1, 1)
        return Opened(engine, text, None, path, {}, {"graphs": 0.0})  # type: ignore[arg-type]

    return open_scripted


class Site:
    """A Replica behind uvicorn on a loopback port, in a thread of its own, with the connections it has where it answers HTTP itself."""

    def __init__(self, server: Replica) -> None:
        self.server = server
        # With the protocol named: asyncio switches Nagle's delay off only on sockets that say they are TCP.
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(512)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="site", daemon=True)
        self._thread.start()
        assert self._up.wait(PATIENCE_S), "the site did not come up"
        if self._failed is not None:
            raise self._failed

    @property
    def runner(self) -> ScriptedRunner:
        runner = self.server.served.opened.engine.runner
        assert isinstance(runner, ScriptedRunner)
        return runner

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a plain function on the server's event loop and wait for it."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def flush(self) -> None:
        """Wait until what the server's event loop was in the middle of is done, all of it."""
        self.call(lambda: None)

    def await_(self, coroutine: Any, timeout_s: float = PATIENCE_S) -> Any:
        """Run a coroutine on the server's event loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def idle(self) -> dict[str, float]:
        """Everything that must be back at its baseline when nobody calls: zero for each key."""
        snapshot = self.server.served.engine.snapshot()
        return {
            "calls": len(self.server.served.flights),
            "sequences": self.server.served.flights.sequences,
            "waiting_tokens": self.server.served.flights.waiting_tokens,
            "registered": len(self.server.served.flights.by_request),
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "slots_taken": snapshot.slots_total - snapshot.slots_free,
            "kv_tokens": snapshot.kv_tokens_used,
        }

    def settle(self) -> None:
        """Assert that everything returns to the baseline, and that the engine's ledger holds."""
        eventually(lambda: not any(self.idle().values()), PATIENCE_S, self.idle)
        self.server.served.opened.engine.check_ledger()

    def close(self) -> None:
        self._http.should_exit = True
        self._http.force_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as wrong:
            self._failed = wrong
            self._up.set()
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        await self.server.open()
        config = uvicorn.Config(
            application(self.server), http=Own, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=60
        )
        self._http = uvicorn.Server(config)
        self._up.set()
        try:
            await self._http.serve(sockets=[self.socket])
        finally:
            if isinstance(self.server.served.opened.engine.runner, ScriptedRunner):
                self.runner.free()
            await self.server.close()


@contextlib.contextmanager
def site(path: Path, config: dict[str, Any] | None = None, **script: Any) -> Iterator[Site]:
    """A scripted model served over real sockets."""
    args = {"model": {"path": str(path), "name": "scripted"}, **(config or {})}
    running = Site(Replica(args, opener_of(path, **script)))
    try:
        yield running
    finally:
        running.close()


def eventually(true: Callable[[], bool], within_s: float, say: Callable[[], object] = lambda: "") -> None:
    """Wait for a condition with a deadline; the condition is what is asserted, the clock only bounds it."""
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until, f"not within {within_s} s: {say()}"
        time.sleep(0.005)


def free_port() -> int:
    """A port nobody has, for somebody who will listen on it later.

    From below the range out of which the kernel serves whoever asks for any port, Ray's processes among them, so that nobody takes it
    in between.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError("of a hundred ports none was free")


def sse(lines: Sequence[str]) -> list[str]:
    """The data of each server-sent event."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
