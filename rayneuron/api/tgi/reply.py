"""TGI's replies, its stream of tokens, and its errors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from rayneuron.api.call import Answer, Call, Json
from rayneuron.api.choices import Choice, gather
from rayneuron.api.errors import Triple, error_body
from rayneuron.api.pieces import Pieces, TextPiece, cut, finish, prefill
from rayneuron.api.stream import Single, event
from rayneuron.types import Delta

GENERATION = ("generation", 424)
KINDS = {400: ("validation", 422), 413: ("validation", 413), 415: ("validation", 415), 429: ("overloaded", 429), 503: ("overloaded", 503)}


def error(triple: Triple) -> Triple:
    """{error, error_type}: 422 for what is wrong with a request, 424 for a generation that failed; routes and keys keep their status."""
    status, body, headers = triple
    other = ("not_found" if status == 404 else "validation", status)
    kind, status = KINDS.get(status, GENERATION if status >= 500 or status == 408 else other)
    return status, {"error": body["error"]["message"], "error_type": kind}, headers


def answer(details: bool, before: str, listed: bool) -> Answer:
    """How a call is answered. `before`: the prompt, where the text repeats it; `listed`: as a list of one."""
    return Answer(partial(_reply, details, before, listed), partial(_Tokens, before))


def _reply(details: bool, before: str, listed: bool, call: Call, deltas: Iterable[Delta]) -> Any:
    kept = list(deltas)
    gathered = gather(call, kept)
    choice, *others = gathered.choices
    reply: Json = {"generated_text": before + choice.text}
    if details:
        told = [] if call.prompt_logprobs is None else prefill(call, gathered.prompt_logprobs.get(0))
        reply["details"] = _whole(call, kept, choice, told)
        if others:
            sequences = [{"generated_text": before + other.text, **_whole(call, kept, other, told)} for other in others]
            reply["details"]["best_of_sequences"] = sequences
    return [reply] if listed else reply


def _whole(call: Call, deltas: list[Delta], choice: Choice, told: list[Json]) -> Json:
    pieces = cut(call, deltas, choice)
    seed = call.requests[0].params.seed
    details: Json = {
        "finish_reason": finish(choice.finish_reason, choice.stop_reason),
        "generated_tokens": len(choice.token_ids),
        "seed": None if seed is None else seed + choice.tried,
        "prefill": told,
        "tokens": [_token(piece) for piece in pieces],
    }
    return details | ({"top_tokens": [_top(call, piece) for piece in pieces]} if call.logprobs else {})


def _token(piece: TextPiece) -> Json:
    return {"id": piece.id, "text": piece.text, "logprob": piece.logprob, "special": piece.special}


def _top(call: Call, piece: TextPiece) -> list[Json]:
    special = call.text.special_ids
    return [{"id": i, "text": text, "logprob": value, "special": i in special} for i, text, value in piece.top(call)]


class _Tokens(Single):
    """One event a token; the last tells the whole text and why it ended. There is no end mark."""

    def __init__(self, before: str, call: Call) -> None:
        super().__init__(call)
        self._pieces = Pieces(call)
        self._text = before
        self._index = 0

    def write(self, delta: Delta) -> bytes:
        """The events of the tokens that are complete."""
        self._text += delta.text
        events = [self._event(piece) for piece in self._pieces.push(delta)]
        if self.done:
            events = events or [self._event(TextPiece(0, "", None, True))]
            events[-1] |= {"generated_text": self._text, "details": self._details(delta)}
        return b"".join(map(event, events))

    def _event(self, piece: TextPiece) -> Json:
        self._index += 1
        said: Json = {"index": self._index, "token": _token(piece)}
        if self.call.logprobs:
            said["top_tokens"] = _top(self.call, piece)
        return {**said, "generated_text": None, "details": None}

    def _details(self, delta: Delta) -> Json:
        request = self.call.requests[0]
        return {
            "finish_reason": finish(delta.finish_reason, delta.stop_reason),
            "generated_tokens": self.tally.completion_tokens,
            "seed": request.params.seed,
            "input_length": len(request.prompt_ids),
        }

    def torn(self, wrong: BaseException) -> bytes:
        """One event that holds the error."""
        return event(error(error_body(wrong))[1])
