"""What a model writes, told apart: content, reasoning, calls of tools; the same events however the text is cut."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple

import msgspec

from rayneuron.api.forms import FORMS, THINK, THOUGHT, CallForm, read_python
from rayneuron.api.reading import PYTHON_MARKS, EventKind, Lookahead, Steps

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,}\]]+(?=[\s,}\]])")
_CALLED = re.compile(r"[A-Za-z_][\w.]*\(")
_NAMED = re.compile(r"\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def _nobody(parser: str, whole: int, broken: int) -> None:
    """Nobody counts."""


class Event(NamedTuple):
    """A part of an answer: content, reasoning, a call of `name` that begins, or `arguments` of it exactly as the model wrote them."""

    kind: EventKind
    text: str
    name: str = ""


class Scan(NamedTuple):
    """What is looked for. `opened`: the prompt ends inside reasoning.

    `shown`: whether reasoning is for the client; `many`: whether calls after the first are. `kept`: special tokens that are markers.
    `counted`: told of each answer with calls how many are whole, and how many are not.
    """

    tools: str | None = None
    reasoning: str | None = None
    opened: bool = False
    shown: bool = True
    many: bool = True
    kept: frozenset[int] = frozenset()
    counted: Callable[[str, int, int], None] = _nobody

    @property
    def on(self) -> bool:
        """Whether anything is."""
        return self.tools is not None or self.reasoning is not None

    @property
    def inside(self) -> bool:
        """Whether an answer begins inside reasoning."""
        return self.opened or self.reasoning == "deepseek_r1"

    @property
    def marks(self) -> tuple[str, ...]:
        """What markers it looks for."""
        return (*(FORMS[self.tools].marks if self.tools else ()), *((THINK, THOUGHT) if self.reasoning else ()))

    def call_id(self, prefix: str, of: str, number: int) -> str:
        """The id of a call of the choice `of`."""
        if self.tools and FORMS[self.tools].short_ids:
            return hashlib.sha256(f"{of}-{number}".encode()).hexdigest()[:9]
        return f"{prefix}{of}-{number}"


class Scanner(Lookahead):
    """One choice, which has begun `calls` so far, of which so many are `whole`.

    What may become a marker waits, and a call until its name is known and its arguments begin; what turns out to be none is content. Then
    its arguments come as they are written, and end where their object does.
    """

    __slots__ = ("_events", "_form", "_reading", "_scan", "calls", "phase", "whole")

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._form = FORMS[scan.tools] if scan.tools else None
        super().__init__()
        self._events: list[Event] = []
        self._reading = self._answer()
        self.calls = self.whole = 0
        self.phase: Literal["start", "reasoning", "answer"] = "start" if scan.reasoning is not None else "answer"

    def push(self, text: str, last: bool = False) -> list[Event]:
        """The events `text` completes; with the `last` of it, all that are left."""
        self._text += text
        self._last = last
        next(self._reading, None)
        if last and self.calls and self._scan.tools:
            self._scan.counted(self._scan.tools, self.whole, (self.calls if self._scan.many else 1) - self.whole)
        events, self._events = self._events, []
        return events

    def _tell(self, kind: EventKind, end: int, name: str = "") -> None:
        text, self._text = self._text[:end], self._text[end:]
        if kind in ("call", "arguments"):
            heard = self._scan.many or self.calls <= 1
        else:
            heard = bool(text) and (kind != "reasoning" or self._scan.shown)
        if heard and (text or kind == "call"):
            self._events.append(Event(kind, text, name))

    def _answer(self) -> Generator[None, None, None]:
        if self._scan.reasoning is not None:
            found, at = yield from self._next(0, THINK)
            if found:
                self._text = self._text[at:]
            if found or self._scan.inside:
                self.phase = "reasoning"
                yield from self._until("reasoning", THOUGHT)
            self.phase = "answer"
        form = self._form
        if form is not None and form.bare:
            found, at = yield from self._next(0, form.bare, *([form.begin] if form.begin else []))
            if found == form.bare:
                yield from self._calls(form, "")
        while (yield from self._until("content", form.begin if form is not None else "")):
            assert form is not None
            yield from self._calls(form, form.begin)

    def _until(self, kind: Literal["content", "reasoning"], marker: str) -> Generator[None, None, bool]:
        """Give text out as it comes up to a marker, which is taken off; whether it came."""
        while True:
            place = self._text.find(marker) if marker else -1
            if place >= 0:
                self._tell(kind, place)
                self._text = self._text[len(marker) :]
                return True
            held = 0 if self._last else next((n for n in range(len(marker) - 1, 0, -1) if self._text.endswith(marker[:n])), 0)
            self._tell(kind, len(self._text) - held)
            if self._last:
                return False
            yield

    def _calls(self, form: CallForm, marker: str) -> Generator[None, None, None]:
        """All calls behind a marker; where there is none it was content."""
        before = self.calls
        opened = ""
        if form.listed:
            opened, at = yield from self._next(0, "[")
        else:
            at = 0
        while True:
            if not (yield from self._one(form, at, bool(opened))):
                if self.calls == before:
                    self._text = marker + self._text
                    self._tell("content", max(len(marker), 1))
                    return
                break
            found, at = yield from self._next(0, *(",]" if opened else form.between))
            if found in ("]", ""):
                self._text = self._text[at:]
                break
        if form.end:
            found, at = yield from self._next(0, form.end)
            self._text = "" if not found and form.end.startswith(self._text.lstrip()) else self._text[at:]  # cut within it, or behind
        while not self._text.lstrip() and not self._last:  # white space behind calls is nobody's
            yield
        self._text = self._text.lstrip()

    def _one(self, form: CallForm, at: int, opened: bool) -> Generator[None, None, bool]:
        """One call. False where it is none, and then nothing is taken off."""
        if not form.keys:
            return (yield from self._python(at))
        return (yield from (self._called(at) if form.named and not opened else self._object(form, at)))

    def _begin(self, name: str, at: int) -> None:
        """A call's name is known, and its arguments are next."""
        self._text = self._text[at:]
        self.calls += 1
        self._tell("call", 0, name)

    def _end(self) -> None:
        self.whole += self._scan.many or self.calls == 1

    def _given(self) -> Generator[None, None, bool]:
        """Give an object out as arguments; whether it came to its end."""
        found, _ = yield from self._span(0, True)
        if found:
            self._end()
        return bool(found)

    def _object(self, form: CallForm, at: int) -> Generator[None, None, bool]:
        """A call that is an object."""
        mark, at = yield from self._next(at, "{")
        name, held = "", ""
        while mark in ("{", ","):
            mark, at = yield from self._next(at, '"', "}")
            if mark != '"':
                break
            key, at = yield from self._match(_STRING, at - 1)
            colon, at = yield from self._next(at, ":")
            first, at = yield from self._next(at, '"', "{", "[")
            if not (key and colon):
                return False
            if key == '"name"' and first == '"' and not name:
                said, at = yield from self._match(_STRING, at - 1)
                name = _decoded(said)
            elif key[1:-1] in form.keys and first == "{":
                if name:
                    self._begin(name, at - 1)
                    if (yield from self._given()):
                        yield from self._tail()
                    return True
                start = at - 1
                _, at = yield from self._span(start, False)
                held = self._text[start:at]
            else:
                unknown = key == '"name"' or key[1:-1] in form.keys or (form.bare and key not in ('"type"', '"id"'))
                value, at = yield from self._skip(first, at)
                if not value or (unknown and not (key[1:-1] in form.keys and value == "null")):
                    return False
            mark, at = yield from self._next(at, ",", "}")
        if mark != "}" or not name:
            return False
        self._begin(name, at)
        self._text = (held or "{}") + self._text
        self._tell("arguments", len(held or "{}"))
        self._end()
        return True

    def _skip(self, first: str, at: int) -> Steps:
        """A value nobody needs; `first` of it is known where it is no number and no word."""
        if first == '"':
            return (yield from self._match(_STRING, at - 1))
        if first:
            return (yield from self._span(at - 1, False))
        return (yield from self._match(_SCALAR, (yield from self._space(at))))

    def _tail(self) -> Generator[None, None, None]:
        """What an object says behind its arguments is dropped; one that is not closed has ended too."""
        found, at = yield from self._next(0, ",", "}")
        if found == ",":
            _, at = yield from self._span(at, False, 1)
        self._text = self._text[at:]

    def _called(self, at: int) -> Generator[None, None, bool]:
        """A name, and an object that is its arguments; more of them each have a marker."""
        head, at = yield from self._match(_NAMED, at)
        named = _NAMED.match(head + "{")
        if named is None:
            return False
        self._begin(named[1], at)
        yield from self._given()
        return True

    def _python(self, at: int) -> Generator[None, None, bool]:
        """A call as Python writes it; its arguments come whole."""
        start = yield from self._space(at)
        head, at = yield from self._match(_CALLED, start)
        if not head:
            return False
        found, at = yield from self._span(at - 1, False, marks=PYTHON_MARKS)
        called = read_python(self._text[start:at]) if found else None
        if called is None:
            return False
        self._begin(called[0], at)
        self._text = called[1] + self._text
        self._tell("arguments", len(called[1]))
        self._end()
        return True


def _decoded(said: str) -> str:
    try:
        return msgspec.json.decode(said, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return ""
