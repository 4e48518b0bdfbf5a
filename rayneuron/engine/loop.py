"""The engine's own thread: takes requests and aborts from any thread, steps while there is work, delivers once a step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rayneuron.engine.commit import FAILED
from rayneuron.engine.remote import Loan
from rayneuron.errors import NotReady, RequestError
from rayneuron.news import KvNews
from rayneuron.types import Request, Snapshot, TokenDelta

if TYPE_CHECKING:
    from rayneuron.engine.engine import Engine
    from rayneuron.engine.timing import StepInfo

log = logging.getLogger(__name__)

Deliver = Callable[[list[TokenDelta]], None]
Made = TypeVar("Made")

AUDIT_STEPS = 1000
TICK_S = 0.05  # how late a deadline may be seen while there is nothing to do but wait for others


class EngineLoop:
    """Runs one engine. `deliver` is called on the engine thread once a step with every delta of the step; it must not block.

    `submit` refuses at once (RequestError, NotReady); after it returned, the request ends with a last delta a choice. Who may come in is
    not asked here, but once a call, by whoever knows the calls (`policies.admission`).
    """

    def __init__(self, engine: Engine, deliver: Deliver, on_step: Callable[[StepInfo], None] | None = None) -> None:
        self.engine = engine
        self.error: str | None = None
        self._deliver = deliver
        self._on_step = on_step
        self._commands: deque[Callable[[], list[TokenDelta] | None]] = deque()  # in the order they came; deltas are delivered
        self._coming: set[str] = set()  # ids of requests in there
        self._turn: Callable[[bool], None] | None = None  # what waits for the end of all that has come; whether it may still be done
        self._later: list[tuple[str, Callable[[], list[TokenDelta] | None]]] = []  # by request: what waits for that
        self._turning = False
        self._wake = threading.Event()
        self._admission = threading.Lock()
        self._closing = False
        self._audited = 0  # steps then
        if engine.scheduler.prefills is not None:
            engine.scheduler.prefills.wake = self._wake.set
        engine.constraining.on_ready(self._wake.set)
        self._thread = threading.Thread(target=self._run, name="rayneuron-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once a step failed or the thread ended."""
        return self.error is None and self._thread.is_alive()

    def submit(self, request: Request, loan: Loan | None = None) -> None:
        """Hand over a request, maybe on `loan` to somebody else. Raises RequestError or NotReady without waiting for the running step."""
        self.engine.validate(request)
        with self._admission:
            if self._closing or not self.alive:
                raise NotReady(self.error or "the engine is closed")
            if request.id in self._coming or self.engine.knows(request.id):
                raise RequestError(f"request id {request.id!r} is in use", param="request_id")
            self._coming.add(request.id)
            self._command(partial(self._add, request, loan))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its choices before the next step; ids that are unknown or finished are no error."""
        self._command(partial(self._abort, request_id, index))

    def unpin(self, ticket: bytes) -> None:
        """Give back what a lent prompt holds, before the next step."""
        self._command(partial(self.engine.unpin, ticket))

    def ask(self, what: Callable[[Engine], Made]) -> Future[Made]:
        """What the engine's own thread says between two steps. Raises NotReady."""
        answer: Future[Made] = Future()

        self._ask(lambda: self._answer(answer, what))
        return answer

    def drained(self, what: Callable[[Engine], Made]) -> Future[Made]:
        """What the engine's own thread says once all that came before has ended; whoever comes later waits for it. Raises NotReady, and its
        answer does where another waits already."""
        answer: Future[Made] = Future()

        def turn(alive: bool) -> None:
            if alive:
                self._answer(answer, what)
            elif not answer.cancelled():
                answer.set_exception(NotReady("the engine is closed"))

        def begin() -> None:
            if self._turn is not None:
                answer.set_exception(NotReady("another change waits for the requests under way"))
            else:
                self._turn = turn

        self._ask(begin)
        return answer

    def _answer(self, answer: Future[Made], what: Callable[[Engine], Made]) -> None:
        if answer.set_running_or_notify_cancel():  # else nobody waits for it any more
            try:
                answer.set_result(what(self.engine))
            except Exception as wrong:
                answer.set_exception(wrong)

    def _ask(self, command: Callable[[], None]) -> None:
        with self._admission:
            if self._closing or not self.alive:
                raise NotReady(self.error or "the engine is closed")
            self._command(command)

    def news(self, epoch: int, number: int) -> Future[KvNews | None] | None:
        """What whoever knows the prefixes kept here up to `number` of `epoch` lacks; None where that is nothing."""
        kept = self.engine.scheduler.blocks.log
        if kept is None or (kept.epoch, kept.number) == (epoch, number) or not self.alive:
            return None
        return self.ask(lambda engine: engine.scheduler.blocks.news(epoch, number))

    def snapshot(self) -> Snapshot:
        """The engine's load, without the requests not taken in yet."""
        return self.engine.snapshot()

    def taken(self, request_id: str) -> bool:
        """Whether a request that was submitted is in the engine's books, or over."""
        return request_id not in self._coming

    def pending(self) -> bool:
        """Whether there is anything to do: what a health check holds against the age of the last step."""
        return (bool(self._coming) or self.engine.has_work) and not self._turning

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort what is left, stop the thread and close the engine. What has not ended within the time is said in the log."""
        with self._admission:
            self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            load = self.engine.snapshot()
            log.error(
                "the engine has not closed within %g s: a step of %d running sequences has not ended, or nobody takes what it delivers;"
                " its thread, weights and ranks stay until it does", timeout_s, load.running,
            )  # fmt: skip

    def _command(self, command: Callable[[], list[TokenDelta] | None]) -> None:
        """Have the engine's thread do something before its next step."""
        self._commands.append(command)
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._closing:
                if self._turn is not None and not self.engine.has_work:
                    self._take_turn(True)
                elif not (self.engine.has_work or self._commands):
                    self._audit()
                    self._wake.wait()
                elif self.engine.waits and not self._commands:
                    self._wake.wait(TICK_S)
                self._wake.clear()
                self._tell(self._take())
                if self.engine.has_work:
                    steps = self.engine.steps
                    self._tell(self.engine.step())
                    if self._on_step is not None and self.engine.steps > steps:
                        self._on_step(self.engine.info)
            self._finish("the engine is shutting down")
        except Exception as error:
            # A failed step leaves the KV in an unknown state: nobody's tokens can be trusted, so everybody is told and health fails.
            log.exception("the engine step failed")
            self.error = f"{type(error).__name__}: {error}"
            self._finish(self.error)
        finally:
            self.engine.close()

    def _audit(self) -> None:
        """Where there is nothing else to do, see whether the books balance; not after every request."""
        if self.engine.steps < self._audited + AUDIT_STEPS:
            return
        self._audited = self.engine.steps
        try:
            self.engine.check_ledger()
        except AssertionError:
            self.engine.ledger_wrong += 1
            log.exception("the ledger of the KV does not balance")

    def _take(self) -> list[TokenDelta]:
        """Do what was asked for, in order."""
        deltas: list[TokenDelta] = []
        while self._commands:
            deltas += self._commands.popleft()() or ()
        return deltas

    def _take_turn(self, alive: bool) -> None:
        """Do what has waited for this moment, then what has waited for that."""
        turn, self._turn, self._turning = self._turn, None, True
        if turn is not None:
            turn(alive)
        self._commands.extendleft(command for _, command in reversed(self._later))
        self._later, self._turning = [], False

    def _abort(self, request_id: str, index: int | None) -> list[TokenDelta] | None:
        if any(name == request_id for name, _ in self._later):
            self._later.append((request_id, partial(self._abort, request_id, index)))
        else:
            self.engine.abort(request_id, index)
        return None

    def _add(self, request: Request, loan: Loan | None) -> list[TokenDelta]:
        if self._turn is not None:
            self._later.append((request.id, partial(self._add, request, loan)))
            return []
        with self._admission:  # in between nobody would know it, and somebody else could take its id
            self._coming.discard(request.id)
            try:
                self.engine.add(request, loan)
            except Exception as wrong:  # `validate` had let it pass; whatever this is, it is about this request alone
                failed = [TokenDelta(request.id, index, [], finish_reason="error") for index in range(request.params.n)]
                gone = wrong if isinstance(wrong, RequestError) else None  # what it names was there a moment ago
                if gone is None:
                    log.exception("request %s could not be added", request.id)
                for delta in failed:
                    delta.error, delta.fault = (FAILED, "choice") if gone is None else (gone.message, "call")
                    delta.param = None if gone is None else gone.param
                return failed
        return []

    def _finish(self, why: str) -> None:
        with self._admission:
            self._closing = True
        deltas = self._take()
        self._take_turn(False)
        deltas += self._take() + self.engine.fail(why)  # whoever has just come in is told as well
        try:
            self._tell(deltas)
        except Exception as gone:
            log.warning("%d choices ended with %r, and nobody is left to hear of it: %s", len(deltas), why, gone)

    def _tell(self, deltas: list[TokenDelta]) -> None:
        if deltas:
            self._deliver(deltas)
