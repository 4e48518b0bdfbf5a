"""Names and seeds of requests, fixed where they are made, so that whoever else goes on with one draws the same."""

from __future__ import annotations

import random

from rayneuron.types import Request


class Seeds:
    """Fixes the seeds of requests where they are made: their parameters', else one after another from `first`, else drawn.

    What is drawn begins with the system's own randomness, and asks for no more of it: each time other threads would take the interpreter.
    """

    def __init__(self, first: int | None) -> None:
        self._first = first
        self._made = 0
        self._drawn = random.Random()

    def name(self) -> str:
        """A request id that nobody else has: 32 hexadecimal digits."""
        return f"{self._drawn.getrandbits(128):032x}"

    def fix(self, request: Request) -> None:
        """Give a request its seed; choices count on from it."""
        if request.seed is None:
            drawn = self._drawn.getrandbits(62) if self._first is None else self._first + 0x9E37 * self._made
            request.seed = drawn if request.params.seed is None else request.params.seed
        self._made += request.params.n
