"""Anthropic's message object, its stream of blocks, and its errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from rayneuron.api.call import Answer, Call, Json
from rayneuron.api.choices import gather
from rayneuron.api.errors import Triple, error_body
from rayneuron.api.scan import Event, Scanner
from rayneuron.api.stream import Mould, Single, named_event
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
    choice, scanner = gathered.choices[0], Scanner(call.scan)
    content: list[Json] = []
    for event in scanner.push(choice.text, last=True):
        if event.kind == "call" or not content or content[-1]["type"] != BLOCKS[event.kind][0]:
            content.append(_block(call, event, len(content)))
        key = BLOCKS[event.kind][1]
        content[-1][key] = (content[-1][key] or "") + event.text  # a call's object is "" until it is read
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = _input(block["input"])
    usage = {"input_tokens": gathered.usage["prompt_tokens"], "output_tokens": gathered.usage["completion_tokens"]}
    return {**_message(call, usage), "content": content, **_end(choice.finish_reason, choice.stop_reason, scanner)}


# A block's type, its field that grows, and the delta by which it does.
BLOCKS = {
    "content": ("text", "text", "text_delta"),
    "reasoning": ("thinking", "thinking", "thinking_delta"),
    "call": ("tool_use", "input", "input_json_delta"),
    "arguments": ("tool_use", "input", "input_json_delta"),
}


def _block(call: Call, event: Event, index: int) -> Json:
    """An empty block for what an event begins."""
    if event.kind == "content":
        return {"type": "text", "text": ""}
    if event.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": call.scan.call_id("toolu_", call.id.removeprefix("msg_"), index), "name": event.name, "input": {}}


def _input(arguments: str) -> Json:
    """Arguments as an object; of what was cut, or is no JSON, none."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}


def _message(call: Call, usage: Json) -> Json:
    head = {"id": call.id, "type": "message", "role": "assistant", "model": call.head.model, "content": []}
    return {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}


def _end(reason: str | None, stop: str | int | None, scanner: Scanner) -> Json:
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(stop, str) and reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": "tool_use" if scanner.whole else "end_turn", "stop_sequence": None}


def _event(name: str, **said: object) -> bytes:
    return named_event(name, {"type": name, **said})


class _Blocks(Single):
    """A message, its blocks one after another, and the end of all; a reply without text has no block."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._scanner = Scanner(call.scan)
        self._open = ""  # the type of the block that is open
        self._more: Mould | None = None  # of more of it
        self._index = 0

    def first(self) -> bytes:
        """The message without content."""
        prompt = sum(len(request.prompt_ids) for request in self.call.requests)
        return _event("message_start", message=_message(self.call, {"input_tokens": prompt, "output_tokens": 0})) + _event("ping")

    def write(self, delta: Delta) -> bytes:
        """Parts of blocks; at last what ended them."""
        out = b"".join(map(self._part, self._scanner.push(delta.text, last=self.done)))
        if self.done:
            usage = {"output_tokens": self.tally.completion_tokens}
            end = _end(delta.finish_reason, delta.stop_reason, self._scanner)
            out += self._close() + _event("message_delta", delta=end, usage=usage) + _event("message_stop")
        return out

    def _part(self, event: Event) -> bytes:
        kind, key, delta = BLOCKS[event.kind]
        out = b""
        if event.kind == "call" or self._open != kind:
            out = self._close()
            self._open, self._more = kind, None
            out += _event("content_block_start", index=self._index, content_block=_block(self.call, event, self._index))
        if not event.text:
            return out
        if self._more is None:
            said = {"type": delta, "partial_json" if kind == "tool_use" else key: Mould.MARK}
            self._more = Mould(_event("content_block_delta", index=self._index, delta=said))
        return out + self._more.fill(event.text)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = {"type": "signature_delta", "signature": ""}  # nothing here is signed
        out = _event("content_block_delta", index=self._index, delta=signed) if self._open == "thinking" else b""
        out += _event("content_block_stop", index=self._index)
        self._open = ""
        self._index += 1
        return out

    def torn(self, wrong: BaseException) -> bytes:
        """An error event, the last."""
        return named_event("error", error(error_body(wrong))[1])


ANSWER = Answer(_reply, _Blocks)
