"""Served: a warm engine and all that is around it, complete from the first call to the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from rayneuron import metrics
from rayneuron.api import call as api
from rayneuron.api import openai
from rayneuron.config import Deployment, Limits
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import Busy, NotReady, RayNeuronError
from rayneuron.loading import Opened
from rayneuron.policies import admission
from rayneuron.serve.flight import STOPPED, Flight, Flights
from rayneuron.serve.hot import hot
from rayneuron.serve.journal import Journal
from rayneuron.serve.leg import Leg
from rayneuron.serve.startup import events_per_s
from rayneuron.serve.telemetry import Load, Telemetry
from rayneuron.serve.text_thread import TextThread
from rayneuron.serve.trace import Tracer
from rayneuron.serve.verbs import NO_HEADERS, Json, Read, Result
from rayneuron.text.text import Assembler
from rayneuron.types import Seeds

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.25


class Idle:
    """When the engine was last seen without work."""

    last_s = 0.0


@dataclass(frozen=True)
class Served:
    """One engine, the calls in flight, and what calls are read with and held to. `refused`: why the last user_config was."""

    config: Deployment
    opened: Opened
    created: int
    engine: EngineLoop
    flights: Flights
    telemetry: Telemetry
    text_thread: TextThread
    journal: Journal
    tracer: Tracer | None
    context: api.Context
    limits: Limits
    watch: asyncio.Task[None]
    seeds: Seeds
    refused: str | None = None
    idle: Idle = field(default_factory=Idle)

    def admit(self, call: admission.Demand) -> None:
        """As the verb."""
        try:
            admission.decide(self.flights.load(self.opened.engine.capacity), call, self.limits)
        except Busy:
            self.telemetry.refused("capacity")
            raise

    async def parse(self, read: Read[Result], body: bytes | Json) -> Result:
        """As the verb."""
        size_bytes = len(body) * (16 if b'"bad_words"' in body else 1) if isinstance(body, bytes) else 0  # each word is tokenised twice
        return await self.text_thread.run(
            size_bytes, lambda: read(openai.decode(body) if isinstance(body, bytes) else body, self.context)
        )

    @contextlib.contextmanager
    def flight(
        self, call: api.Call, arrival_s: float, time_limit_s: float | None, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> Iterator[Flight]:
        """As the verb."""
        self.journal.unknown(call.unknown)
        self.admit(admission.measure(call.requests))
        legs = []
        for request in call.requests:
            self.seeds.fix(request)  # here, so that whoever else goes on with it draws the same
            request.arrival_s = arrival_s
            request.deadline_s = None if time_limit_s is None else arrival_s + time_limit_s
            ended = self.tracer.begin(request, headers) if self.tracer is not None else None
            legs.append(Leg(request, Assembler(request, self.opened.text), ended))
        flight = self.flights.open(legs)
        try:
            yield flight
        finally:
            self.flights.close(flight)
            self.journal.ended(call, flight, arrival_s)

    def cards(self, *names: str) -> list[Json]:
        """As the verb."""
        listed = dict.fromkeys((*self.context.models, *(names if self.context.any_name else ())))
        made = partial(openai.model_card, created=self.created, max_model_len=self.context.max_model_len, root=str(self.opened.path))
        return [made(name) for name in listed]

    def health(self) -> None:
        """As the verb."""
        if not self.engine.alive:
            raise RayNeuronError(f"the engine has stopped: {self.engine.error or 'its thread ended'}")
        snapshot = self.engine.snapshot()
        if self.engine.pending():
            still_s = time.monotonic() - max(snapshot.last_step_s, snapshot.step_started_s, self.idle.last_s)
            if still_s > self.config.serving.stall_timeout_s:
                raise RayNeuronError(f"the engine has work but has not finished a step for {still_s:.0f} s")
        else:
            self.idle.last_s = time.monotonic()

    def load(self) -> Load:
        """As the verb."""
        return Load(self.engine.snapshot(), len(self.flights), self.flights.sequences, self.refused)

    async def close(self) -> None:
        """End what is left and give the engine back."""
        self.flights.fail_all(NotReady("the server is shutting down"))
        self.watch.cancel()
        await asyncio.to_thread(self.engine.close)


async def start(
    config: Deployment, opened: Opened, telemetry: Telemetry, text_thread: TextThread, tracer: Tracer | None, limits: Callable[[], Limits]
) -> Served:
    """Everything around a warm engine; `limits` are those of the moment. Where a part of it fails, the engine is given back."""
    event_loop = asyncio.get_running_loop()
    try:
        read = hot(config, opened)
        capacity = opened.engine.capacity
        telemetry.kv_cache(capacity.blocks, capacity.block, config.kv_dtype or config.dtype, opened.engine.scheduler.caching)
        for part, seconds in opened.seconds.items():
            telemetry.series[metrics.STARTUP].set(seconds, part)
        flights = Flights(telemetry, event_loop, events_per_s(config))
        engine = EngineLoop(opened.engine, flights.deliver, on_step=telemetry.timed)  # the last that may fail
    except BaseException:
        await asyncio.to_thread(opened.engine.close)
        raise
    flights.attach(engine)
    watch = event_loop.create_task(_watch(engine, flights, limits))
    journal = Journal(config.serving.log_prompts)
    parts = (config, opened, int(time.time()), engine, flights, telemetry, text_thread, journal, tracer)
    return Served(*parts, read.context, read.limits, watch, Seeds(config.seed))


async def _watch(engine: EngineLoop, flights: Flights, limits: Callable[[], Limits]) -> None:
    """The engine tells its calls when it dies; this makes sure of those it did not know yet."""
    while engine.alive:
        await asyncio.sleep(WATCH_PERIOD_S)
    log.error("the engine has stopped: %s", engine.error)
    flights.fail_all(NotReady(STOPPED, retry_after_s=limits().retry_after_s))
