"""The choices of a unary reply, gathered from the deltas of all prompts, and the sum of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rayneuron.api.call import Call
from rayneuron.api.errors import failed
from rayneuron.types import Delta, FinishReason, TokenLogprobs


@dataclass(slots=True)
class Choice:
    """One finished choice; `index` is its place in the reply."""

    index: int
    prompt: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Tally:
    """Token counts of a call while its deltas arrive. A prompt counts once, however many choices it has."""

    __slots__ = ("_cached", "_call", "completion_tokens")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._cached: dict[str, int] = {}
        self.completion_tokens = 0

    def add(self, delta: Delta) -> None:
        """Count one delta."""
        self.completion_tokens += len(delta.token_ids)
        if delta.usage is not None and delta.usage.cached_tokens:
            self._cached[delta.request_id] = max(delta.usage.cached_tokens, self._cached.get(delta.request_id, 0))

    def usage(self) -> dict[str, Any]:
        """The usage object of the whole call."""
        prompts = sum(len(request.prompt_ids) for request in self._call.requests)
        return usage(prompts, self.completion_tokens, sum(self._cached.values()))


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


@dataclass(slots=True)
class Gathered:
    """Everything a unary reply is written from. `prompt_logprobs[p]` belongs to prompt p."""

    choices: list[Choice]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]]
    usage: dict[str, Any]


def gather(call: Call, deltas: Iterable[Delta]) -> Gathered:
    """Join deltas in arrival order; raises the error of a delta that carries one."""
    n = call.n
    choices = [Choice(index, index // n) for index in range(call.choices)]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    tally = Tally(call)
    for delta in deltas:
        wrong = failed(delta)
        if wrong is not None:
            raise wrong
        prompt = call.prompt(delta.request_id)
        choice = choices[prompt * n + delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            prompt_logprobs[prompt] = delta.prompt_logprobs
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        tally.add(delta)
    return Gathered(choices, prompt_logprobs, tally.usage())
