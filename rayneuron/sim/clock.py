"""Virtual time: calls in the order of their times, and of their making where these are equal."""

from __future__ import annotations

import gc
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any


class Clock:
    """Nothing happens between two calls, so time jumps from one to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call something then."""
        self._made += 1
        heappush(self._calls, (when_s, self._made, call, args))

    @property
    def next_s(self) -> float:
        """When something is called next; inf: nothing is."""
        return self._calls[0][0] if self._calls else inf

    def run(self, until_s: float | None = None) -> None:
        """Until nothing is left to be called, or not before a time."""
        calls, until_s, collects = self._calls, inf if until_s is None else until_s, gc.isenabled()
        gc.disable()  # what ends here goes in no circles, and looking through a large fleet again and again takes a third of the time
        try:
            while calls and calls[0][0] <= until_s:
                self.now_s, _, call, args = heappop(calls)
                call(*args)
        finally:
            if collects:
                gc.enable()
