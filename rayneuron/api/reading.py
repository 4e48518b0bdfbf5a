"""Text that comes in parts, read with as much of a look ahead as settles what it is: the same however it is cut."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Literal

HEAD = 256  # characters of a key or a name at most, and of what stands before arguments
MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
PYTHON_MARKS = re.compile(r"""\\.|["'(){}\[\]]""", re.DOTALL)
EventKind = Literal["content", "reasoning", "call", "arguments"]
Sighting = tuple[str, int]  # what was found, and the place behind it; "": nothing
Steps = Generator[None, None, Sighting]  # of reading: each pause waits for more text


class Lookahead(ABC):
    """What has come and is not told yet, from its beginning; `_last`: nothing will follow."""

    __slots__ = ("_last", "_text")

    def __init__(self) -> None:
        self._text, self._last = "", False

    @abstractmethod
    def _tell(self, kind: EventKind, end: int) -> None:
        """Give the text up to `end` out."""

    def _next(self, at: int, *wanted: str) -> Steps:
        """Which of these comes next, behind white space."""
        while True:
            rest = self._text[at:].lstrip()
            found = next((each for each in wanted if rest.startswith(each)), "")
            if found:
                return found, len(self._text) - len(rest) + len(found)
            if self._last or (rest and not any(each.startswith(rest) for each in wanted)):
                return "", at
            yield

    def _match(self, pattern: re.Pattern[str], at: int) -> Steps:
        """What a pattern finds here, at most HEAD characters of it."""
        while True:
            found = pattern.match(self._text, at, at + HEAD)
            if found:
                return found[0], found.end()
            if self._last or len(self._text) - at >= HEAD:
                return "", at
            yield

    def _space(self, at: int) -> Generator[None, None, int]:
        """The place behind white space."""
        yield from self._next(at)
        return len(self._text) - len(self._text[at:].lstrip())

    def _span(self, at: int, given: bool, depth: int = 0, marks: re.Pattern[str] = MARKS) -> Steps:
        """An object or a list whose bracket is here, or `depth` of which are open; `given`: it is given out as it comes."""
        quote, start = "", at
        while True:
            end = at
            for found in marks.finditer(self._text, at):
                mark, end = found[0], found.end()
                if mark in "\"'":
                    quote = mark if not quote else "" if quote == mark else quote
                elif not quote and len(mark) == 1:
                    depth += 1 if mark in "{[(" else -1
                    if depth == 0:
                        if given:
                            self._tell("arguments", end)
                        return "}", 0 if given else end
            at = len(self._text) - (end < len(self._text) and self._text.endswith("\\") and not self._last)
            if given:
                self._tell("arguments", at)
                at = 0
            if self._last:
                return "", start if not given else 0
            yield
