"""Blocks that nobody holds: the free ones, of which nothing is known, and the cached ones, which wait for who may need them again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import heappop, heappush


class Free:
    """The lowest go first. Those that nobody has ever held are the highest, and only counted: a prompt takes many of them at once.

    `count`: how many there are.
    """

    __slots__ = ("_all", "_back", "_held", "count")

    def __init__(self, blocks: int) -> None:
        self.count = blocks
        self._all = _numbers(blocks)
        self._held = 0  # so many of the first have been held
        self._back: list[int] = []  # a heap: of these, who came back

    def __iter__(self) -> Iterator[int]:
        yield from self._back
        yield from self._all[self._held :]

    def take(self, count: int) -> list[int]:
        """So many, which there are."""
        back, held = self._back, self._held
        self.count -= count
        taken = [heappop(back) for _ in range(min(count, len(back)))] if back else []
        if count > len(taken):
            self._held += count - len(taken)
            taken += self._all[held : self._held]
        return taken

    def give(self, block: int) -> None:
        """Nobody holds it any more."""
        heappush(self._back, block)
        self.count += 1


class Cached:
    """The longest free go first. Who is taken from between the others leaves an old place behind, which is skipped.

    `count`: how many there are.
    """

    __slots__ = ("_first", "_line", "_old", "count")

    def __init__(self) -> None:
        self._line: list[int] = []
        self._first = 0  # of the line that is still there
        self._old: dict[int, int] = {}  # block: how many of its places, the first ones, are old
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        old = dict(self._old)
        for block in self._line[self._first :]:
            if old.get(block):
                old[block] -= 1
            else:
                yield block

    def add(self, blocks: list[int]) -> None:
        """Nobody holds these any more, from now on."""
        self._line.extend(blocks)
        self.count += len(blocks)

    def leave(self, block: int) -> None:
        """Somebody holds one again."""
        self._old[block] = self._old.get(block, 0) + 1
        self.count -= 1
        if len(self._line) - self._first > 2 * self.count + 64:
            self._line, self._first, self._old = list(self), 0, {}

    def take(self, count: int) -> list[int]:
        """So many, which there are."""
        self.count -= count
        line, old, first = self._line, self._old, self._first
        taken: list[int] = [] if old else line[first : first + count]
        first += len(taken)
        while len(taken) < count:
            block = line[first]
            first += 1
            if not (places := old.get(block)):
                taken.append(block)
            elif places == 1:
                del old[block]
            else:
                old[block] = places - 1
        self._first = first
        if first > 64 + len(line) // 2:
            del line[:first]
            self._first = 0
        return taken

    def clear(self) -> list[int]:
        """Those there were; there are none any more."""
        there = list(self)
        self._line, self._first = [], 0
        self._old.clear()
        self.count = 0
        return there


@lru_cache(maxsize=8)
def _numbers(count: int) -> tuple[int, ...]:
    """One object each for all stores: a fleet of simulated ones looks at the same."""
    return tuple(range(count))
