"""What streams of every dialect are made of: events, counts, what is remembered of a choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from rayneuron.api.call import Call, Json
from rayneuron.api.scan import Scanner
from rayneuron.errors import RayNeuronError
from rayneuron.types import Delta, Request

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(content: object) -> bytes:
    """One event."""
    return b"data: " + _encode(content) + b"\n\n"


class Mould:
    """An event written the long way once, in which texts and numbers change: each next one is only filled in."""

    __slots__ = ("_parts",)

    MARK = "\x00mark\x00"  # stands where a value goes

    def __init__(self, written: bytes, values: int = 1) -> None:
        self._parts = written.rsplit(_encode(self.MARK), values)  # the last ones: what a client says stands before them

    def fill(self, *values: object) -> bytes:
        """The event with these in their places."""
        if len(values) == 1:
            return self._parts[0] + _encode(values[0]) + self._parts[1]
        parts = iter(self._parts)
        return next(parts) + b"".join([_encode(value) + part for value, part in zip(values, parts, strict=True)])


def chunks(events: bytes) -> list[Json]:
    """The contents of whole events, without the end mark."""
    return [msgspec.json.decode(part.removeprefix(b"data: ")) for part in events.removesuffix(DONE).split(b"\n\n") if part]


def prompts(call: Call) -> dict[str, int]:
    """Which prompt of a call each engine request id belongs to."""
    return {request.id: place for place, request in enumerate(call.requests)}


class ChoiceState:
    """What a stream remembers of one choice."""

    __slots__ = ("begun", "index", "offsets", "prompt", "scanner", "tokens", "waiting")

    def __init__(self, call: Call, index: int) -> None:
        self.index = index
        self.prompt = index // call.n
        self.tokens = 0
        self.begun = False
        self.waiting: list[Delta] = []
        self.scanner = Scanner(call.scan) if call.scan.on else None
        self.offsets: Any = None  # choices.Offsets, where they are asked for


class Reasoned:
    """How many tokens of a choice are reasoning, without its markers; the same however they fell into steps."""

    __slots__ = ("_scanner", "_waiting", "_words", "count")

    def __init__(self, call: Call, request: Request) -> None:
        self._words = call.text.detokenizer(request.prompt_ids, request.params.skip_special_tokens, call.scan.kept)
        self._scanner = Scanner(call.scan._replace(tools=None, shown=True))
        self._waiting = self.count = 0

    def add(self, delta: Delta) -> None:
        """Count one delta's."""
        for token_id in delta.token_ids if self._scanner.phase != "answer" else ():
            self._push(self._words.push(token_id), False, 1)
        if delta.finish_reason is not None:
            self._push(self._words.flush(), True, 0)

    def _push(self, text: str, last: bool, tokens: int) -> None:
        before = self._scanner.phase
        told = any(event.kind == "reasoning" for event in self._scanner.push(text, last))
        waiting = self._waiting + tokens
        self.count += waiting if told else 0
        self._waiting = waiting if not told and self._scanner.phase == before != "answer" else 0


class Tally:
    """Token counts of a call while its deltas arrive. A prompt counts once, however many choices it has."""

    __slots__ = ("_cached", "_call", "_predicted", "_reasoned", "_requests", "completion_tokens")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cached: dict[str, int] = {}
        self._predicted = (0, 0)
        self._requests = {request.id: request for request in call.requests}
        self._reasoned: dict[tuple[str, int], Reasoned] = {}
        self.completion_tokens = 0

    def add(self, delta: Delta) -> None:
        """Count one delta."""
        self.completion_tokens += len(delta.token_ids)
        if self._call.scan.reasoning is not None:
            choice = (delta.request_id, delta.index)
            if choice not in self._reasoned:
                self._reasoned[choice] = Reasoned(self._call, self._requests[delta.request_id])
            self._reasoned[choice].add(delta)
        if delta.usage is not None:
            (came, others), (more, wrong) = self._predicted, delta.usage.predicted
            self._predicted = came + more, others + wrong
        if delta.usage is not None and delta.usage.cached_tokens:
            self._cached[delta.request_id] = max(delta.usage.cached_tokens, self._cached.get(delta.request_id, 0))

    def usage(self) -> dict[str, Any]:
        """The usage object of the whole call."""
        prompts = sum(len(request.prompt_ids) for request in self._call.requests)
        made = usage(prompts, self.completion_tokens, sum(self._cached.values()))
        if any(request.prediction is not None for request in self._call.requests):
            names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
            made["completion_tokens_details"] = dict(zip(names, self._predicted, strict=True))
        if self._call.scan.reasoning is not None:
            told = made.setdefault("completion_tokens_details", {})
            told["reasoning_tokens"] = sum(each.count for each in self._reasoned.values())
        return made


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def named_event(name: str, content: object) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\n" + event(content)


class Single(ABC):
    """The stream of a call of one choice, whatever the dialect."""

    content_type = "text/event-stream"

    def __init__(self, call: Call) -> None:
        self.call = call
        self.tally = Tally(call)
        self.done = self.failed = False

    def first(self) -> bytes:
        """Nothing."""
        return b""

    @abstractmethod
    def write(self, delta: Delta) -> bytes:
        """The bytes of one delta; with its last one, the end of the choice."""

    @abstractmethod
    def torn(self, wrong: BaseException) -> bytes:
        """How an error ends the stream."""

    def chunk(self, delta: Delta) -> bytes:
        """The bytes of one delta."""
        if self.done:
            return b""
        if delta.error is not None:
            return self.error(RayNeuronError(delta.error))
        self.tally.add(delta)
        self.done = delta.finish_reason is not None
        return self.write(delta)

    def last(self) -> bytes:
        """Nothing: the last delta has said it."""
        return b""

    def error(self, wrong: BaseException) -> bytes:
        """The end of a stream that fails."""
        self.done = self.failed = True
        return self.torn(wrong)
