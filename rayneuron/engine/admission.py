"""Whether a request could ever run in this engine; whether it may come in now is for `policies.admission`."""

from __future__ import annotations

from collections.abc import Collection, Set

from rayneuron.devices.base import SCORES
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import Capacity
from rayneuron.errors import RequestError
from rayneuron.policies.admission import room
from rayneuron.types import Request, SamplingParams


def validate(request: Request, capacity: Capacity, vocab: int, blocks: Blocks, eos_ids: Set[int] | None = frozenset()) -> None:
    """Raise RequestError naming the field if the request could never run in this engine.

    `eos_ids` None: its parameters are known to fit.
    """
    params, prompt = request.params, len(request.prompt_ids)
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    left = room(prompt, params.max_tokens, capacity.length)
    _check_ids("prompt", request.prompt_ids, vocab)
    if eos_ids is not None:
        _check_params(params, vocab, eos_ids)
    if params.prompt_logprobs is not None and SCORES not in capacity.wants:
        said = "this deployment has no graphs for prompt_logprobs; its file must say buckets.scores: true"
        raise RequestError(said, param="prompt_logprobs")
    most = prompt + (left if params.max_tokens is None else params.max_tokens)
    if not blocks.fits(most):
        raise RequestError(f"{most} tokens do not fit the KV cache of {blocks.total_tokens} tokens", param="max_tokens")


def _check_params(params: SamplingParams, vocab: int, eos_ids: Set[int]) -> None:
    for field, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("banned_token_ids", params.banned_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words", [t for phrase in params.bad_words_ids for t in phrase]),
    ):
        _check_ids(field, ids, vocab)
    _refuse_nothing(params, vocab, eos_ids)


def _check_ids(field: str, ids: Collection[int], vocab: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        wrong = next(t for t in ids if not 0 <= t < vocab)
        raise RequestError(f"token id {wrong} is outside the vocabulary of {vocab}", param=field)


def _refuse_nothing(params: SamplingParams, vocab: int, eos_ids: Set[int]) -> None:
    """Refuse a request whose first token may be none at all."""
    banned = params.banned_token_ids
    if params.max_tokens == 0 or (params.allowed_token_ids is None and len(banned) + len(params.bad_words_ids) + len(eos_ids) < vocab):
        return
    forbidden = {*banned, *(phrase[0] for phrase in params.bad_words_ids if len(phrase) == 1)}
    if params.min_tokens:
        forbidden |= {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    if params.allowed_token_ids is None:
        if len(forbidden) >= vocab:
            raise RequestError("banned_token_ids, bad_words and min_tokens forbid the whole vocabulary", param="banned_token_ids")
    elif forbidden.issuperset(params.allowed_token_ids):
        said = "banned_token_ids, bad_words or min_tokens (which forbids what would end the output) forbid all of allowed_token_ids"
        raise RequestError(said, param="allowed_token_ids")
