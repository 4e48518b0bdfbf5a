"""The response object and its items, of which `stages.py` tells how they come into being."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayneuron.api.call import Call, Json
from rayneuron.api.choices import chat_logprobs, gather
from rayneuron.api.scan import Event, Scanner
from rayneuron.types import Delta, TokenLogprobs

OPEN = "in_progress"
KINDS = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}


def reply(shell: Json, call: Call, deltas: Iterable[Delta]) -> Json:
    """The whole response."""
    gathered = gather(call, deltas)
    choice, items = gathered.choices[0], Items(call)
    for event in Scanner(call.scan).push(choice.text, last=True):
        items.add(event)
    status = status_of(choice.finish_reason)
    return response(shell, call, status, items.closed(status, choice.logprobs), gathered.usage)


class Items:
    """The items of an output as its events come: reasoning, messages and calls, each whole before the next."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.kept: list[Json] = []

    def add(self, event: Event) -> bool:
        """Take one in; whether it begins an item."""
        kind = KINDS[event.kind]
        begins = event.kind == "call" or not self.kept or self.kept[-1]["type"] != kind
        if begins:
            self.kept.append(self.empty(kind, len(self.kept), event.name))
        item = self.kept[-1]
        if kind == "function_call":
            item["arguments"] += event.text
        elif item["content"]:
            item["content"][0]["text"] += event.text
        else:
            item["content"] = [part(self._call, kind, event.text, ())]
        return begins

    def empty(self, kind: str, index: int, name: str = "") -> Json:
        """An item without content."""
        of = f"{self._call.id}_{index}" if index else self._call.id
        if kind == "function_call":
            call_id = self._call.scan.call_id("call_", self._call.id.removeprefix("resp_"), index)
            head = {"id": f"fc_{of}", "type": kind, "status": OPEN, "call_id": call_id, "name": name}
            return {**head, "arguments": ""}
        if kind == "reasoning":
            return {"id": f"rs_{of}", "type": kind, "summary": [], "content": [], "status": OPEN}
        return {"id": f"msg_{of}", "type": kind, "role": "assistant", "status": OPEN, "content": []}

    def closed(self, status: str, entries: Iterable[TokenLogprobs]) -> list[Json]:
        """All of them, the last as the response ended; an output of nothing is an empty message. `entries`: a message's probabilities."""
        if not self.kept:
            self.kept.append(self.empty("message", 0) | {"content": [part(self._call, "message", "", ())]})
        for item in self.kept:
            item["status"] = "completed"
        self.kept[-1]["status"] = status
        if self._call.logprobs is not None:
            self.kept[0]["content"][0]["logprobs"] = logprobs(self._call, entries)
        return self.kept


def status_of(reason: str | None) -> str:
    """How a response ended."""
    return "incomplete" if reason == "length" else "failed" if reason == "error" else "completed"


def response(shell: Json, call: Call, status: str, output: list[Json], usage: Json | None) -> Json:
    """The response object."""
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
        "output_tokens_details": {"reasoning_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }


def part(call: Call, kind: str, text: str, entries: Iterable[TokenLogprobs]) -> Json:
    """The text in an item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs(call, entries)}


def logprobs(call: Call, entries: Iterable[TokenLogprobs]) -> list[Any]:
    """A message's probabilities, where they are asked for."""
    content: list[Any] = chat_logprobs(call, entries)["content"] if call.logprobs is not None else []
    return content
