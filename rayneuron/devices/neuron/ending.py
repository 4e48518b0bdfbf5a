"""How long work is told of and ended: signs of life of what tells nobody, and compilers that go on without whoever started them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayneuron.errors import CompileError
from rayneuron.processes import kill_started_by


class Unwanted(threading.Event):
    """Set where a build is not wanted any more: no graph is begun, and the compilers that it has started are killed."""

    def __init__(self) -> None:
        super().__init__()
        self._threads: set[int] = set()  # whose children are compilers

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What this thread starts inside is a compiler."""
        self._threads.add(threading.get_native_id())
        try:
            yield
        finally:
            self._threads.discard(threading.get_native_id())

    def set(self) -> None:
        """End it. Again for whatever was started in the very moment."""
        super().set()
        for thread in tuple(self._threads):
            kill_started_by(os.getpid(), thread)

    def check(self) -> None:
        """Raise CompileError where it is set."""
        if self.is_set():
            raise CompileError("compiling was ended: nobody waits for it any more")


class Ticker:
    """Calls `tell` every second, on a thread, while something is at work that tells nobody. What `tell` raises is raised at the end."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._ended = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rayneuron-ticker", daemon=True)

    def _run(self) -> None:
        try:
            while not self._ended.wait(1.0):
                self._tell()
        except BaseException as problem:
            self._problem = problem

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._problem is not None and kind is None:
            raise self._problem
