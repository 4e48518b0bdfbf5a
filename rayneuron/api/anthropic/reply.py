"""Anthropic's message object, its stream of blocks, and its errors."""

from __future__ import annotations

from collections.abc import Iterable

from rayneuron.api.call import Answer, Call, Json
from rayneuron.api.choices import gather
from rayneuron.api.errors import Triple, error_body
from rayneuron.api.stream import Single, named_event
from rayneuron.types import Delta

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
OVERLOADED = 529  # Anthropic's own, for what is 503 elsewhere


def error(triple: Triple) -> Triple:
    """{type: error, error: {type, message}}."""
    status, body, headers = triple
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if status == 503:
        status, kind = OVERLOADED, "overloaded_error"
    elif status == 408:
        kind = "timeout_error"
    return status, {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}, headers


def _reply(call: Call, deltas: Iterable[Delta]) -> Json:
    gathered = gather(call, deltas)
    choice = gathered.choices[0]
    content = [{"type": "text", "text": choice.text}] if choice.text else []
    usage = {"input_tokens": gathered.usage["prompt_tokens"], "output_tokens": gathered.usage["completion_tokens"]}
    return {**_message(call, usage), "content": content, **_end(choice.finish_reason, choice.stop_reason)}


def _message(call: Call, usage: Json) -> Json:
    head = {"id": call.id, "type": "message", "role": "assistant", "model": call.head.model, "content": []}
    return {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}


def _end(reason: str | None, stop: str | int | None) -> Json:
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop, str) and reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _event(name: str, **said: object) -> bytes:
    return named_event(name, {"type": name, **said})


class _Blocks(Single):
    """A message, its one block of text, and the end of both; a reply without text has no block."""

    _begun = False

    def first(self) -> bytes:
        """The message without content."""
        prompt = sum(len(request.prompt_ids) for request in self.call.requests)
        return _event("message_start", message=_message(self.call, {"input_tokens": prompt, "output_tokens": 0})) + _event("ping")

    def write(self, delta: Delta) -> bytes:
        """A part of the block; at last what ended it."""
        out = b""
        if delta.text:
            if not self._begun:
                self._begun = True
                out += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            out += _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
        if self.done:
            out += _event("content_block_stop", index=0) if self._begun else b""
            usage = {"output_tokens": self.tally.completion_tokens}
            out += _event("message_delta", delta=_end(delta.finish_reason, delta.stop_reason), usage=usage) + _event("message_stop")
        return out

    def torn(self, wrong: BaseException) -> bytes:
        """An error event, the last."""
        return named_event("error", error(error_body(wrong))[1])


ANSWER = Answer(_reply, _Blocks)
