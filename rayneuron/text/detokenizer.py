"""Token ids to text one token at a time: the bytes of each token, joined so that no character is ever sent in halves."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_utf8 = codecs.getincrementaldecoder("utf-8")

CONTEXT = 8  # tokens of the prompt that are enough to know whether it ends inside a character
WINDOW = 24  # tokens decoded together at most where a tokenizer has no table of bytes


class Detokenizer(Protocol):
    """Text of one growing choice."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte: itself where printable in Latin-1, else the next free code point from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _byte_level(alphabet: dict[str, int]) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # an added token written in plain text
            return token.encode()

    return spell


def _spaced(space: str, fallback: bool) -> Callable[[str], bytes]:
    def spell(token: str) -> bytes:
        if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(space, " ").encode()

    return spell


def steps_of(part: Any, name: str) -> list[dict[str, Any]]:
    """What a part of a `tokenizers` tokenizer does, one step after another; `name` is what it calls the steps of a sequence."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return [inner for step in state[name] for inner in step.get(name, [step])] if state["type"] == "Sequence" else [state]


def speller(decoder: Any) -> tuple[Callable[[str], bytes] | None, str]:
    """How a `tokenizers` decoder spells one token in bytes, and what it strips at the start of a text.

    None: only whole texts can be decoded. The second value is "" (nothing), "one" (one space: llama) or "all" (every space of the first
    token: Metaspace).
    """
    if decoder is None:
        return None, ""
    steps = steps_of(decoder, "decoders")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] or kinds == ["ByteLevel", "Fuse"]:
        return _byte_level(byte_alphabet()), ""
    if kinds == ["Metaspace"]:
        return _spaced(steps[0]["replacement"], False), "" if steps[0].get("prepend_scheme") == "never" else "all"
    if kinds[:1] != ["Replace"] or any(kind not in ("ByteFallback", "Fuse", "Strip") for kind in kinds[1:]):
        return None, ""
    space, strip = steps[0], [step for step in steps if step["type"] == "Strip"]
    plain = space.get("content") == " " and isinstance(space["pattern"].get("String"), str)
    if not plain or any((step["content"], step["start"], step["stop"]) != (" ", 1, 0) for step in strip) or len(strip) > 1:
        return None, ""
    return _spaced(space["pattern"]["String"], "ByteFallback" in kinds), "one" if strip else ""


class Bytes:
    """Detokenizer over a table of token bytes. `skipped` ids have no text; `strip`, as `speller` gives it, is for a text with no prompt;
    `plain`: the texts of ids that are whole and never skipped, as far as they have been spelled.

    A prompt that ends inside a character lends its last bytes, so that the first token can complete it; they are dropped if it does not.
    """

    __slots__ = ("_clear", "_decoder", "_lent", "_plain", "_skipped", "_spell", "_strip")

    def __init__(
        self, spell: Callable[[int], bytes], skipped: frozenset[int], strip: str, prompt: Sequence[int], plain: Mapping[int, str]
    ) -> None:  # fmt: skip
        self._spell, self._plain = spell, plain
        self._skipped = skipped
        self._decoder = _utf8("replace")
        self._lent = _unfinished(spell, [token for token in prompt[-CONTEXT:] if token not in skipped])
        self._strip = strip if strip and all(token in skipped for token in prompt) else ""
        self._clear = not (self._lent or self._strip)  # nothing waits, and nothing is to be left out

    def push(self, token_id: int) -> str:
        """Characters this token completes; "" while one is unfinished."""
        if self._clear and (text := self._plain.get(token_id)) is not None:  # nearly always, and the decoder is Python
            return text
        if token_id in self._skipped:
            return ""
        piece = self._spell(token_id)
        if self._lent and piece:
            piece = self._borrow(piece)
        text = self._decoder.decode(piece)
        if self._strip and text:
            text = text.removeprefix(" ") if self._strip == "one" else text.lstrip(" ")
            self._strip = ""
        self._clear = not (self._lent or self._strip or self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD for bytes that never became a character, else ""."""
        return self._decoder.decode(b"", final=True)

    def _borrow(self, piece: bytes) -> bytes:
        lent, self._lent = self._lent, b""
        joined = lent + piece
        return piece if _utf8("replace").decode(joined).startswith("\N{REPLACEMENT CHARACTER}") else joined


def _unfinished(spell: Callable[[int], bytes], tokens: Sequence[int]) -> bytes:
    """The last bytes that begin a character and do not finish it."""
    if tokens and (last := spell(tokens[-1])) and last.isascii():  # nearly always
        return b""
    decoder = _utf8("replace")
    for token in tokens:
        decoder.decode(spell(token))
    return decoder.getstate()[0]


class Window:
    """Detokenizer for tokenizers that only decode whole texts: decodes the last few tokens again and sends what is new.

    `decode` is the tokenizer's own with special tokens skipped or not. One decode a token, a second one every `WINDOW` tokens.
    """

    __slots__ = ("_decode", "_ids", "_known")

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT:])
        self._known = decode(self._ids)

    def push(self, token_id: int) -> str:
        """Characters this token completes; "" while one is unfinished."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = self._new(text)
        self._known = text
        if len(self._ids) > WINDOW:
            self._ids = self._ids[-CONTEXT:]
            self._known = self._decode(self._ids)
        return new

    def flush(self) -> str:
        """What is still unsent, U+FFFD for unfinished characters included."""
        text = self._decode(self._ids)
        new, self._known = self._new(text), text
        return new

    def _new(self, text: str) -> str:
        known = self._known
        if text.startswith(known):
            return text[len(known) :]
        # The prompt ended inside a character (known ends in U+FFFD): only what differs is new.
        return text[len(os.path.commonprefix([text, known])) :]
