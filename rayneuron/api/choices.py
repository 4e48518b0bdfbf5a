"""The choices of a reply: gathered from the deltas of all prompts, log-probabilities as OpenAI and vLLM show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayneuron.api.call import Call
from rayneuron.api.stream import Tally, prompts
from rayneuron.errors import RayNeuronError
from rayneuron.types import Delta, FinishReason, TokenLogprobs

FLOOR = -9999.0  # JSON has no infinity; vLLM's stand-in


@dataclass(slots=True)
class Choice:
    """One finished choice; `index` is its place in the reply, `tried` among those of its prompt."""

    index: int
    prompt: int
    tried: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Gathered:
    """Everything a unary reply is written from. `prompt_logprobs[p]` belongs to prompt p."""

    choices: list[Choice]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]]
    usage: dict[str, Any]


def gather(call: Call, deltas: Iterable[Delta]) -> Gathered:
    """Join deltas in arrival order; raises the error of a delta that carries one. Where more were tried the best remain, and come first."""
    n, places = call.best or call.n, prompts(call)
    choices = [Choice(index, *divmod(index, n)) for index in range(n * len(call.requests))]
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}
    tally = Tally(call)
    for delta in deltas:
        if delta.error is not None:
            raise RayNeuronError(delta.error)
        prompt = places[delta.request_id]
        choice = choices[prompt * n + delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            prompt_logprobs[prompt] = delta.prompt_logprobs
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        tally.add(delta)
    return Gathered(_best(call, choices) if call.best else choices, prompt_logprobs, tally.usage())


def _best(call: Call, choices: list[Choice]) -> list[Choice]:
    """Of each prompt those with the highest log-probability a token."""
    ranked = sorted(choices, key=lambda choice: (choice.prompt, -_likely(choice)))
    kept = [choice for at in range(0, len(ranked), call.best) for choice in ranked[at : at + call.n]]
    for index, choice in enumerate(kept):
        choice.index = index
    return kept


def _likely(choice: Choice) -> float:
    if choice.finish_reason == "error" or not choice.logprobs:
        return FLOOR
    return sum(finite(entry.logprob) for entry in choice.logprobs) / len(choice.logprobs)


def finite(logprob: float) -> float:
    """`logprob` as JSON can carry it."""
    return logprob if logprob > FLOOR else FLOOR  # NaN compares false


def shown(call: Call, token_id: int) -> str:
    """A token as text, or as `token_id:<n>` where the call asked for that."""
    return f"token_id:{token_id}" if call.head.tokens_as_ids or call.text.wordless else call.text.token(token_id)


class Offsets:
    """Where each token of the output begins in the text that is sent, in characters; a token inside a character has that one's place."""

    __slots__ = ("_place", "_words")

    def __init__(self, call: Call, prompt: int = 0) -> None:
        request = call.requests[prompt]
        self._words = call.text.detokenizer(request.prompt_ids, request.params.skip_special_tokens)
        self._place = len(call.echo[prompt]) if call.echo else 0

    def of(self, token_id: int) -> int:
        """Offset of the next token."""
        place = self._place
        self._place += len(self._words.push(token_id))
        return place


def completion_logprobs(
    call: Call, ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """The `logprobs` object of a completion choice. A None entry (first prompt token) has no probability.

    The chosen token is always among `top_logprobs`; two ids that show alike keep the likelier one.
    """
    return {
        "tokens": [shown(call, token_id) for token_id in ids],
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _table(call, entry) for entry in entries],
        "text_offset": list(offsets),
    }


def _table(call: Call, entry: TokenLogprobs) -> dict[str, float]:
    table = {shown(call, entry.token_id): finite(entry.logprob)}
    for token_id, logprob in entry.top[: call.logprobs]:
        name = shown(call, token_id)
        table[name] = max(table.get(name, FLOOR), finite(logprob))
    return table


def chat_logprobs(call: Call, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice; `bytes` are the token's true bytes, also where they are part of a character."""
    content = []
    for entry in entries:
        item = _item(call, entry.token_id, entry.logprob)
        item["top_logprobs"] = [_item(call, token_id, logprob) for token_id, logprob in entry.top[: call.logprobs]]
        content.append(item)
    return {"content": content, "refusal": None}


def _item(call: Call, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": shown(call, token_id), "logprob": finite(logprob), "bytes": list(call.text.token_bytes(token_id))}


def prompt_table(call: Call, entries: Iterable[TokenLogprobs | None]) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: per token an object from id to {logprob, rank, decoded_token}; the first is null."""
    return [None if entry is None else _ranked(call, entry) for entry in entries]


def _ranked(call: Call, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(entry.top[: call.prompt_logprobs], start=1):
        ranked.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": call.text.token(token_id)}
        for token_id, (logprob, rank) in ranked.items()
    }
