"""A JSON body, and its fields taken one by one with their type checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import msgspec

from rayneuron.errors import RequestError

MAX_VALUES, MAX_NAMES = 400_000, 1000  # a value has one of these, an object two; also those within texts are counted

BOM = b"\xef\xbb\xbf"  # some write it before UTF-8; it says nothing
_UNCLEAN = re.compile(r"[^\x21-\x7e]+")

_decoder = msgspec.json.Decoder()


def decode(raw: bytes | str) -> dict[str, Any]:
    """The JSON object of a request body. RequestError for anything else, and for more values than an honest body holds.

    A value of three bytes takes sixty in memory, and nobody else's Python runs while a body is decoded.
    """
    count = (raw if isinstance(raw, bytes) else raw.encode("utf-8", "replace")).count
    values = count(b",") + count(b"[") + count(b"{") + 2 * count(b":")  # a name costs more than a value
    if values > MAX_VALUES:
        raise RequestError(f"the body may hold at most {MAX_VALUES} values (a named one counts three), got about {values}", param="body")
    try:
        body = _decoder.decode(raw[3:] if raw[:3] == BOM else raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as wrong:
        raise RequestError(f"the body is not valid JSON: {wrong if raw.strip() else 'it is empty'}") from wrong
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {kind(body)}")
    if len(body) > MAX_NAMES:
        raise RequestError(f"the body may hold at most {MAX_NAMES} fields, got {len(body)}", param="body")
    return body


def kind(value: object) -> str:
    """JSON's own word for the type of a value."""
    if isinstance(value, bool):
        return "a boolean"
    names = {int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def wrong(name: str, expected: str, value: object) -> NoReturn:
    """Raise the error of a field of the wrong type or range."""
    short = len(value) <= 60 if isinstance(value, str) else value.bit_length() <= 64 if isinstance(value, int) else isinstance(value, float)
    shown = repr(value) if short else kind(value)
    raise RequestError(f"{name} must be {expected}, got {shown}", param=name)


class Fields:
    """A body being read; null equals absent. Each verb takes its field off, or gives `default`; `unknown` is what nobody took."""

    __slots__ = ("_body", "_prefix")

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body = {name: value for name, value in body.items() if value is not None}
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def names(self, among: Iterable[str]) -> list[str]:
        """Which of these the body has, in their order."""
        body = self._body
        return [name for name in among if name in body]

    def holds(self, any_of: Iterable[str]) -> bool:
        """Whether the body has one of these."""
        return not self._body.keys().isdisjoint(any_of)

    def peek(self, name: str) -> Any:
        """The value, left where it is."""
        return self._body.get(name)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names nobody has taken so far."""
        return tuple(self._body)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Take `defaults` where the body says nothing."""
        self._body = {**defaults, **self._body}

    def take(self, name: str, default: Any = None) -> Any:
        """The value unchecked."""
        return self._body.pop(name, default)

    def integer(self, name: str, default: Any = None, low: int | None = None, high: int | None = None) -> Any:
        """A whole number within [low, high]; 5.0 counts as 5, true does not count as 1."""
        value = self._body.pop(name, None)
        if value is None:
            return default
        return whole(self._prefix + name, value, low, high)

    def number(self, name: str, default: Any = None) -> Any:
        """A finite number, as float."""
        value = self._body.pop(name, None)
        if value is None:
            return default
        if type(value) not in (int, float):
            wrong(self._prefix + name, "a number", value)
        try:
            return float(value)
        except OverflowError:
            wrong(self._prefix + name, "a finite number", value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        found: bool = self._of(bool, "true or false", name, default)
        return found

    def string(self, name: str, default: Any = None, among: tuple[str, ...] = ()) -> Any:
        """A string, one of `among` if given."""
        value = self._of(str, "a string", name)
        if value is not None and among and value not in among:
            wrong(self._prefix + name, "one of " + ", ".join(among), value)
        return default if value is None else value

    def table(self, name: str, default: Any = None) -> Any:
        """An object."""
        return self._of(dict, "an object", name, default)

    def _of(self, kind: type, said: str, name: str, default: Any = None) -> Any:
        value = self._body.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind):
            wrong(self._prefix + name, said, value)
        return value

    def strings(self, name: str, most: int | None = None, longest: int | None = None) -> tuple[str, ...]:
        """A string or an array of at most `most` strings of at most `longest` characters, none of them empty."""
        value = self._body.pop(name, None)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            wrong(self._prefix + name, "a string or an array of strings", value)
        if not all(items):
            raise RequestError(f"{self._prefix}{name} must not hold an empty string", param=self._prefix + name)
        if most is not None and len(items) > most:
            raise RequestError(f"{self._prefix}{name} may hold at most {most} strings, got {len(items)}", param=self._prefix + name)
        if longest is not None and max(map(len, items), default=0) > longest:
            raise RequestError(f"{self._prefix}{name} may hold strings of at most {longest} characters", param=self._prefix + name)
        return tuple(items)

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """An array of token ids within the vocabulary, no more of them than it has."""
        value = self._body.pop(name, None)
        return () if value is None else tuple(token_ids(self._prefix + name, value, vocab_size, vocab_size))

    def refuse(self, name: str, instead: str = "leave it out") -> None:
        """400 by name when a field is set that this server cannot honour yet."""
        if self._body.pop(name, None) not in (None, False):
            raise RequestError(f"{self._prefix}{name} is not supported by this server yet; {instead}", param=self._prefix + name)


def whole(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """`value` as an integer within [low, high], at most of 64 bits: nothing here counts further."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        wrong(name, "an integer", value)
    if value.bit_length() > 63 and value != -(2**63):
        wrong(name, "an integer of at most 64 bits", value)
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"between {low} and {high}"
        wrong(name, bounds, value)
    return value


def token_ids(name: str, value: object, vocab_size: int, most: int | None = None) -> list[int]:
    """`value` as at most `most` token ids; RequestError names the first id outside the vocabulary."""
    if most is not None and isinstance(value, list) and len(value) > most:
        raise RequestError(f"{name} may hold at most {most} token ids, got {len(value)}", param=name)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        wrong(name, "an array of token ids (integers)", value)
    if value and (min(value) < 0 or max(value) >= vocab_size):
        outside = next(item for item in value if not 0 <= item < vocab_size)
        outside = outside if abs(outside) < 2**64 else "of more than 64 bits"
        raise RequestError(f"{name}: token id {outside} is out of the vocabulary (0 to {vocab_size - 1})", param=name)
    return value


def clean_id(given: str | None) -> str | None:
    """A client's request id as it may be logged and echoed: at most 256 printable ASCII characters; None where nothing is left."""
    return (_UNCLEAN.sub("_", given[:1024].strip())[:256] or None) if given else None  # cut first: nobody waits for a megabyte
