"""LMI's replies by output formatter, its lines of tokens, and its errors."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rayneuron.api.call import Answer, Call, Json, LmiOptions
from rayneuron.api.choices import Choice, gather
from rayneuron.api.errors import Triple, error_body
from rayneuron.api.pieces import Pieces, TextPiece, cut, finish, prefill
from rayneuron.api.stream import Single, event
from rayneuron.types import Delta

PARSE_FAILED = 424
KINDS = {404: "ModelNotFoundException", 405: "MethodNotAllowedException", 503: "ServiceUnavailableException"}


def error(triple: Triple) -> Triple:
    """{error, code} with 424 for what the handler refuses; the server's own {code, type, message} for the rest. Full queues are 503."""
    status, body, headers = triple
    said = body["error"]["message"]
    if status in (400, 422):
        return PARSE_FAILED, {"error": said, "code": PARSE_FAILED}, headers
    status = 503 if status == 429 else status
    kind = KINDS.get(status, "BadRequestException" if status < 500 else "InternalServerException")
    return status, {"code": status, "type": kind, "message": said}, headers


class _Form(NamedTuple):
    """How tokens are shown: `tgi_compat` renames two fields."""

    options: LmiOptions
    inputs: str
    full: bool
    details: bool

    @property
    def before(self) -> str:
        """What a text begins with."""
        return self.inputs if self.full else ""

    def token(self, piece: TextPiece) -> Json:
        """One token."""
        logprob, special = ("logprob", "special") if self.options.tgi_compat else ("log_prob", "special_token")
        shown: Json = {"id": piece.id, "text": piece.text, logprob: piece.logprob}
        return shown | ({special: piece.special} if piece.special or self.options.tgi_compat else {})

    def top(self, call: Call, piece: TextPiece) -> list[Json]:
        """The likeliest tokens in the place of one."""
        logprob = "logprob" if self.options.tgi_compat else "log_prob"
        return [{"id": i, "text": text, logprob: value} for i, text, value in piece.top(call)]

    def told(self, call: Call, reason: str | None, tokens: int) -> Json:
        """The details of a reply but its tokens."""
        return {"finish_reason": reason, "generated_tokens": tokens, "inputs": self.inputs, "seed": call.requests[0].params.seed}


def answer(options: LmiOptions, inputs: str, full: bool, details: bool) -> Answer:
    """How a call is answered. `full`: the text repeats the prompt."""
    form = _Form(options, inputs, full, details)
    return Answer(partial(_reply, form), partial(_Lines, form))


def _reply(form: _Form, call: Call, deltas: Iterable[Delta]) -> Any:
    kept = list(deltas)
    gathered = gather(call, kept)
    choice, *others = gathered.choices
    reply: Json = {"generated_text": form.before + choice.text}
    if form.details:
        reply["details"] = _details(form, call, kept, choice)
        if call.prompt_logprobs is not None:
            reply["details"]["prefill"] = prefill(call, gathered.prompt_logprobs.get(0))
        if others:
            told = [{"generated_text": form.before + other.text, **_details(form, call, kept, other)} for other in others]
            reply["details"]["best_of_sequences"] = told
    return [reply] if form.options.tgi_compat else reply


def _details(form: _Form, call: Call, deltas: list[Delta], choice: Choice) -> Json:
    pieces = cut(call, deltas, choice)
    details = form.told(call, finish(choice.finish_reason, choice.stop_reason), len(choice.token_ids))
    details["tokens"] = [form.token(piece) for piece in pieces]
    return details | ({"top_tokens": [form.top(call, piece) for piece in pieces]} if call.logprobs else {})


class _Lines(Single):
    """One line of JSON a token, the last with the whole text; as events under tgi_compat."""

    def __init__(self, form: _Form, call: Call) -> None:
        super().__init__(call)
        self.content_type = "text/event-stream" if form.options.events else "application/jsonlines"
        self._line = event if form.options.events else _line
        self._form = form
        self._pieces = Pieces(call)
        self._text = form.before

    def write(self, delta: Delta) -> bytes:
        """The lines of the tokens that are complete."""
        self._text += delta.text
        lines = [self._token(piece) for piece in self._pieces.push(delta)]
        if self.done:
            lines = lines or [self._token(TextPiece(-1, "", None, True))]
            lines[-1]["generated_text"] = self._text
            if self._form.details:
                reason = finish(delta.finish_reason, delta.stop_reason)
                lines[-1]["details"] = self._form.told(self.call, reason, self.tally.completion_tokens)
        return b"".join(map(self._line, lines))

    def _token(self, piece: TextPiece) -> Json:
        shown: Json = {"token": self._form.token(piece)}
        return shown | ({"top_tokens": self._form.top(self.call, piece)} if self.call.logprobs else {})

    def torn(self, wrong: BaseException) -> bytes:
        """A last line without a token."""
        said = error_body(wrong)
        details = self._form.told(self.call, "error", self.tally.completion_tokens)
        token = self._form.token(TextPiece(-1, "", None, True))
        return self._line(
            {"token": token, "generated_text": None, "error": said[1]["error"]["message"], "code": error(said)[0], "details": details}
        )


def _line(content: object) -> bytes:
    return msgspec.json.encode(content) + b"\n"
