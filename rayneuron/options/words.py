"""What a name of another system means here: a key of ours, nothing (and why), or a refusal that says what to write instead."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayneuron.errors import ConfigError
from rayneuron.validation import nearest

Args = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Word:
    """One name. `key`: ours, for the value as `read` makes it (None: it says nothing) with all other args of the file at hand.

    `same`: values that say how it is here anyway. `note`: what differs here; with no key, why any value changes nothing. `refused`: what to
    write instead. `there`: the default there.
    """

    key: str | None = None
    read: Callable[[Any, Args], Any] = lambda value, args: value
    same: tuple[Any, ...] = ()
    note: str = ""
    refused: str = ""
    there: str = ""

    @property
    def kind(self) -> str:
        """applied, noted or refused."""
        return "applied" if self.key else "refused" if self.refused else "noted"


Table = Mapping[str, Word]


@dataclass
class Translation:
    """A file as ours: {our dotted key: value}, where each was said, and what is to be known of the rest."""

    assigned: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def say(self, key: str, value: Any, origin: str) -> None:
        """One key. ConfigError where it was said before, and otherwise."""
        if key in self.assigned and self.assigned[key] != value:
            differ = f"{value!r} and {self.assigned[key]!r}"
            said = f"{origin} and {self.origins[key]} say different things of {key}, {differ}; leave one of them out"
            raise ConfigError(said, param=key)
        self.assigned[key] = value
        self.origins.setdefault(key, origin)

    def default(self, key: str, value: Any, origin: str) -> None:
        """What the other system takes where nothing is said."""
        if key not in self.assigned:
            self.say(key, value, origin)


def tell(told: Translation, table: Table, args: Args, place: Callable[[str], str], system: str) -> None:
    """Take all `args` of one source; `place` says where a name stands. Raises ConfigError, with what to write instead."""
    for name, value in args.items():
        where = place(name)
        word = table.get(name)
        if word is None:
            raise ConfigError(f"{where}: {system} knows no {name}{nearest(name, list(table))}", param=name)
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in word.same):
            continue
        if word.key is None:
            if word.refused:
                raise ConfigError(f"{where}: {name} is refused: {word.refused}", param=name)
            told.notes.append(f"{where}: {name} changes nothing: {word.note}")
            continue
        try:
            read = word.read(value, args)
        except ConfigError as wrong:  # of a name inside the value
            raise ConfigError(f"{where}: {wrong.message}", param=name) from None
        except (ValueError, TypeError, KeyError) as wrong:
            raise ConfigError(f"{where}: {name} {wrong}", param=name) from None
        for key, ours in (read if isinstance(read, Said) else {word.key: read}).items():
            told.say(key, ours, where)
        if word.note:
            told.notes.append(f"{where}: {name}: {word.note}")


class Said(dict[str, Any]):
    """Several of our keys at once, from one of theirs."""


def literal(text: Any, args: Args | None = None) -> Any:
    """A value of a properties file or the environment: all are texts there."""
    if not isinstance(text, str):
        return text
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text.strip()


def whole(value: Any, args: Args | None = None) -> int:
    """A number."""
    number = literal(value)
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"must be a whole number, got {value!r}")
    return number


def positive(value: Any, args: Args | None = None) -> bool:
    """A switch that is a number there: on above zero."""
    return whole(value) > 0


def seconds(value: Any, args: Args | None = None) -> float:
    """A duration."""
    return float(whole(value))


def flag(value: Any, args: Args | None = None) -> bool:
    """A switch."""
    on = literal(value)
    if not isinstance(on, bool):
        raise ValueError(f"must be true or false, got {value!r}")
    return on


def numbers(value: Any, args: Args | None = None) -> list[int]:
    """A list of sizes: 256,512 or [256, 512] or 256."""
    read = literal(value)
    parts = read if isinstance(read, list | tuple) else str(read).split(",")
    return sorted({whole(str(part)) for part in parts})


def among(values: Mapping[str, Any]) -> Callable[[Any, Args], Any]:
    """One of their values, as ours."""

    def read(value: Any, args: Args) -> Any:
        name = str(literal(value)).removeprefix("torch.").lower()
        if name not in values:
            raise ValueError(f"must be one of {', '.join(values)} here, got {value!r}")
        return values[name]

    return read
