"""EngineServer: one engine, its thread, and the calls in flight; what a Ray Serve replica of one model is, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from rayneuron import config as deployment
from rayneuron import keys, loading, metrics
from rayneuron.api import call as api
from rayneuron.api import openai
from rayneuron.config import Deployment
from rayneuron.engine.engine import Engine
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import Busy, NotReady, RayNeuronError
from rayneuron.policies import admission
from rayneuron.serve.flight import STOPPED, Flight, Flights
from rayneuron.serve.hot import Hot, hot
from rayneuron.serve.journal import Journal
from rayneuron.serve.leg import Leg
from rayneuron.serve.pieces import chunks, plain
from rayneuron.serve.startup import Startup, events_per_s, opened_aside, thread_share
from rayneuron.serve.telemetry import Load, Telemetry
from rayneuron.serve.trace import Tracer
from rayneuron.text.text import Assembler
from rayneuron.types import Delta, SamplingParams

log = logging.getLogger(__name__)

Json = dict[str, Any]
Result = TypeVar("Result")
Parse = Callable[..., api.Call]
Opener = Callable[..., loading.Opened]

LONG_BODY_BYTES = 16 * 1024  # beyond this a body is tokenised off the event loop; below, the hop costs more than the work
WATCH_PERIOD_S = 0.25


class EngineServer:
    """Owns one engine. Its methods are what other Ray applications call through a handle; `serve.ingress` puts HTTP in front of it.

    The constructor returns when the engine is warm, so a replica is never ready too early. `opener` turns the configuration into an engine.
    """

    def __init__(self, config: Mapping[str, Any] | Deployment, opener: Opener = loading.open_engine, engine_label: str = "0") -> None:
        self.config = deployment.parse(config)
        self.name = self.config.model.served_name
        self.engine_label = engine_label
        self.limits = self.config.limits
        self.ready = False
        self.draining = False
        self.refused: str | None = None  # why the last user_config was not taken
        self._opener = opener
        self._watch: asyncio.Task[None] | None = None
        self._text_pool: ThreadPoolExecutor | None = None
        self._journal = Journal(self.config.serving.log_prompts)
        self._tracer = Tracer(self.name) if self.config.serving.trace else None

    async def open(self) -> None:
        """Load and warm the engine on a thread of its own, then take calls. Whatever was made is given back where it fails."""
        startup = Startup(self.name, self._publish)
        config = self.config.model_copy(update={"threads": thread_share(self.config)})
        self.keys = keys.read(self.config.serving.api_keys or ())
        opened = await opened_aside(partial(self._opener, config, startup.report))
        self.opened, self.created = opened, int(time.time())
        try:
            self._start(opened)
        except BaseException:
            await self._give_back()
            raise
        self.ready = True
        startup.done(opened.seconds)

    def _start(self, opened: loading.Opened) -> None:
        """Everything around the engine that takes calls."""
        event_loop = asyncio.get_running_loop()
        self._adopt(hot(self.config, opened))
        self.telemetry = Telemetry(self.name, self.engine_label, self.load)
        self.flights = Flights(self.telemetry, event_loop, events_per_s(self.config))
        self._text_pool = ThreadPoolExecutor(1, thread_name_prefix="rayneuron-text")
        capacity = opened.engine.capacity
        self.telemetry.kv_cache(capacity.rows, capacity.length, self.config.kv_dtype or self.config.dtype)
        for part, seconds in opened.seconds.items():
            self.telemetry.series[metrics.STARTUP].set(seconds, part)
        self.engine = EngineLoop(opened.engine, self.flights.deliver, on_step=self.telemetry.timed)
        self.flights.attach(self.engine)
        self._watch = event_loop.create_task(self._watch_engine())

    async def close(self) -> None:
        """Refuse new calls, end what is left and give the engine back."""
        self.draining = True
        if not self.ready:
            return
        self.ready = False
        self.flights.fail_all(NotReady("the server is shutting down"))
        await self._give_back()

    async def _give_back(self) -> None:
        """The engine, its thread and whatever was made around it."""
        if self._watch is not None:
            self._watch.cancel()
        running: EngineLoop | Engine = getattr(self, "engine", self.opened.engine)
        await asyncio.to_thread(running.close)
        if self._text_pool is not None:
            self._text_pool.shutdown(wait=False, cancel_futures=True)

    def admit(self, call: admission.Demand = admission.LEAST) -> None:
        """Raise NotReady, or what the admission policy says to `call`; by default the least there is, before any work is spent. O(1)."""
        if not self.ready or self.draining:
            why = "the server is shutting down" if self.draining else "the engine is still loading"
            raise NotReady(why, retry_after_s=self.limits.retry_after_s)
        try:
            admission.decide(self.flights.load(self.opened.engine.capacity), call, self.limits)
        except Busy:
            self.telemetry.refused("capacity")
            raise

    async def parse(self, parse: Parse, body: bytes | Json, client_id: str | None = None) -> api.Call:
        """A body to the requests it asks for. Long ones are tokenised on another thread so that running streams do not stutter."""

        def work() -> api.Call:
            fields = openai.decode(body) if isinstance(body, bytes) else body
            return parse(fields, self.context, request_id=uuid4().hex, created=int(time.time()), client_id=client_id)

        size_bytes = len(body) * (16 if b'"bad_words"' in body else 1) if isinstance(body, bytes) else 0  # each word is tokenised twice
        call = await self.on_text_thread(size_bytes, work)
        self._journal.unknown(call.unknown)
        return call

    async def on_text_thread(self, size_bytes: int, work: Callable[[], Result]) -> Result:
        """Run `work` here if it is small, else on the text thread."""
        if size_bytes <= LONG_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, work)

    async def write(self, call: api.Call, deltas: list[Delta], write: Callable[[Json], Result]) -> Result:
        """The whole reply, as `write` makes it; one with many probabilities is put together on the text thread."""
        return await self.on_text_thread(100 * admission.measure(call.requests).scores, lambda: write(call.reply(deltas)))

    @contextlib.contextmanager
    def flight(
        self, call: api.Call, arrival_s: float, time_limit_s: float | None, headers: Mapping[bytes, bytes] = MappingProxyType({})
    ) -> Iterator[Flight]:
        """A call on its way through the engine; on leaving, whatever is unfinished is aborted. `headers` may hold a trace to continue."""
        self.admit(admission.measure(call.requests))
        legs = []
        for request in call.requests:
            request.arrival_s = arrival_s
            request.deadline_s = None if time_limit_s is None else arrival_s + time_limit_s
            ended = self._tracer.begin(request, headers) if self._tracer is not None else None
            legs.append(Leg(request, Assembler(request, self.opened.text), ended))
        flight = self.flights.open(legs)
        try:
            yield flight
        finally:
            self.flights.close(flight)
            self._journal.ended(call, flight, arrival_s)

    async def chat(self, body: Json) -> Json | AsyncIterator[Json]:
        """A chat completion by handle; the body and the reply are OpenAI's. Raises RayNeuronError subclasses.

        With `"stream": True` in the body OpenAI's chunks, through `handle.chat.options(stream=True).remote(body)`.
        """
        return await self._answer(openai.parse_chat, body)

    async def completions(self, body: Json) -> Json | AsyncIterator[Json]:
        """A text completion by handle; the body, the reply and the chunks are OpenAI's, as with `chat`."""
        return await self._answer(openai.parse_completions, body)

    async def generate(self, prompt: str | list[int] | Json, params: SamplingParams | Json | None = None) -> AsyncIterator[Json]:
        """Stream one prompt by handle: `handle.generate.options(stream=True).remote("Hello", {"max_tokens": 8})`.

        `prompt` is text, token ids, or a whole body with `prompt` or `messages`. Yields {index, text, token_ids, finish_reason,
        stop_reason}, and logprobs and usage where there are any.
        """
        body = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        body |= msgspec.json.decode(msgspec.json.encode(params)) if isinstance(params, SamplingParams) else (params or {})
        self.admit()
        call = await self.parse(openai.parse_chat if "messages" in body else openai.parse_completions, body)
        with self.flight(call, time.monotonic(), self.limits.request_timeout_s) as flight:
            while deltas := await flight.take():
                for delta in deltas:
                    yield plain(call, delta)
                await flight.rest(self.flights.pace_s)

    async def tokenize(self, body: Json) -> Json:
        """{prompt} or {messages} to {tokens, count, max_model_len}."""
        return openai.tokenize(body, self.context)

    async def detokenize(self, body: Json) -> Json:
        """{tokens} to {prompt}."""
        return openai.detokenize(body, self.context)

    async def models(self) -> Json:
        """The list of models, as /v1/models gives it."""
        return openai.models_list(self.cards())

    async def stats(self) -> Json:
        """The engine's load and the calls in flight."""
        load = self.load()
        refused = {} if self.refused is None else {"refused_user_config": self.refused}
        return {**msgspec.to_builtins(load.snapshot), "open_calls": load.calls, "open_sequences": load.sequences, **refused}

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`."""
        return self.telemetry.text()

    async def drain(self, within_s: float | None = None) -> None:
        """Refuse new calls with 503 from now on; running ones finish, those that have not after `within_s` with an error."""
        self.draining = True
        if within_s is not None:
            await self.flights.end(within_s, NotReady("the server is shutting down", retry_after_s=self.limits.retry_after_s))

    def check_health(self) -> None:
        """Raise where the engine is dead, or has had work for `stall_timeout_s` without finishing a step. Takes no lock."""
        if not self.ready:
            return
        if not self.engine.alive:
            raise RayNeuronError(f"the engine has stopped: {self.engine.error or 'its thread ended'}")
        snapshot = self.engine.snapshot()
        if self.engine.pending():
            still_s = time.monotonic() - max(snapshot.last_step_s, snapshot.step_started_s, self._last_idle_s)
            if still_s > self.config.serving.stall_timeout_s:
                raise RayNeuronError(f"the engine has work but has not finished a step for {still_s:.0f} s")
        else:
            self._last_idle_s = time.monotonic()

    def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Take hot settings without a restart: all of them, or where one is wrong none. That is said, in the log, on /load and /metrics.

        Raising would make Serve replace a replica that runs well.
        """
        try:
            changed = hot(self.config, self.opened, user_config)
        except Exception as wrong:
            self.refused = wrong.message if isinstance(wrong, RayNeuronError) else f"{type(wrong).__name__}: {wrong}"
            log.error("user_config is refused, what was before holds: %s", self.refused)
        else:
            self.refused = None
            self._adopt(changed)
        self.telemetry.series[metrics.USER_CONFIG_REFUSED].set(float(self.refused is not None))

    def _adopt(self, changed: Hot) -> None:
        self.context, self.limits = changed.context, changed.limits

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What a scaling policy decides on."""
        load = self.load()
        used, total = load.snapshot.kv_tokens_used, load.snapshot.kv_tokens_total
        return {
            "waiting": float(load.snapshot.waiting),
            "waiting_tokens": float(load.snapshot.waiting_tokens),
            "running": float(load.snapshot.running),
            "sequences": float(load.sequences),
            "kv_used": used / total if total else 0.0,
        }

    def record_routing_stats(self) -> Json:
        """What a router decides on: the snapshot."""
        return msgspec.to_builtins(self.load().snapshot)

    def load(self) -> Load:
        """The engine's snapshot and the calls in flight."""
        return Load(self.engine.snapshot(), len(self.flights), self.flights.sequences)

    def cards(self, *names: str) -> list[Json]:
        """The names served here, as /v1/models lists them; `names`: more, where any name is answered."""
        listed = dict.fromkeys((*self.context.models, *(names if self.context.any_name else ())))
        made = partial(openai.model_card, created=self.created, max_model_len=self.context.max_model_len, root=str(self.opened.path))
        return [made(name) for name in listed]

    async def _answer(self, parse: Parse, body: Json) -> Json | AsyncIterator[Json]:
        self.admit()
        call = await self.parse(parse, body)
        flying = self.flight(call, time.monotonic(), self.limits.request_timeout_s)
        if call.stream:
            return chunks(call, flying, lambda: self.flights.pace_s)
        with flying as flight:
            return await self.write(call, await flight.finish(), lambda reply: reply)

    async def _watch_engine(self) -> None:
        """The engine tells its calls when it dies; this makes sure of those it did not know yet."""
        while self.engine.alive:
            await asyncio.sleep(WATCH_PERIOD_S)
        log.error("the engine has stopped: %s", self.engine.error)
        self.flights.fail_all(NotReady(STOPPED, retry_after_s=self.limits.retry_after_s))

    _publish: Callable[[str], None] = staticmethod(lambda progress: None)  # tells how far the start has come
    _last_idle_s = 0.0
