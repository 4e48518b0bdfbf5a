"""What `LLM.generate` returns, shaped as vLLM users know it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rayneuron.types import Delta, FinishReason, Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token, its rank (1 is the likeliest; None where it was not the chosen one and not asked), its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `logprobs`: for every token, token id -> Logprob of the chosen and the likeliest."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class RequestOutput:
    """All choices of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether every choice is finished."""
        return all(o.finished for o in self.outputs)


Spell = Callable[[int], str]


def collect(request: Request, prompt: str | None, deltas: Iterable[Delta], spell: Spell) -> RequestOutput:
    """Join the deltas of one request. `spell`: token id -> text."""
    listed = bool(request.params.logprob_token_ids)
    outputs = [CompletionOutput(index=i) for i in range(request.params.n)]
    result = RequestOutput(request.id, prompt, request.prompt_ids, outputs)
    for delta in deltas:
        choice = outputs[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + [table(entry, spell, not listed) for entry in delta.logprobs]
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(entry.logprob for entry in delta.logprobs)
        if delta.prompt_logprobs is not None:
            result.prompt_logprobs = [None if entry is None else table(entry, spell) for entry in delta.prompt_logprobs]
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.usage is not None:
            result.num_cached_tokens = delta.usage.cached_tokens
    return result


def table(entry: TokenLogprobs, spell: Spell, ranked: bool = True) -> dict[int, Logprob]:
    """One position as vLLM gives it: the likeliest in order, or where not `ranked` some that were asked for; the chosen one always among
    them."""
    chosen = {entry.token_id: Logprob(entry.logprob, entry.rank, spell(entry.token_id))}
    return {t: Logprob(p, rank if ranked else None, spell(t)) for rank, (t, p) in enumerate(entry.top, 1)} | chosen
