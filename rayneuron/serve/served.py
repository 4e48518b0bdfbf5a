"""Served: a warm engine and all that is around it, complete from the first call to the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rayneuron import metrics
from rayneuron.api import call as api
from rayneuron.api import openai
from rayneuron.config import Deployment, Limits
from rayneuron.engine.loop import EngineLoop
from rayneuron.errors import Busy, NotReady, RayNeuronError
from rayneuron.loading import Opened
from rayneuron.policies import admission
from rayneuron.seeds import Seeds
from rayneuron.serve import adapters
from rayneuron.serve.flight import STOPPED, ActiveRequest, Flight, Flights
from rayneuron.serve.health import Heart
from rayneuron.serve.hot import Known, hot
from rayneuron.serve.pools import borrowed
from rayneuron.serve.seams import Computes, Takes
from rayneuron.serve.startup import events_per_s
from rayneuron.serve.telemetry import Load, Telemetry, Values
from rayneuron.serve.trace import Tracer
from rayneuron.serve.verbs import NO_HEADERS, Json, Read, Result
from rayneuron.text.assembler import Assembler
from rayneuron.transfer.pulls import Pulls
from rayneuron.types import Delta, Request

if TYPE_CHECKING:
    from rayneuron.engine.engine import Engine

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.25
LOOK_PERIOD_S = 0.02
LAST_WORDS_S = 1.0  # for streams to take their error event
LONG_BYTES = 16 * 1024  # beyond this a body is tokenised off the event loop; below, the hop costs more than the work
UNKNOWN_FIELDS = 100  # names of unknown request fields that are logged


@dataclass(frozen=True)
class Served:
    """One engine, the calls in flight, and what calls are read with and held to. `refused`: why the last user_config was."""

    config: Deployment
    opened: Known
    created: int
    engine: Computes
    flights: Flights
    telemetry: Telemetry
    tracer: Tracer | None
    aside: ThreadPoolExecutor  # for text that is too long for the event loop
    context: api.Context
    limits: Limits
    watch: asyncio.Task[None]
    seeds: Seeds
    refused: str | None = None
    heart: Heart = field(default_factory=Heart)
    said: set[str] = field(default_factory=set)  # unknown request fields that the log has named

    def admit(self, call: admission.Demand = admission.LEAST) -> None:
        """As the verb."""
        capacity, flights = self.opened.engine.capacity, self.flights
        load = admission.Occupancy(capacity.rows, capacity.length, flights.sequences, flights.waiting_tokens)
        try:
            admission.decide(load, call, self.limits)
        except Busy:
            self.telemetry.refused("capacity")
            raise

    async def parse(self, parse: Callable[..., api.Call], body: bytes | Json, client_id: str | None = None) -> api.Call:
        """As the verb."""
        return await self.read(partial(parse, request_id=self.seeds.name(), created=int(time.time()), client_id=client_id), body)

    async def read(self, read: Read[Result], body: bytes | Json) -> Result:
        """As the verb."""
        size_bytes = len(body) * (16 if b'"bad_words"' in body else 1) if isinstance(body, bytes) else 0  # each word is tokenised twice
        return await self._work(size_bytes, lambda: read(openai.decode(body) if isinstance(body, bytes) else body, self.context))

    @contextlib.contextmanager
    def flight(
        self, call: api.Call, arrival_s: float, time_limit_s: float | None, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> Iterator[Flight]:
        """As the verb."""
        self._say_unknown(call.unknown)

        def words(request: Request) -> Takes:
            return Assembler(request, self.opened.text, call.scan.kept)

        with self.carry(call.requests, words, arrival_s, time_limit_s, headers) as flight:
            try:
                yield flight
            finally:
                self._say_ended(call, flight, arrival_s)

    @contextlib.contextmanager
    def carry(
        self, requests: Sequence[Request], reader: Callable[[Request], Takes], arrival_s: float, time_limit_s: float | None,
        headers: Mapping[bytes, bytes] = NO_HEADERS,
    ) -> Iterator[Flight]:  # fmt: skip
        """As the verb."""
        self.admit(admission.measure(requests))
        actives = []
        for request in requests:
            self.seeds.fix(request)  # here, so that whoever else goes on with it draws the same
            request.arrival_s = arrival_s
            request.deadline_s = None if time_limit_s is None else arrival_s + time_limit_s
            ended = self.tracer.begin(request, headers) if self.tracer is not None else None
            actives.append(ActiveRequest(request, reader(request), ended))
        flight = self.flights.open(actives)
        try:
            yield flight
        finally:
            self.flights.close(flight)

    async def write(self, call: api.Call, deltas: list[Delta], write: Callable[[Json], Result]) -> Result:
        """As the verb."""
        return await self._work(100 * admission.measure(call.requests).scores, lambda: write(call.reply(deltas)))

    async def _work(self, size_bytes: int, work: Callable[[], Result]) -> Result:
        """Done here if it is small, else on the thread, which begins with the first of it."""
        return work() if size_bytes <= LONG_BYTES else await asyncio.get_running_loop().run_in_executor(self.aside, work)

    def _say_unknown(self, names: Iterable[str]) -> None:
        """Each name once a process, and no more names than an honest client has: a log is not the client's to fill."""
        said = self.said
        for name in {name[:64] for name in names} - said if len(said) < UNKNOWN_FIELDS else ():
            said.add(name)
            log.warning("request field %r is not known here and was ignored (said once)", name)

    def _say_ended(self, call: api.Call, flight: Flight, arrival_s: float) -> None:
        """One line of what a call was and took, and the prompts only where that is asked for."""
        tokens = sum([count for active in flight.actives.values() for count in active.tokens.values()])
        prompt = sum([len(request.prompt_ids) for request in call.requests])
        state = type(flight.error).__name__ if flight.error else "complete" if flight.unfinished == 0 else "aborted"
        took_s = time.monotonic() - arrival_s
        log.info("%s %s: %d prompt tokens, %d generated, %d choices, %.3f s", call.id, state, prompt, tokens, call.choices, took_s)
        for request in call.requests if self.config.serving.log_prompts else ():
            log.info("%s prompt: %r", request.id, call.text.decode(request.prompt_ids, skip_special_tokens=False))

    def cards(self, *names: str) -> list[Json]:
        """As the verb."""
        listed = dict.fromkeys((*self.context.models, *(names if self.context.any_name else ())))
        made = partial(openai.model_card, created=self.created, max_model_len=self.context.max_model_len, root=str(self.opened.path))
        return [made(name) for name in listed] + [made(name, root=name, parent=self.context.models[0]) for name in self.context.adapters()]

    def health(self) -> None:
        """As the verb."""
        self.heart.check(self.engine, self.config.serving.stall_timeout_s)

    def load(self) -> Load:
        """The engine's snapshot and the calls in flight."""
        timing, pulls = self.opened.engine.timing, self.opened.engine.prefills
        profile = timing.profile() if timing is not None else None
        told = dict(borrowed(pulls)) if isinstance(pulls, Pulls) else {}
        if isinstance(self.opened, Opened):
            told |= {**adapters.told(self.opened.engine), **_constrained(self.opened.engine)}
        return Load(self.engine.snapshot(), len(self.flights), self.flights.sequences, self.refused, self.opened.chosen, profile, told)

    async def end(self, within_s: float, error: RayNeuronError) -> None:
        """Let the open calls finish for so long, then end the others with `error`; returns once they have taken it."""
        for patience_s in (within_s, LAST_WORDS_S):
            until = time.monotonic() + patience_s
            while len(self.flights) and time.monotonic() < until:
                await asyncio.sleep(LOOK_PERIOD_S)
            self.flights.fail_all(error)

    async def close(self) -> None:
        """End what is left and give the engine back."""
        self.flights.fail_all(NotReady("the server is shutting down"))
        self.watch.cancel()
        await asyncio.to_thread(self.engine.close)
        self.aside.shutdown(wait=False, cancel_futures=True)


def _constrained(engine: Engine) -> Values:
    """What there is to tell of constraints."""
    counts = engine.constraining.counts
    return {
        metrics.GRAMMAR_COMPILE: {(): counts.get("compile_s", 0.0)},
        metrics.GRAMMAR_MASK: {(): counts.get("mask_s", 0.0)},
        metrics.GRAMMAR_ERRORS: {(why,): counts.get(why, 0.0) for why in ("refused", "ended")},
    }


async def start(config: Deployment, opened: Opened, telemetry: Telemetry, tracer: Tracer | None, limits: Callable[[], Limits]) -> Served:
    """Everything around a warm engine; `limits` are those of the moment. Where a part of it fails, the engine is given back."""
    try:
        hot(config, opened)
        capacity = opened.engine.capacity
        telemetry.kv_cache(capacity.blocks, capacity.block, config.kv_dtype or config.dtype, opened.engine.scheduler.caching)
        for part, seconds in opened.seconds.items():
            telemetry.series[metrics.STARTUP].set(seconds, part)
        flights = Flights(telemetry, asyncio.get_running_loop(), events_per_s(config))
        engine = flights.engine = EngineLoop(opened.engine, flights.deliver, on_step=telemetry.timed)  # the last that may fail
    except BaseException:
        await asyncio.to_thread(opened.engine.close)
        raise
    return around(Served, config, opened, engine, flights, telemetry, tracer, limits)


Made = TypeVar("Made", bound=Served)


def around(
    kind: type[Made], config: Deployment, opened: Known, engine: Computes, flights: Flights, telemetry: Telemetry, tracer: Tracer | None,
    limits: Callable[[], Limits], user_config: Mapping[str, Any] | None = None,
) -> Made:  # fmt: skip
    """What is around an engine, here or elsewhere. Raises ConfigError."""
    read = hot(config, opened, user_config, telemetry)
    watch = asyncio.get_running_loop().create_task(_watch(engine, flights, limits))
    aside = ThreadPoolExecutor(1, thread_name_prefix="rayneuron-text")
    parts = (config, opened, int(time.time()), engine, flights, telemetry, tracer, aside)
    return kind(*parts, read.context, read.limits, watch, Seeds(config.seed))


async def _watch(engine: Computes, flights: Flights, limits: Callable[[], Limits]) -> None:
    """The engine tells its calls when it dies; this makes sure of those it did not know yet."""
    while engine.alive:
        await asyncio.sleep(WATCH_PERIOD_S)
    log.error("the engine has stopped: %s", engine.error)
    flights.fail_all(NotReady(STOPPED, retry_after_s=limits().retry_after_s))
