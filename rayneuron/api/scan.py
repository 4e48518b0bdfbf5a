"""What a model writes, told apart: content, reasoning, calls of tools; the same events however the text is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

# Names are vLLM's. Where a call begins and ends; where reasoning does.
TOOLS = {"hermes": ("<tool_call>", "</tool_call>")}
THINK, THOUGHT = "<think>", "</think>"


class Event(NamedTuple):
    """A part of an answer: `text` is content, reasoning, or a call's arguments exactly as the model wrote them."""

    kind: Literal["content", "reasoning", "call"]
    text: str
    name: str = ""


class Scan(NamedTuple):
    """What is looked for. `opened`: the prompt ends inside reasoning.

    `shown`: whether reasoning is for the client; `many`: whether calls after the first are.
    """

    tools: str | None = None
    reasoning: str | None = None
    opened: bool = False
    shown: bool = True
    many: bool = True

    @property
    def on(self) -> bool:
        """Whether anything is."""
        return self.tools is not None or self.reasoning is not None

    @property
    def inside(self) -> bool:
        """Whether an answer begins inside reasoning."""
        return self.opened or self.reasoning == "deepseek_r1"


class _Said(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class Scanner:
    """One choice, which has made `calls` so far. What may become a marker waits, and a call until it is whole: broken, it is content."""

    __slots__ = ("_begin", "_end", "_last", "_scan", "_state", "_waiting", "calls")

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._begin, self._end = TOOLS.get(scan.tools or "", ("", ""))
        self._state: Callable[[], list[Event] | None] = self._content if scan.reasoning is None else self._start
        self._waiting = ""
        self.calls = 0
        self._last = False

    def push(self, text: str, last: bool = False) -> list[Event]:
        """The events `text` completes; with the `last` of it, all that are left."""
        self._waiting += text
        self._last = last
        events: list[Event] = []
        while (found := self._state()) is not None:
            events += found
        return [event for event in events if event.text and (event.kind != "reasoning" or self._scan.shown)]

    def _start(self) -> list[Event] | None:
        """Before anything: a marker of reasoning, which may be left out where the prompt or the format has begun it."""
        begun = self._waiting.lstrip()
        if begun.startswith(THINK):
            self._waiting, self._state = begun.removeprefix(THINK), self._reasoning
        elif THINK.startswith(begun) and not self._last:
            return None
        else:
            self._state = self._reasoning if self._scan.inside else self._content
        return []

    def _reasoning(self) -> list[Event] | None:
        before, found = self._until(THOUGHT)
        if found:
            self._state = self._content
        return [Event("reasoning", before)] if before or found else None

    def _content(self) -> list[Event] | None:
        before, found = self._until(self._begin)
        if found:
            self._state = self._call
        return [Event("content", before)] if before or found else None

    def _call(self) -> list[Event] | None:
        body, found, rest = self._waiting.partition(self._end)
        if not (found or self._last):
            return None
        self._waiting, self._state = rest, self._between
        try:
            said = msgspec.json.decode(body, type=_Said)
            arguments = bytes(said.arguments)
            if isinstance(msgspec.json.decode(arguments), dict):
                if self.calls and not self._scan.many:
                    return []
                self.calls += 1
                return [Event("call", arguments.decode(), said.name)]
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            pass
        self._state = self._content
        return [Event("content", self._begin + body + found)]

    def _between(self) -> list[Event] | None:
        """Behind a call: white space there is nobody's."""
        self._waiting = self._waiting.lstrip()
        if not self._waiting:
            return None
        self._state = self._content
        return []

    def _until(self, marker: str) -> tuple[str, bool]:
        """What is before the marker, and whether it is there; its possible beginning stays."""
        place = self._waiting.find(marker) if marker else -1
        if place >= 0:
            before, self._waiting = self._waiting[:place], self._waiting[place + len(marker) :]
            return before, True
        held = 0 if self._last else next((n for n in range(len(marker) - 1, 0, -1) if self._waiting.endswith(marker[:n])), 0)
        cut = len(self._waiting) - held
        before, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return before, False
