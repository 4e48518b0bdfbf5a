"""Calls in flight: what the engine has produced for each, and the task that waits for it.

The engine thread hands over one list of TokenDeltas a step (`Flights.deliver`); all else runs on the event loop. Text is put together at
once, so that a stop string ends the choice in its step; deltas nobody has taken yet are joined: a slow reader gets longer chunks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from rayneuron.errors import TIMED_OUT, NotReady, RayNeuronError, RequestError, RequestTimeout
from rayneuron.serve.cadence import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, Cadence
from rayneuron.serve.seams import Computes, Takes
from rayneuron.serve.telemetry import Telemetry
from rayneuron.serve.trace import OnEnd
from rayneuron.types import Delta, FinishReason, Request, Stamps, TokenDelta, join

log = logging.getLogger(__name__)

STOPPED = "the engine has stopped; this replica is being replaced"


class ActiveRequest:
    """One request of a flight: its text, which choices are done, and what telemetry wants to know of it."""

    __slots__ = ("answered", "assembler", "begun", "done", "ended", "last_s", "request", "tokens")

    def __init__(self, request: Request, assembler: Takes, ended: OnEnd | None = None) -> None:
        self.request, self.assembler, self.ended = request, assembler, ended
        self.begun = self.answered = False  # the latter: a choice of it came to a good end
        self.done: set[int] = set()
        self.last_s: dict[int, float] = {}
        self.tokens: dict[int, int] = {}

    def measure(self, piece: TokenDelta, now_s: float, telemetry: Telemetry) -> None:
        """Count one token delta."""
        if (before := self.last_s.get(piece.index)) is not None:
            telemetry.inter_token.observe(now_s - before)
        elif not self.last_s:
            telemetry.prefilled(len(self.request.prompt_ids), piece.cached_tokens, now_s - self.request.arrival_s, piece.remote)
        self.last_s[piece.index] = now_s
        self.tokens[piece.index] = self.tokens.get(piece.index, 0) + len(piece.token_ids)

    def finish(self, piece: TokenDelta, reason: FinishReason, now_s: float, telemetry: Telemetry) -> None:
        """Count the end of a choice; one that a stop string ended has no stamps of the engine yet."""
        tokens = self.tokens[piece.index]
        self.answered |= reason != "error"
        stamps = piece.stamps or Stamps(arrived=self.request.arrival_s, finished=now_s)
        self.done.add(piece.index)
        telemetry.finished(reason, tokens, stamps, now_s)
        if len(self.done) == self.request.params.n:
            telemetry.complete(max(self.tokens.values()))
        if self.ended is not None:
            self.ended(piece.index, reason, tokens, stamps)

    def drop(self, failed: bool, telemetry: Telemetry) -> bool:
        """Count the choices that will not end; False where there are none."""
        left = [index for index in range(self.request.params.n) if index not in self.done]
        telemetry.dropped(len(left), failed)
        if self.ended is not None:
            stamps = Stamps(arrived=self.request.arrival_s, finished=time.monotonic())
            for index in left:
                self.ended(index, "error" if failed else "abort", self.tokens.get(index, 0), stamps)
        return bool(left)


class Flight:
    """One call in flight, with an active request for each of its prompts.

    `started()` returns once the first step has come back, `take()` whatever there is, `finish()` everything at the end. Each raises the
    error that ended the flight. One task waits at a time. `cadence`: when those who rest between two writes go on.
    """

    def __init__(self, actives: Sequence[ActiveRequest], cadence: Cadence) -> None:
        self.actives = {active.request.id: active for active in actives}
        self.unfinished = sum(active.request.params.n for active in actives)  # choices
        self.headers: dict[str, str] = {}  # of the reply, once it begins
        self.error: RayNeuronError | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self._cadence = cadence
        self._pending: dict[tuple[str, int], list[Delta]] = {}
        self._begun, self._every_step = False, True
        self._waiter: asyncio.Future[None] | None = None
        self._pour: Callable[[], bool] | None = None

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
        pending, self._pending = self._pending, {}
        return [join(deltas) for deltas in pending.values()]

    async def take(self) -> list[Delta]:
        """Wait until there is something, then all of it; an empty list when every choice has been delivered to its end."""
        while not (self._pending or self.ended):
            await self._wait()
        if self.error is not None and not self._pending:
            raise self.error
        return self.ready()

    async def rest(self, pour: Callable[[], bool] | None = None) -> None:
        """Let deltas gather until the next beat; over at once when the flight has ended, or where streams are few. `pour` writes them at
        the beat, for waking a task costs more, and the rest goes on; False ends it, and what it raises is raised here."""
        if self.ended or not self._cadence.pause_s:
            return
        self._every_step, self._pour = False, pour
        self._cadence.join(self)
        try:
            await self._wait()
        finally:
            self._cadence.resting.discard(self)
            self._every_step, self._pour = True, None

    def let_go(self) -> bool:
        """At a beat: pour what has gathered, if anything has, or end the rest."""
        if not self._pending:
            return False
        try:
            if self._pour is None or self.ended or not self._pour():
                self._wake()
        except Exception as wrong:
            self._wake(wrong)
        return True

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

    def receive(self, active: ActiveRequest, piece: TokenDelta, now_s: float, telemetry: Telemetry) -> bool:
        """Take one token delta of a request; True where a stop string ended the choice here, so that the engine has to be told."""
        if piece.index in active.done or self.error is not None:
            return False  # ended a moment ago; the engine had not heard of it yet
        if piece.finish_reason in ("abort", "error") and self._lost(piece):
            return False
        active.measure(piece, now_s, telemetry)
        active.begun = self._begun = True
        delta = active.assembler.push(piece)
        finished: FinishReason | None = piece.finish_reason
        if delta is not None:
            if delta.error is not None:
                delta.stop_reason, delta.error = delta.error, None  # the choice's own end, not the call's
            self._pending.setdefault((piece.request_id, piece.index), []).append(delta)
            finished = delta.finish_reason or finished
        if finished is not None:
            self.unfinished -= 1
            active.finish(piece, finished, now_s, telemetry)
        if self._every_step or self.unfinished == 0:
            self._wake()
        return finished is not None and piece.finish_reason is None

    def settle(self) -> None:
        """A choice has ended that nothing more is taken of."""
        self.unfinished -= 1
        self._wake()

    def _lost(self, piece: TokenDelta) -> bool:
        """Whether such an end is that of the whole flight: nobody here asked for it, and no answer can come any more."""
        if piece.finish_reason == "abort":  # the engine saw the deadline pass
            self.fail(RequestTimeout(TIMED_OUT))
        elif piece.fault == "engine":
            # What broke may hold paths or other people's prompts: it goes to the log, not to the client.
            log.error("request %s failed: %s", piece.request_id, piece.error)
            self.fail(NotReady(STOPPED))
        elif piece.fault == "call" or (self.unfinished == 1 and not any(active.answered for active in self.actives.values())):
            self.fail((RayNeuronError if piece.fault == "choice" else RequestError)(piece.error or "it failed", param=piece.param))
        return self.error is not None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self, wrong: Exception | None = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None) if wrong is None else self._waiter.set_exception(wrong)


class Flights:
    """Every call in flight, `by_request`. All methods but `deliver` belong to the event loop; `engine` is set before a call comes.

    `sequences` counts choices that have not finished and `waiting_tokens` prompt tokens of requests that have not begun: admission decides
    on these, because unlike the engine's snapshot they are never a step late.
    """

    engine: Computes

    def __init__(self, telemetry: Telemetry, event_loop: asyncio.AbstractEventLoop, events_per_s: float = math.inf) -> None:
        self.sequences = self.waiting_tokens = 0
        self.closed: RayNeuronError | None = None
        self.telemetry, self._event_loop = telemetry, event_loop
        self.by_request: dict[str, Flight] = {}
        self._open: set[Flight] = set()
        self.cadence, self._events_per_s = Cadence(event_loop), events_per_s

    def __len__(self) -> int:
        return len(self._open)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        """What a step produced. Called on the engine thread, which it costs one wake-up of the event loop."""
        self._event_loop.call_soon_threadsafe(self.dispatch, deltas)

    def dispatch(self, deltas: list[TokenDelta]) -> None:
        """Sort one step's deltas into their flights."""
        now_s, tokens, prompt_tokens = time.monotonic(), 0, 0  # the latter of prompts whose prefill these deltas tell of
        for piece in deltas:
            tokens += len(piece.token_ids)
            flight = self.by_request.get(piece.request_id)
            if flight is None:
                continue  # its client has gone
            active, unfinished = flight.actives[piece.request_id], flight.unfinished
            waited = not active.begun
            try:
                if flight.receive(active, piece, now_s, self.telemetry):
                    self.engine.abort(piece.request_id, piece.index)
            except Exception:  # one call's text must not stop the delivery of the others'
                log.exception("request %s: its text could not be put together", piece.request_id)
                flight.fail(RayNeuronError("the text could not be put together; the server log has the details under this request's id"))
            self.sequences -= unfinished - flight.unfinished
            prompt_tokens += len(active.request.prompt_ids) if waited and active.begun else 0
        self.waiting_tokens -= prompt_tokens
        self.telemetry.step(tokens, prompt_tokens)
        if self.cadence.resting:
            self.cadence.step(now_s)

    def open(self, actives: Sequence[ActiveRequest]) -> Flight:
        """Hand a call's requests to the engine. Raises what the engine refuses them with; then nothing of the call remains."""
        if self.closed is not None or not self.engine.alive:
            raise self.closed or NotReady(STOPPED)  # what it died of is in the log
        flight = Flight(actives, self.cadence)
        self._open.add(flight)
        self._pace()
        self.sequences += flight.unfinished
        self.waiting_tokens += sum([len(active.request.prompt_ids) for active in actives])
        try:
            for active in actives:
                self.engine.submit(active.request)  # refuses an id in use, which is another flight's to keep
                self.by_request[active.request.id] = flight
                self.telemetry.asked(active.request)
        except BaseException:
            self.close(flight)
            raise
        if (deadline_s := actives[0].request.deadline_s) is not None:  # of the whole call
            flight.deadline = self._event_loop.call_later(max(0.0, deadline_s - time.monotonic()), flight.fail, RequestTimeout(TIMED_OUT))
        return flight

    def close(self, flight: Flight) -> None:
        """Forget a flight and abort what the engine still does for it. Harmless when it is complete or closed already."""
        if flight not in self._open:
            return
        self._open.discard(flight)
        self._pace()
        self.sequences -= flight.unfinished
        if flight.deadline is not None:
            flight.deadline.cancel()
        for active in flight.actives.values():
            if mine := self.by_request.get(active.request.id) is flight:
                del self.by_request[active.request.id]
            if not active.begun:
                self.waiting_tokens -= len(active.request.prompt_ids)
            if active.drop(flight.error is not None, self.telemetry) and mine:
                self.engine.abort(active.request.id)

    def _pace(self) -> None:
        """Few streams never rest, many so long that all write `events_per_s`: each event costs Serve's own proxy most of a millisecond."""
        pause_s = min(len(self._open) / self._events_per_s, LONGEST_PAUSE_S)
        self.cadence.pause_s = pause_s if pause_s >= SHORTEST_PAUSE_S else 0.0

    def fail_all(self, error: RayNeuronError) -> None:
        """The engine is gone: end every flight with `error`, and refuse new ones with it."""
        self.closed = error
        for flight in tuple(self._open):
            flight.fail(error)
