"""When streams that rest write: all at once and behind a step, so that nothing a step gave waits for the next without need."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

SHORTEST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.06  # what a reader does not notice


class Rests(Protocol):
    """A stream between two writes."""

    def let_go(self) -> bool:
        """Write what has gathered, if anything has, or end the rest; whether anything had."""


class Cadence:
    """One clock for all streams: a write costs less among others, and a timer each would cost as much as the writes.

    `pause_s`: between two beats, at least; 0: nobody rests.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.pause_s = 0.0
        self.resting: set[Rests] = set()
        self._event_loop = event_loop
        self._last_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(self, stream: Rests) -> None:
        """A stream has written, and rests until the next beat; what has gathered meanwhile waits no longer than the longest pause."""
        self.resting.add(stream)
        self._within(LONGEST_PAUSE_S)

    def step(self, now_s: float) -> None:
        """What a step gave has been sorted: a beat, where the last one is long enough ago; else what has gathered waits only so long."""
        if now_s - self._last_s >= self.pause_s:
            self._strike()
        else:
            self._within(self.pause_s)

    def _within(self, most_s: float) -> None:
        if self._timer is None:
            self._timer = self._event_loop.call_later(most_s, self._strike)

    def _strike(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if any([stream.let_go() for stream in tuple(self.resting)]):
            self._last_s = time.monotonic()
