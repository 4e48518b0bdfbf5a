"""Stop strings found in a growing text, withholding no more than what may still become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """The stop strings of a request as one automaton (Aho, Corasick 1975), shared by its choices; memory and time linear in their length.

    A state is the longest end of the text so far that begins a stop string; state 0 is none.
    """

    __slots__ = ("depths", "firsts", "found", "inner", "_edges", "_fails")

    def __init__(self, stops: Iterable[str]) -> None:
        self._edges: dict[tuple[int, str], int] = {}
        self._fails, self.depths = [0], [0]  # where to go on when no edge fits; characters of each state
        self.found: list[str | None] = [None]  # the longest stop string that is complete in each state
        self.inner = [True]  # whether a state begins a longer stop string
        for stop in stops:
            self._write(stop)
        self.firsts = frozenset(char for state, char in self._edges if state == 0)
        self._link()

    def follow(self, state: int, char: str) -> int:
        """The state after one more character."""
        edges = self._edges
        while (state, char) not in edges:
            if state == 0:
                return 0
            state = self._fails[state]
        return edges[state, char]

    def beginning(self, state: int) -> int:
        """The state as far as it may still become a stop string: less where it is one already that nothing continues."""
        while not self.inner[state]:
            state = self._fails[state]
        return state

    def _write(self, stop: str) -> None:
        state = 0
        for char in stop:
            self.inner[state] = True
            following = self._edges.setdefault((state, char), len(self.depths))
            if following == len(self.depths):
                self.depths.append(self.depths[state] + 1)
                self._fails.append(0)
                self.found.append(None)
                self.inner.append(False)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        children: dict[int, list[tuple[str, int]]] = {}
        for (state, char), following in self._edges.items():
            children.setdefault(state, []).append((char, following))
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for char, following in children.get(state, ()):
                if state:
                    self._fails[following] = self.follow(self._fails[state], char)
                self.found[following] = self.found[following] or self.found[self._fails[following]]
                waiting.append(following)


class Stops:
    """Scans text that arrives in pieces for the stop string that is complete first (the longest, if several end at the same character).

    The outcome depends on the text alone, not on how it was cut into pieces. With `include` the match stays in the text and nothing is
    withheld.
    """

    __slots__ = ("_include", "_state", "_stops", "_tail")

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._tail = ""  # the longest end of the text so far that begins a stop string

    def push(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """Text that may go out now, and the stop string this piece completed. `armed` False: this piece completes none (min_tokens)."""
        stops, state = self._stops, self._state
        if not state and stops.firsts.isdisjoint(piece):  # nearly every piece
            return piece, None
        known = 0 if self._include else len(self._tail)
        text = piece if self._include else self._tail + piece
        for place, char in enumerate(piece, known + 1):
            state = stops.follow(state, char)
            found = stops.found[state]
            if found is not None:
                if armed:
                    self._state, self._tail = 0, ""
                    return text[: place if self._include else place - len(found)], found
                state = stops.beginning(state)
        self._state = state
        keep = 0 if self._include else stops.depths[state]
        self._tail = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was withheld, at the end of a text without a match."""
        tail, self._tail, self._state = self._tail, "", 0
        return tail
