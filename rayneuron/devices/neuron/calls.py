"""Calls into the Neuron runtime, on a thread of their own: it waits for ever for ranks of another process that is gone.

Whoever gives up leaves the thread behind, inside the runtime, until the process ends. Torch gives the interpreter back meanwhile.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from rayneuron.errors import WorkerLost

Made = TypeVar("Made")

TELL_S = 1.0
_IDLE_SHARE = 0.05  # of a processor: what the rest of a process takes while the runtime waits


class Calls:
    """One call at a time. `load_s`: how long loading may do nothing; `step_s`: how long any other call may take."""

    def __init__(self) -> None:
        self.load_s = self.step_s = threading.TIMEOUT_MAX
        self._asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None  # of what runs, or ran last
        self._over = ""  # why nothing is called any more
        self._thread: threading.Thread | None = None

    def __call__(self, work: Callable[[], Made]) -> Made:
        """What `work` gives. Raises what it raises, and WorkerLost where it was given up."""
        future = self._begun(work)
        try:
            return future.result(self.step_s)
        except TimeoutError:
            if future.done():
                return future.result()
            return self._given_up(future, f"a call into the Neuron runtime has not ended within {self.step_s:g} s")

    def load(self, work: Callable[[], Made], tell: Callable[[], None]) -> Made:
        """The same of work that takes as long as it takes, while it does something; `tell` is called every second, and may raise."""
        future, seen, since = self._begun(work), _used(), time.monotonic()
        while True:
            try:
                return future.result(TELL_S)
            except TimeoutError:
                if future.done():
                    return future.result()
            try:
                tell()
            except BaseException as problem:
                self.abort(str(problem))
                raise
            used, now = _used(), time.monotonic()
            if used[0] - seen[0] > _IDLE_SHARE * (now - since) or used[1] != seen[1]:
                seen, since = used, now
            elif now - since > self.load_s:
                return self._given_up(future, f"the Neuron runtime has loaded nothing for {self.load_s:g} s: the other ranks are awaited")

    def abort(self, why: str = "a rank of another process is gone") -> None:
        """End the wait, and everyone after it. For any thread."""
        with self._lock:
            self._over = self._over or why
            if self._future is not None and not self._future.done():
                self._future.set_exception(WorkerLost(self._over))

    def close(self) -> None:
        """End the thread, once it is back."""
        self._asked.put(None)

    def _begun(self, work: Callable[[], Made]) -> Future[Made]:
        future: Future[Made] = Future()
        with self._lock:
            if self._over:
                raise WorkerLost(self._over)
            self._future = future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rayneuron-runtime", daemon=True)
                self._thread.start()
        self._asked.put((future, work))
        return future

    def _given_up(self, future: Future[Made], why: str) -> Made:
        self.abort(why)
        return future.result()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, work = asked
            try:
                result, problem = work(), None
            except BaseException as raised:
                result, problem = None, raised
            with self._lock:
                if future.done():
                    return  # it was given up, and whoever would call again is refused
                future.set_exception(problem) if problem is not None else future.set_result(result)
            del asked, future, work, result, problem


def _used() -> tuple[float, int]:
    """Processor time of this process, and what it has read from disks."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_inblock
