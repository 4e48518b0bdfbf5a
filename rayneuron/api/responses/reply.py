"""The response object, and the events in which it comes into being."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from rayneuron.api.call import Answer, Call, Json
from rayneuron.api.choices import chat_logprobs, gather
from rayneuron.api.errors import error_body
from rayneuron.api.stream import Single, named_event
from rayneuron.types import Delta, TokenLogprobs

OPEN = "in_progress"


def answer(shell: Json) -> Answer:
    """How a call is answered. `shell`: what of the body the response repeats."""
    return Answer(partial(_reply, shell), partial(_Events, shell))


def _reply(shell: Json, call: Call, deltas: Iterable[Delta]) -> Json:
    gathered = gather(call, deltas)
    choice = gathered.choices[0]
    part = _part(call, choice.text, choice.logprobs)
    return _response(shell, call, _status(choice.finish_reason), [_message(call, _status(choice.finish_reason), [part])], gathered.usage)


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "failed" if reason == "error" else "completed"


def _response(shell: Json, call: Call, status: str, output: list[Json], usage: Json | None) -> Json:
    params = call.requests[0].params
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "status": status,
        "error": {"code": "server_error", "message": "the choice failed"} if status == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": call.head.model,
        "output": output,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "background": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        **shell,
    }


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _message(call: Call, status: str, content: list[Json]) -> Json:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(call: Call, text: str, entries: Iterable[TokenLogprobs]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": _logprobs(call, entries)}


def _logprobs(call: Call, entries: Iterable[TokenLogprobs]) -> list[Any]:
    content: list[Any] = chat_logprobs(call, entries)["content"] if call.logprobs is not None else []
    return content


class _Events(Single):
    """The states of a response: created, in progress, its one message and the text in it, done, and how it ended."""

    def __init__(self, shell: Json, call: Call) -> None:
        super().__init__(call)
        self._shell = shell
        self._number = 0
        self._text = ""
        self._entries: list[TokenLogprobs] = []
        self._place = {"item_id": f"msg_{call.id}", "output_index": 0, "content_index": 0}

    def _event(self, name: str, **said: object) -> bytes:
        self._number += 1
        return named_event(name, {"type": name, "sequence_number": self._number - 1, **said})

    def first(self) -> bytes:
        """Everything up to the empty text."""
        response = _response(self._shell, self.call, OPEN, [], None)
        item = _message(self.call, OPEN, [])
        return (
            self._event("response.created", response=response)
            + self._event("response.in_progress", response=response)
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", part=_part(self.call, "", ()), **self._place)
        )

    def write(self, delta: Delta) -> bytes:
        """A part of the text; at last all of it, closed from the inside out."""
        self._text += delta.text
        self._entries += delta.logprobs or ()
        out = b""
        if delta.text or delta.logprobs:
            shown = _logprobs(self.call, delta.logprobs or ())
            out += self._event("response.output_text.delta", delta=delta.text, logprobs=shown, **self._place)
        return out + self._end(_status(delta.finish_reason)) if self.done else out

    def _end(self, status: str) -> bytes:
        part = _part(self.call, self._text, self._entries)
        item = _message(self.call, status, [part])
        response = _response(self._shell, self.call, status, [item], self.tally.usage())
        return (
            self._event("response.output_text.done", text=self._text, logprobs=part["logprobs"], **self._place)
            + self._event("response.content_part.done", part=part, **self._place)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{status}", response=response)
        )

    def torn(self, wrong: BaseException) -> bytes:
        """The response as failed."""
        said = error_body(wrong)[1]["error"]["message"]
        response = _response(self._shell, self.call, "failed", [], self.tally.usage())
        return self._event("response.failed", response={**response, "error": {"code": "server_error", "message": said}})
