"""Who may enter: limits of the queue, and whether a request could ever run here."""

from __future__ import annotations

from dataclasses import dataclass

from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import Capacity
from rayneuron.errors import Busy, RequestError
from rayneuron.types import Request, Snapshot


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much may wait: requests, and prompt tokens (None: no limit); `retry_after_s` is what a refused client is told."""

    max_waiting: int = 256
    max_waiting_tokens: int | None = None
    retry_after_s: float = 1.0


def admit(limits: EngineLimits, load: Snapshot, inbox: int, inbox_tokens: int) -> None:
    """Raise Busy when one more request would wait beyond the limits. Free slots do not count as waiting.

    Slots in use are counted by who runs: a sequence between the queue and its slot has a slot reserved and is in the queue still.
    """
    waiting = load.waiting + inbox
    if waiting + load.running >= limits.max_waiting + load.slots_total:
        raise Busy(f"{waiting} requests are waiting; the limit is {limits.max_waiting}", retry_after_s=limits.retry_after_s)
    tokens = load.waiting_tokens + inbox_tokens
    if limits.max_waiting_tokens is not None and tokens >= limits.max_waiting_tokens:
        raise Busy(f"{tokens} prompt tokens are waiting; the limit is {limits.max_waiting_tokens}", retry_after_s=limits.retry_after_s)


def validate(request: Request, capacity: Capacity, vocab: int, blocks: Blocks) -> None:
    """Raise RequestError naming the field if the request could never run in this engine."""
    params, prompt = request.params, len(request.prompt_ids)
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    for field, ids in (
        ("prompt", request.prompt_ids),
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("banned_token_ids", params.banned_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", [t for phrase in params.bad_words_ids for t in phrase]),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            wrong = next(t for t in ids if not 0 <= t < vocab)
            raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab}", param=field)
    scoring = params.max_tokens == 0
    if prompt > capacity.length or (prompt == capacity.length and not scoring):
        raise RequestError(
            f"the prompt has {prompt} tokens; this server's maximum model length is {capacity.length} including the output", param="prompt"
        )
    if params.max_tokens is not None and prompt + params.max_tokens > capacity.length:
        raise RequestError(
            f"the prompt has {prompt} tokens and max_tokens is {params.max_tokens}, together {prompt + params.max_tokens}; "
            f"this server's maximum model length is {capacity.length}",
            param="max_tokens",
        )
    most = capacity.length if params.max_tokens is None else prompt + params.max_tokens
    if not blocks.fits(most):
        raise RequestError(f"{most} tokens do not fit the KV cache of {blocks.total_tokens} tokens", param="max_tokens")
