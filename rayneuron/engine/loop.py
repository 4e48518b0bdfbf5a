"""The engine's own thread: takes requests and aborts from any thread, steps while there is work, delivers once a step."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rayneuron.errors import NotReady, RayNeuronError
from rayneuron.types import Request, Snapshot, TokenDelta

if TYPE_CHECKING:
    from rayneuron.engine.engine import Engine, StepInfo

log = logging.getLogger(__name__)

Deliver = Callable[[list[TokenDelta]], None]


class EngineLoop:
    """Runs one engine. `deliver` is called on the engine thread once a step with every delta of the step; it must not block.

    `submit` refuses at once (RequestError, Busy, NotReady); after it returned, the request ends with a last delta a choice.
    """

    def __init__(self, engine: Engine, deliver: Deliver, on_step: Callable[[StepInfo], None] | None = None) -> None:
        self.engine = engine
        self.error: str | None = None
        self._deliver = deliver
        self._on_step = on_step
        self._inbox: deque[Request] = deque()
        self._aborts: deque[tuple[str, int | None]] = deque()
        self._wake = threading.Event()
        self._admission = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rayneuron-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once a step failed or the thread ended."""
        return self.error is None and self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Hand over a request. Raises RequestError, Busy or NotReady without waiting for the running step."""
        self.engine.validate(request)
        with self._admission:
            if self._closing or not self.alive:
                raise NotReady(self.error or "the engine is closed", retry_after_s=self.engine.limits.retry_after_s)
            waiting = tuple(self._inbox)
            self.engine.admit(len(waiting), sum(len(r.prompt_ids) for r in waiting))
            self._inbox.append(request)
        self._wake.set()

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its choices before the next step; ids that are unknown or finished are no error."""
        self._aborts.append((request_id, index))
        self._wake.set()

    def snapshot(self) -> Snapshot:
        """The engine's load, without the requests not taken in yet."""
        return self.engine.snapshot()

    def pending(self) -> bool:
        """Whether there is anything to do: what a health check holds against the age of the last step."""
        return bool(self._inbox) or self.engine.has_work

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort what is left, stop the thread and close the engine."""
        with self._admission:
            self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing:
                if not (self.engine.has_work or self._inbox):
                    self._wake.wait()
                self._wake.clear()
                self._take()
                if self.engine.has_work:
                    deltas = self.engine.step()
                    if deltas:
                        self._deliver(deltas)
                    if self._on_step is not None:
                        self._on_step(self.engine.info)
            self._finish("the engine is shutting down")
        except Exception as error:
            # A failed step leaves the KV in an unknown state: nobody's tokens can be trusted, so everybody is told and health fails.
            log.exception("the engine step failed")
            self.error = f"{type(error).__name__}: {error}"
            self._finish(self.error)
        self.engine.close()

    def _take(self) -> None:
        while self._inbox:
            request, wrong = self._inbox[0], ""
            with self._admission:  # in between it would count twice, and somebody be refused for whom there is room
                try:
                    self.engine.add(request)
                except RayNeuronError as error:
                    wrong = str(error)
                self._inbox.popleft()
            if wrong:
                self._deliver([_refused(request, i, wrong) for i in range(request.params.n)])
        while self._aborts:
            self.engine.abort(*self._aborts.popleft())

    def _finish(self, why: str) -> None:
        with self._admission:
            self._closing = True
            left = list(self._inbox)
            self._inbox.clear()
        deltas = self.engine.fail(why)
        deltas += [_refused(request, i, why) for request in left for i in range(request.params.n)]
        if deltas:
            self._deliver(deltas)


def _refused(request: Request, index: int, why: str) -> TokenDelta:
    return TokenDelta(request.id, index, [], finish_reason="error", error=why)
