"""OpenAI's server-sent events: a call's deltas to bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rayneuron.api.call import Call, Json
from rayneuron.api.errors import error_body
from rayneuron.api.stream import DONE, ChoiceState, Mould, Tally, event, prompts, usage
from rayneuron.errors import RayNeuronError
from rayneuron.types import Delta, TokenLogprobs, join


class Writers(NamedTuple):
    """What an endpoint's chunks are made of.

    `wrap(call, choices)`: a whole chunk. `opening(call)`: choices of the chunks sent before any text.
    `choice(call, progress, delta, prompt_logprobs)`: one choice of a chunk; `progress.begun` tells a choice's first chunk from later ones.
    """

    wrap: Callable[[Call, list[Json]], Json]
    opening: Callable[[Call], list[Json]]
    choice: Callable[..., Json]


def frame(call: Call, kind: str, choices: list[Json]) -> Json:
    """What every reply and chunk of OpenAI's says first."""
    return {"id": call.id, "object": kind, "created": call.created, "model": call.head.model, "choices": choices}


class Events:
    """The stream of one call. `done` once every choice finished or one failed; nothing may be sent after `error`."""

    content_type = "text/event-stream"

    __slots__ = ("_bare", "_call", "_chunks", "_choices", "_finished", "_held", "_moulds", "_prompts", "_said", "_tally", "done", "failed")

    def __init__(self, chunks: Writers, call: Call) -> None:
        self._call = call
        self._chunks = chunks
        self._prompts = prompts(call)
        self._choices = [ChoiceState(call, index) for index in range(call.choices)]
        self._tally = Tally(call)
        self._moulds: dict[int, Mould] = {}
        head = call.head
        asked = head.return_token_ids or head.continuous_usage or head.stream_interval > 1 or call.echo or call.scan.reasoning is not None
        self._bare = not asked and call.logprobs is None and not call.scan.on  # a chunk before the last holds its text and nothing else
        self._finished = 0
        self._said: dict[int, list[TokenLogprobs | None]] = {}
        self._held: dict[int, list[Delta]] = {}
        self.done = False
        self.failed = False

    def first(self) -> bytes:
        """Chunks that go before any text (the roles of a chat); b"" where there are none."""
        return b"".join(self._event(choice) for choice in self._chunks.opening(self._call))

    def chunk(self, delta: Delta) -> bytes:
        """The bytes of one delta; b"" while they wait for more tokens or for the prompt's probabilities."""
        if self.done:
            return b""
        if delta.error is not None:
            return self.error(RayNeuronError(delta.error))
        prompt = self._prompts[delta.request_id]
        if self._bare and delta.finish_reason is None:
            self._tally.completion_tokens += len(delta.token_ids)
            index = prompt * self._call.n + delta.index
            return (self._moulds.get(index) or self._mould(self._choices[index])).fill(delta.text) if delta.text else b""
        if self._call.echo and self._call.logprobs is not None:
            if delta.prompt_logprobs is not None:
                self._said[prompt] = delta.prompt_logprobs
                held = self._held.pop(prompt, [])
                return b"".join(self._send(prompt, late) for late in [delta, *held])
            if prompt not in self._said:
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
        return event({**self._chunks.wrap(self._call, []), "usage": self._tally.usage()}) + DONE

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
        if plain and progress.scanner is None and (progress.begun or not call.echo):
            progress.begun = True
            if not delta.text:
                return b""
            return (self._moulds.get(progress.index) or self._mould(progress)).fill(delta.text)
        choice = self._chunks.choice(call, progress, delta, None if progress.begun else self._said.get(prompt))
        progress.begun = True
        if plain and progress.scanner is not None and not choice["delta"]:
            return b""  # what it may become is not settled yet
        return self._event(choice)

    def _event(self, choice: Json) -> bytes:
        chunk = self._chunks.wrap(self._call, [choice])
        if self._call.head.continuous_usage:
            progress = self._choices[choice["index"]]
            chunk["usage"] = usage(len(self._call.requests[progress.prompt].prompt_ids), progress.tokens)
        return event(chunk)

    def _mould(self, progress: ChoiceState) -> Mould:
        """That of a chunk which holds nothing but text."""
        choice = self._chunks.choice(self._call, progress, Delta(request_id="", index=0, text=Mould.MARK, token_ids=[]), None)
        made = self._moulds[progress.index] = Mould(event(self._chunks.wrap(self._call, [choice])))
        return made
