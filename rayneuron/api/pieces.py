"""Tokens with the text each of them adds, for dialects that show tokens: the same pieces however the tokens fell into steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rayneuron.api.call import Call
from rayneuron.api.choices import Choice, finite
from rayneuron.types import Delta, TokenLogprobs


class TextPiece(NamedTuple):
    """One token; `text` is what it adds, of a special token its name."""

    id: int
    text: str
    entry: TokenLogprobs | None
    special: bool

    @property
    def logprob(self) -> float | None:
        """Its log-probability as JSON can carry it."""
        return None if self.entry is None else finite(self.entry.logprob)

    def top(self, call: Call) -> list[tuple[int, str, float]]:
        """The likeliest tokens in its place: id, text, log-probability."""
        return [(token_id, call.text.token(token_id), finite(logprob)) for token_id, logprob in self.entry.top] if self.entry else []


@dataclass(slots=True)
class _Waiting:
    id: int
    entry: TokenLogprobs | None
    special: bool
    length: int  # of the text it adds


class Pieces:
    """The tokens of one choice. A token waits until its text is out: a stop string may yet cut it."""

    __slots__ = ("_call", "_text", "_waiting", "_words")

    def __init__(self, call: Call) -> None:
        request = call.requests[0]
        self._call = call
        self._words = call.text.detokenizer(request.prompt_ids, request.params.skip_special_tokens)
        self._text = ""
        self._waiting: list[_Waiting] = []

    def push(self, delta: Delta) -> list[TextPiece]:
        """The tokens that are complete with this delta; with its last one all that are left."""
        self._text += delta.text
        entries: Sequence[TokenLogprobs | None] = delta.logprobs or [None] * len(delta.token_ids)
        for token_id, entry in zip(delta.token_ids, entries, strict=True):
            special = token_id in self._call.text.special_ids
            self._waiting.append(_Waiting(token_id, entry, special, len(self._words.push(token_id))))
        if delta.finish_reason is not None:
            self._end()
        ready = len(self._waiting) if delta.finish_reason is not None else self._ready()
        done = [self._piece(each) for each in self._waiting[:ready]]
        del self._waiting[:ready]
        return done

    def _ready(self) -> int:
        """How many tokens have their text. What is inside a character waits for the one that completes it."""
        left, ready = len(self._text), 0
        for place, each in enumerate(self._waiting, start=1):
            left -= each.length
            if left < 0:
                break
            ready = place if each.length or each.special else ready
        return ready

    def _end(self) -> None:
        """What no token has completed belongs to the last one that is text."""
        rest = len(self._text) - sum(each.length for each in self._waiting)
        for each in reversed(self._waiting):
            if rest > 0 and not each.special:
                each.length += rest
                break

    def _piece(self, token: _Waiting) -> TextPiece:
        text, self._text = self._text[: token.length], self._text[token.length :]
        named = token.special and not text
        return TextPiece(token.id, self._call.text.token(token.id) if named else text, token.entry, token.special)


def cut(call: Call, deltas: Iterable[Delta], choice: Choice) -> list[TextPiece]:
    """All pieces of a choice of a whole reply."""
    pieces = Pieces(call)
    return [piece for delta in deltas if delta.index == choice.tried for piece in pieces.push(delta)]


def prefill(call: Call, entries: Iterable[TokenLogprobs | None] | None) -> list[dict[str, Any]]:
    """The prompt's tokens as {id, text, logprob}; the first has no probability."""
    ids = call.requests[0].prompt_ids
    shown: Iterable[TokenLogprobs | None] = entries or [None] * len(ids)
    return [
        {"id": token_id, "text": call.text.token(token_id), "logprob": None if entry is None else finite(entry.logprob)}
        for token_id, entry in zip(ids, shown, strict=True)
    ]


def finish(reason: str | None, stop: str | int | None) -> str | None:
    """Why a choice ended, in the words of TGI and LMI."""
    if reason != "stop":
        return reason
    return "stop_sequence" if isinstance(stop, str) else "eos_token"
