"""One thread that owns a state: everybody puts on its desk what has happened, it does one thing after another, and looks at the clock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from rayneuron.wire import TICK_S

log = logging.getLogger(__name__)


class Clerk:
    """`tick` is called with the time every TICK_S, or `often_s` while `busy`. What fails is logged, and the next thing done."""

    def __init__(self, name: str, tick: Callable[[float], None], busy: Callable[[], bool], often_s: float = TICK_S) -> None:
        self._tick, self._busy, self._often_s = tick, busy, often_s
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._over: Callable[[], bool] = lambda: False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, what: Callable[..., None], *args: Any) -> None:
        """Have it done. From any thread, and never waits."""
        self._inbox.put(partial(what, *args))

    def close(self, over: Callable[[], bool]) -> None:
        """Go on until `over`, and nothing lies here any more; waits for that."""
        self._over = over
        self._inbox.put(lambda: None)
        self._thread.join()

    def _run(self) -> None:
        ticked = time.monotonic()
        while not (self._over() and self._inbox.empty()):
            every_s = self._often_s if self._busy() else TICK_S
            try:
                self._inbox.get(timeout=every_s)()
                if (now := time.monotonic()) < ticked + every_s:
                    continue
            except Empty:
                now = time.monotonic()
            except Exception:
                log.exception("a message could not be followed")
                continue
            ticked = now
            try:
                self._tick(now)
            except Exception:
                log.exception("the clock could not be followed")
