"""Server-sent events: a call's deltas to bytes, with the constant parts of a chunk written once."""

from __future__ import annotations

from typing import Any

import msgspec

from rayneuron.api.call import Call, Json
from rayneuron.api.errors import error_body
from rayneuron.errors import RayNeuronError
from rayneuron.types import Delta, TokenLogprobs, join

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_MARK = "\x00text\x00"  # stands where a chunk's text goes while its constant parts are cut out

def event(content: object) -> bytes:
    """One event."""
    return b"data: " + _encode(content) + b"\n\n"


def chunks(events: bytes) -> list[Json]:
    """The contents of whole events, without the end mark."""
    return [msgspec.json.decode(part.removeprefix(b"data: ")) for part in events.removesuffix(DONE).split(b"\n\n") if part]


def prompts(call: Call) -> dict[str, int]:
    """Which prompt of a call each engine request id belongs to."""
    return {request.id: place for place, request in enumerate(call.requests)}


def frame(call: Call, kind: str, choices: list[Json]) -> Json:
    """What every reply and chunk of OpenAI's says first."""
    return {"id": call.id, "object": kind, "created": call.created, "model": call.head.model, "choices": choices}


class ChoiceState:
    """What a stream remembers of one choice."""

    __slots__ = ("begun", "index", "offsets", "prompt", "tokens", "waiting")

    def __init__(self, call: Call, index: int) -> None:
        self.index = index
        self.prompt = index // call.n
        self.tokens = 0
        self.begun = False
        self.waiting: list[Delta] = []
        self.offsets: Any = None  # choices.Offsets, where they are asked for


class Tally:
    """Token counts of a call while its deltas arrive. A prompt counts once, however many choices it has."""

    __slots__ = ("_cached", "_call", "_predicted", "completion_tokens")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cached: dict[str, int] = {}
        self._predicted = (0, 0)
        self.completion_tokens = 0

    def add(self, delta: Delta) -> None:
        """Count one delta."""
        self.completion_tokens += len(delta.token_ids)
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
        return made


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Events:
    """The stream of one call. `done` once every choice finished or one failed; nothing may be sent after `error`."""

    content_type = "text/event-stream"

    __slots__ = ("_call", "_choices", "_cuts", "_finished", "_held", "_prompt_logprobs", "_prompts", "_tally", "done", "failed")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._prompts = prompts(call)
        self._choices = [ChoiceState(call, index) for index in range(call.choices)]
        self._tally = Tally(call)
        self._cuts: dict[int, tuple[bytes, bytes]] = {}
        self._finished = 0
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self._held: dict[int, list[Delta]] = {}
        self.done = False
        self.failed = False

    def first(self) -> bytes:
        """Chunks that go before any text (the roles of a chat); b"" where there are none."""
        return b"".join(self._event(choice) for choice in self._call.answer.opening(self._call))

    def chunk(self, delta: Delta) -> bytes:
        """The bytes of one delta; b"" while they wait for more tokens or for the prompt's probabilities."""
        if self.done:
            return b""
        if delta.error is not None:
            return self.error(RayNeuronError(delta.error))
        prompt = self._prompts[delta.request_id]
        if self._call.echo and self._call.logprobs is not None:
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs[prompt] = delta.prompt_logprobs
                held = self._held.pop(prompt, [])
                return b"".join(self._send(prompt, late) for late in [delta, *held])
            if prompt not in self._prompt_logprobs:
                # They come with choice 0, and every choice repeats them.
                self._held.setdefault(prompt, []).append(delta)
                return b""
        return self._send(prompt, delta)

    def last(self) -> bytes:
        """What ends the stream: the usage chunk where asked for, and the end mark."""
        if self.failed:
            return b""
        if not self._call.head.include_usage:
            return DONE
        return event({**self._call.answer.wrap(self._call, []), "usage": self._tally.usage()}) + DONE

    def error(self, wrong: BaseException) -> bytes:
        """The error event and the end mark."""
        self.done = self.failed = True
        return event(error_body(wrong)[1]) + DONE

    def _send(self, prompt: int, delta: Delta) -> bytes:
        call, progress = self._call, self._choices[prompt * self._call.n + delta.index]
        self._tally.add(delta)
        progress.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._finished += 1
            self.done = self._finished == call.choices
        if call.head.stream_interval > 1 and progress.begun:
            progress.waiting.append(delta)
            if delta.finish_reason is None and sum([len(each.token_ids) for each in progress.waiting]) < call.head.stream_interval:
                return b""
            delta, progress.waiting = join(progress.waiting), []
        plain = call.logprobs is None and delta.finish_reason is None and not call.head.return_token_ids and not call.head.continuous_usage
        if plain and (progress.begun or not call.echo):
            progress.begun = True
            if not delta.text:
                return b""
            head, tail = self._cuts.get(progress.index) or self._cut(progress)
            return head + _encode(delta.text) + tail
        choice = self._call.answer.choice(call, progress, delta, None if progress.begun else self._prompt_logprobs.get(prompt))
        progress.begun = True
        return self._event(choice)

    def _event(self, choice: Json) -> bytes:
        chunk = self._call.answer.wrap(self._call, [choice])
        if self._call.head.continuous_usage:
            progress = self._choices[choice["index"]]
            chunk["usage"] = usage(len(self._call.requests[progress.prompt].prompt_ids), progress.tokens)
        return event(chunk)

    def _cut(self, progress: ChoiceState) -> tuple[bytes, bytes]:
        """Head and tail of a chunk that holds nothing but text, cut out of one written the long way."""
        choice = self._call.answer.choice(self._call, progress, Delta(request_id="", index=0, text=_MARK, token_ids=[]), None)
        head, _, tail = event(self._call.answer.wrap(self._call, [choice])).rpartition(_encode(_MARK))
        self._cuts[progress.index] = head, tail
        return head, tail
