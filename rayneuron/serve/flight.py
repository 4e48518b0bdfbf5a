"""Calls in flight: what the engine has produced for each, and the task that waits for it.

The engine thread hands over one list of TokenDeltas a step (`Flights.deliver`); everything else here runs on the event loop. Text is put
together at once, so that a stop string ends the choice in the step it appears in, however slowly the client reads; deltas nobody has taken
yet are joined, so a slow reader gets fewer and longer chunks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rayneuron.engine.buckets import Capacity
from rayneuron.errors import NotReady, RayNeuronError, RequestError, RequestTimeout
from rayneuron.policies.admission import Occupancy
from rayneuron.serve.leg import Leg, join
from rayneuron.serve.telemetry import Telemetry
from rayneuron.types import Delta, FinishReason, Request, Snapshot, TokenDelta

log = logging.getLogger(__name__)

SHORTEST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.06  # what a reader does not notice
LOOK_PERIOD_S = 0.05
LAST_WORDS_S = 1.0  # for streams to take their error event
STOPPED = "the engine has stopped; this replica is being replaced"
TIMED_OUT = "the request did not finish within its time limit"


class EngineHandle(Protocol):
    """What serving needs of the engine's thread (engine.loop.EngineLoop)."""

    @property
    def alive(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def snapshot(self) -> Snapshot: ...

    def close(self) -> None: ...


class Flight:
    """One call in flight, with a leg for each of its prompts.

    `started()` returns once the first step has come back, `take()` whatever there is, `finish()` everything at the end. Each raises the
    error that ended the flight. One task waits at a time.
    """

    def __init__(self, legs: Sequence[Leg], pace_s: Callable[[], float] = lambda: 0.0) -> None:
        self.legs = {leg.request.id: leg for leg in legs}
        self.unfinished = sum(leg.request.params.n for leg in legs)  # choices
        self.error: RayNeuronError | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.pace_s = pace_s  # how long to rest between two writes
        self._pending: dict[tuple[str, int], list[Delta]] = {}
        self._begun = False
        self._every_step = True
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """True once every choice has finished or the flight has failed."""
        return self.unfinished == 0 or self.error is not None

    async def started(self) -> None:
        """Wait until the first step with one of these requests has come back."""
        while not (self._begun or self.ended):
            await self._wait()
        if self.error is not None and not self._pending:
            raise self.error

    def ready(self) -> list[Delta]:
        """What has not been taken yet, joined by choice; does not wait."""
        joined = [join(deltas) for deltas in self._pending.values()]
        self._pending.clear()
        return joined

    async def take(self) -> list[Delta]:
        """Wait until there is something, then all of it; an empty list when every choice has been delivered to its end."""
        while not (self._pending or self.ended):
            await self._wait()
        if self.error is not None and not self._pending:
            raise self.error
        return self.ready()

    async def rest(self, pause_s: float) -> None:
        """Let deltas gather for a while; over at once when the flight has ended, or where the pause is too short to be worth a timer."""
        if pause_s < SHORTEST_PAUSE_S or self.ended:
            return
        self._every_step = False
        timer = asyncio.get_running_loop().call_later(pause_s, self._wake)
        try:
            await self._wait()
        finally:
            timer.cancel()
            self._every_step = True

    async def finish(self) -> list[Delta]:
        """Wait until every choice has finished; one delta a choice."""
        self._every_step = False
        while not self.ended:
            await self._wait()
        if self.error is not None:
            raise self.error
        return self.ready()

    def fail(self, error: RayNeuronError) -> None:
        """End the flight with an error, after what is pending."""
        if not self.ended:
            self.error = error
            self._wake()

    def receive(self, piece: TokenDelta, now_s: float, telemetry: Telemetry) -> bool:
        """Take one token delta; True where a stop string ended the choice here, so that the engine has to be told."""
        leg = self.legs[piece.request_id]
        if piece.index in leg.done or self.error is not None:
            return False  # ended a moment ago; the engine had not heard of it yet
        if piece.finish_reason == "error" and self._lost(piece):
            return False
        if piece.finish_reason == "abort":  # nobody here asked for it: the engine saw the deadline pass
            self.fail(RequestTimeout(TIMED_OUT))
            return False
        leg.measure(piece, now_s, telemetry)
        leg.begun = self._begun = True
        delta = leg.assembler.push(piece)
        if delta is not None and delta.error is not None:
            delta.stop_reason, delta.error = delta.error, None  # the choice's own end, not the call's
        finished: FinishReason | None = piece.finish_reason
        if delta is not None:
            self._pending.setdefault((piece.request_id, piece.index), []).append(delta)
            finished = delta.finish_reason or finished
        if finished is not None:
            self.unfinished -= 1
            leg.finish(piece, finished, now_s, telemetry)
        if self._every_step or self.unfinished == 0:
            self._wake()
        return finished is not None and piece.finish_reason is None

    def _lost(self, piece: TokenDelta) -> bool:
        """Whether an error is the end of the whole flight: the engine is gone, or this choice was the last hope of an answer."""
        if piece.fault == "engine":
            # What broke may hold paths or other people's prompts: it goes to the log, not to the client.
            log.error("request %s failed: %s", piece.request_id, piece.error)
            self.fail(NotReady(STOPPED))
        elif self.unfinished == 1 and not any(leg.answered for leg in self.legs.values()):
            self.fail((RequestError if piece.fault == "request" else RayNeuronError)(piece.error or "the choice failed"))
        return self.error is not None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Flights:
    """Every call in flight, by engine request id. All methods but `deliver` belong to the event loop.

    `sequences` counts choices that have not finished and `waiting_tokens` prompt tokens of requests that have not begun: admission decides
    on these (`load`), because unlike the engine's snapshot they are never a step late.
    """

    def __init__(self, telemetry: Telemetry, event_loop: asyncio.AbstractEventLoop, events_per_s: float = math.inf) -> None:
        self.events_per_s = events_per_s
        self.sequences = 0
        self.waiting_tokens = 0
        self.closed: RayNeuronError | None = None
        self._telemetry = telemetry
        self._event_loop = event_loop
        self._by_request: dict[str, Flight] = {}
        self._open: set[Flight] = set()
        self._engine: EngineHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def load(self, capacity: Capacity) -> Occupancy:
        """What admission decides on."""
        return Occupancy(capacity.rows, capacity.length, self.sequences, self.waiting_tokens)

    @property
    def pace_s(self) -> float:
        """How long a stream lets deltas gather between two writes, so that all of them together stay below `events_per_s`.

        Serve's own proxy spends most of a millisecond of CPU on every event: with many streams on a small machine that is time the
        engine has not got. Few streams never wait.
        """
        return min(len(self._open) / self.events_per_s, LONGEST_PAUSE_S)

    def attach(self, engine: EngineHandle) -> None:
        """Name the engine; once, before the first call."""
        self._engine = engine

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """What a step produced. Called on the engine thread, which it costs one wake-up of the event loop."""
        self._event_loop.call_soon_threadsafe(self.dispatch, deltas)

    def dispatch(self, deltas: list[TokenDelta]) -> None:
        """Sort one step's deltas into their flights."""
        now_s, tokens, prompt_tokens = time.monotonic(), 0, 0
        for piece in deltas:
            tokens += len(piece.token_ids)
            flight = self._by_request.get(piece.request_id)
            if flight is None:
                continue  # its client has gone
            prompt_tokens += self._receive(flight, piece, now_s)
        self._telemetry.step(tokens, prompt_tokens)

    def _receive(self, flight: Flight, piece: TokenDelta, now_s: float) -> int:
        """Prompt tokens whose prefill this delta tells of."""
        leg, unfinished = flight.legs[piece.request_id], flight.unfinished
        waited, stopped = not leg.begun, False
        try:
            stopped = flight.receive(piece, now_s, self._telemetry)
        except Exception:  # one call's text must not stop the delivery of the others'
            log.exception("request %s: its text could not be put together", piece.request_id)
            flight.fail(RayNeuronError("the text could not be put together; the server log has the details under this request's id"))
        self.sequences -= unfinished - flight.unfinished
        if waited and leg.begun:
            self.waiting_tokens -= len(leg.request.prompt_ids)
        if stopped:
            self._abort(piece.request_id, piece.index)
        return len(leg.request.prompt_ids) if waited and leg.begun else 0

    def open(self, legs: Sequence[Leg]) -> Flight:
        """Hand a call's requests to the engine. Raises what the engine refuses them with; then nothing of the call remains."""
        if self.closed is not None:
            raise self.closed
        if self._engine is None:
            raise NotReady("the engine is still loading")
        if not self._engine.alive:
            raise NotReady(STOPPED)  # what it died of is in the log
        flight = Flight(legs, lambda: self.pace_s)
        self._open.add(flight)
        self.sequences += flight.unfinished
        self.waiting_tokens += sum(len(leg.request.prompt_ids) for leg in legs)
        try:
            for leg in legs:
                self._engine.submit(leg.request)  # refuses an id in use, which is another flight's to keep
                self._by_request[leg.request.id] = flight
                self._telemetry.asked(leg.request)
        except BaseException:
            self.close(flight)
            raise
        self._watch_deadline(flight)
        return flight

    def close(self, flight: Flight) -> None:
        """Forget a flight and abort what the engine still does for it. Harmless when it is complete or closed already."""
        if flight not in self._open:
            return
        self._open.discard(flight)
        self.sequences -= flight.unfinished
        if flight.deadline is not None:
            flight.deadline.cancel()
        for leg in flight.legs.values():
            mine = self._by_request.get(leg.request.id) is flight
            if mine:
                del self._by_request[leg.request.id]
            if not leg.begun:
                self.waiting_tokens -= len(leg.request.prompt_ids)
            if leg.drop(flight.error is not None, self._telemetry) and mine:
                self._abort(leg.request.id, None)

    def fail_all(self, error: RayNeuronError) -> None:
        """The engine is gone: end every flight with `error`, and refuse new ones with it."""
        self.closed = error
        for flight in tuple(self._open):
            flight.fail(error)

    async def end(self, within_s: float, error: RayNeuronError) -> None:
        """Let the open calls finish for so long, then end the others with `error`; returns once they have taken it."""
        for patience_s in (within_s, LAST_WORDS_S):
            until = time.monotonic() + patience_s
            while self._open and time.monotonic() < until:
                await asyncio.sleep(LOOK_PERIOD_S)
            self.fail_all(error)

    def _abort(self, request_id: str, index: int | None) -> None:
        if self._engine is not None and self._engine.alive:
            self._engine.abort(request_id, index)

    def _watch_deadline(self, flight: Flight) -> None:
        deadlines = [leg.request.deadline_s for leg in flight.legs.values() if leg.request.deadline_s is not None]
        if deadlines:
            error = RequestTimeout(TIMED_OUT)
            flight.deadline = self._event_loop.call_later(max(0.0, min(deadlines) - time.monotonic()), flight.fail, error)
