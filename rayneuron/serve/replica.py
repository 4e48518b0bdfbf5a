"""EngineServer: one engine, its thread, and the calls in flight; what a Ray Serve replica of one model is, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from rayneuron import config as deployment
from rayneuron import loading, metrics
from rayneuron.api import call as api
from rayneuron.api import openai
from rayneuron.config import Deployment
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import Busy, NotReady, RayNeuronError, RequestError
from rayneuron.policies import admission
from rayneuron.serve.flight import STOPPED, Flight, Flights
from rayneuron.serve.leg import Leg
from rayneuron.serve.startup import Startup, events_per_s, thread_share
from rayneuron.serve.telemetry import Load, Telemetry
from rayneuron.serve.trace import Tracer
from rayneuron.text import Assembler
from rayneuron.types import Delta, SamplingParams

log = logging.getLogger(__name__)

Json = dict[str, Any]
Result = TypeVar("Result")
Parse = Callable[..., api.Call]
Opener = Callable[..., loading.Opened]

LONG_BODY_BYTES = 16 * 1024  # beyond this a body is tokenised off the event loop; below, the hop costs more than the work
WATCH_PERIOD_S = 0.25
UNKNOWN_FIELDS = 100  # names of unknown request fields that are logged


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
        self._opener = opener
        self._log_prompts = self.config.serving.log_prompts
        self._tracer = Tracer(self.name) if self.config.serving.trace else None

    async def open(self) -> None:
        """Load and warm the engine on a thread of its own, then take calls."""
        event_loop = asyncio.get_running_loop()
        startup = Startup(self.name)
        config = self.config.model_copy(update={"threads": thread_share(self.config)})
        opened = await asyncio.to_thread(self._opener, config, startup.report)
        self.opened, self.created = opened, int(time.time())
        self.telemetry = Telemetry(self.name, self.engine_label, self.load)
        self.flights = Flights(self.telemetry, event_loop, events_per_s(self.config))
        self.engine = EngineLoop(opened.engine, self.flights.deliver, on_step=self.telemetry.timed)
        self.flights.attach(self.engine)
        self._text_pool = ThreadPoolExecutor(1, thread_name_prefix="rayneuron-text")
        self._unknown_fields: set[str] = set()
        self._apply(self.config.sampling_defaults)
        for part, seconds in opened.seconds.items():
            self.telemetry.series[metrics.STARTUP].set(seconds, part)
        self._watch = event_loop.create_task(self._watch_engine())
        self.ready = True
        startup.done(opened.seconds)

    async def close(self) -> None:
        """Refuse new calls, end what is left and give the engine back."""
        self.draining = True
        if not self.ready:
            return
        self.ready = False
        self._watch.cancel()
        self.flights.fail_all(NotReady("the server is shutting down"))
        await asyncio.to_thread(self.engine.close)
        self._text_pool.shutdown(wait=False, cancel_futures=True)

    def admit(self, call: admission.Call = admission.LEAST) -> None:
        """Raise NotReady, or what the admission policy says to `call`; by default the least there is, before any work is spent. O(1)."""
        if not self.ready or self.draining:
            raise NotReady(
                "the server is shutting down" if self.draining else "the engine is still loading", retry_after_s=self.limits.retry_after_s
            )
        try:
            admission.decide(self.flights.load(self.opened.engine.capacity), call, self.limits)
        except Busy:
            self.telemetry.refused("capacity")
            raise

    async def parse(self, parse: Parse, body: bytes | Json, request_id: str, client_id: str | None = None) -> api.Call:
        """A body to the requests it asks for. Long ones are tokenised on another thread so that running streams do not stutter."""

        def work() -> api.Call:
            fields = openai.decode(body) if isinstance(body, bytes) else body
            return parse(fields, self.context, request_id=request_id, created=int(time.time()), client_id=client_id)

        call = await self.on_text_thread(len(body) if isinstance(body, bytes) else 0, work)
        if call.unknown and len(self._unknown_fields) < UNKNOWN_FIELDS:
            self._say_unknown(call.unknown)
        return call

    async def on_text_thread(self, size_bytes: int, work: Callable[[], Result]) -> Result:
        """Run `work` here if it is small, else on the text thread."""
        if size_bytes <= LONG_BODY_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, work)

    async def write(self, call: api.Call, deltas: list[Delta], write: Callable[[Json], Result]) -> Result:
        """The whole reply, as `write` makes it; one with many probabilities is put together on the text thread."""
        bytes_each = 100
        return await self.on_text_thread(bytes_each * admission.measure(call.requests).scores, lambda: write(call.reply(deltas)))

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
            self._log(call, flight, arrival_s)

    async def chat(self, body: Json) -> Json:
        """A chat completion by handle; the body and the reply are OpenAI's. Raises RayNeuronError subclasses."""
        return await self._answer(openai.parse_chat, body)

    async def completions(self, body: Json) -> Json:
        """A text completion by handle; the body and the reply are OpenAI's."""
        return await self._answer(openai.parse_completions, body)

    async def generate(self, prompt: str | list[int] | Json, params: SamplingParams | Json | None = None) -> AsyncIterator[Json]:
        """Stream one prompt by handle: `handle.generate.options(stream=True).remote("Hello", {"max_tokens": 8})`.

        `prompt` is text, token ids, or a whole body with `prompt` or `messages`. Yields {index, text, token_ids, finish_reason,
        stop_reason}, and logprobs and usage where there are any.
        """
        body = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        body |= msgspec.json.decode(msgspec.json.encode(params)) if isinstance(params, SamplingParams) else (params or {})
        self.admit()
        call = await self.parse(openai.parse_chat if "messages" in body else openai.parse_completions, body, new_id())
        with self.flight(call, time.monotonic(), self.limits.request_timeout_s) as flight:
            while deltas := await flight.take():
                for delta in deltas:
                    yield _plain(call, delta)
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
        return {**msgspec.to_builtins(load.snapshot), "open_calls": load.calls, "open_sequences": load.sequences}

    async def drain(self) -> None:
        """Refuse new calls with 503 from now on; running ones finish."""
        self.draining = True

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

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Take hot settings without a restart: sampling_defaults and limits. Raises ConfigError and keeps the old ones."""
        hot = deployment.parse_hot(user_config)
        if hot.sampling_defaults is not None:
            self._apply(hot.sampling_defaults)
        if hot.limits is not None:
            self.limits = hot.limits
            self.context: api.Context = replace(self.context, client_priority=hot.limits.client_priority)

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

    def cards(self) -> list[Json]:
        """The models served here, as /v1/models lists them."""
        return [openai.model_card(self.name, created=self.created, max_model_len=self.context.max_model_len, root=str(self.opened.path))]

    def _apply(self, overrides: Mapping[str, Any]) -> None:
        engine = self.opened.engine
        self.context = api.Context(
            models=(self.name,),
            text=self.opened.text,
            max_model_len=engine.capacity.length,
            vocab_size=engine.vocab,
            defaults=openai.sampling_defaults(self.opened.generation, overrides),
            trust_chat_template=self.config.serving.trust_request_chat_template,
            client_priority=self.limits.client_priority,
        )

    async def _answer(self, parse: Parse, body: Json) -> Json:
        if body.get("stream"):
            raise RequestError("a handle answers whole; use handle.generate.options(stream=True) to stream", param="stream")
        self.admit()
        call = await self.parse(parse, body, new_id())
        with self.flight(call, time.monotonic(), self.limits.request_timeout_s) as flight:
            return await self.write(call, await flight.finish(), lambda reply: reply)

    def _say_unknown(self, names: Iterable[str]) -> None:
        """Each name once a process, and no more names than an honest client has: a log is not the client's to fill."""
        for name in {name[:64] for name in islice(names, UNKNOWN_FIELDS)} - self._unknown_fields:
            self._unknown_fields.add(name)
            log.warning("request field %r is not known here and was ignored (said once)", name)

    async def _watch_engine(self) -> None:
        """The engine tells its calls when it dies; this makes sure of those it did not know yet."""
        while self.engine.alive:
            await asyncio.sleep(WATCH_PERIOD_S)
        log.error("the engine has stopped: %s", self.engine.error)
        self.flights.fail_all(NotReady(STOPPED, retry_after_s=self.limits.retry_after_s))

    def _log(self, call: api.Call, flight: Flight, arrival_s: float) -> None:
        tokens = sum(count for leg in flight.legs.values() for count in leg.tokens.values())
        prompt = sum(len(request.prompt_ids) for request in call.requests)
        state = type(flight.error).__name__ if flight.error else "complete" if flight.unfinished == 0 else "aborted"
        took_s = time.monotonic() - arrival_s
        log.info("%s %s: %d prompt tokens, %d generated, %d choices, %.3f s", call.id, state, prompt, tokens, call.choices, took_s)
        if self._log_prompts:
            for request in call.requests:
                log.info("%s prompt: %r", request.id, self.opened.text.decode(request.prompt_ids, skip_special_tokens=False))

    _last_idle_s = 0.0


def new_id() -> str:
    """A request id nobody else has."""
    return uuid4().hex


def _plain(call: api.Call, delta: Delta) -> Json:
    prompt = call.prompt(delta.request_id)
    out: Json = {"index": prompt * call.n + delta.index, "text": delta.text, "token_ids": delta.token_ids}
    out |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    if delta.logprobs is not None:
        out["logprobs"] = msgspec.to_builtins(delta.logprobs)
    if delta.usage is not None:
        out["usage"] = msgspec.to_builtins(delta.usage)
    return out
