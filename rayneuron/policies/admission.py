"""Whether a call may come in now: one decision over the sequences, tokens and probabilities it asks for; and what could never run."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import NamedTuple, Protocol

from rayneuron.errors import Busy, RequestError
from rayneuron.types import MAX_LOGPROBS, Request, SamplingParams

MAX_LOGPROB_IDS = 128  # ids whose probability is told at each token, as vLLM caps them
SCORES = 50_000  # probabilities one call may ask for, however short the model: each is half a kilobyte until the reply is written


class Bounds(Protocol):
    """How much may wait: sequences, and prompt tokens (None: no limit); `retry_after_s` is what a refused client is told."""

    @property
    def max_waiting(self) -> int: ...

    @property
    def max_waiting_tokens(self) -> int | None: ...

    @property
    def retry_after_s(self) -> float: ...


class Occupancy(NamedTuple):
    """What is in. `slots` run at once, each up to `length` tokens; `sequences` have not finished; `waiting_tokens` of prompts not begun."""

    slots: int
    length: int
    sequences: int = 0
    waiting_tokens: int = 0


class Demand(NamedTuple):
    """What a call brings: prompts, sequences (choices of all prompts), prompt tokens, probabilities. By default the least there is."""

    prompts: int = 1
    sequences: int = 1
    tokens: int = 0
    scores: int = 0


LEAST = Demand()


def measure(requests: Sequence[Request]) -> Demand:
    """What the requests of one call bring together."""
    sequences = sum(r.params.n for r in requests)
    return Demand(len(requests), sequences, sum(len(r.prompt_ids) for r in requests), sum(map(_scores, requests)))


def decide(load: Occupancy, call: Demand, limits: Bounds) -> None:
    """Raise RequestError where the call is too large to come in ever, Busy where it is not now. Sequences that have a slot do not wait.

    One call may fill the slots and half of the queue, never all of it, so that the others are not refused for as long as it lasts.
    """
    most, most_tokens = load.slots + limits.max_waiting // 2, limits.max_waiting_tokens
    if call.sequences > most:
        said = f"{call.prompts} prompts" + (f" x {call.sequences // call.prompts} choices" if call.sequences > call.prompts else "")
        raise RequestError(
            f"{said} in one call are {call.sequences} sequences; this server takes {most}: send several calls",
            param="prompt" if call.prompts > 1 else "n",
        )
    most_scores = max(SCORES, (MAX_LOGPROBS + 1) * load.length)
    if call.scores > most_scores:
        raise RequestError(
            f"the call asks for {call.scores} probabilities (alternatives + 1 for every token); this server gives {most_scores} a call:"
            " ask for fewer alternatives, choices or tokens, or send several calls",
            param="logprobs",
        )
    if most_tokens is not None and call.prompts > 1 and call.tokens > most_tokens:
        raise RequestError(f"the prompts have {call.tokens} tokens; this server takes {most_tokens}: send several calls", param="prompt")
    waiting = max(0, load.sequences - load.slots)
    if load.sequences + call.sequences > load.slots + limits.max_waiting:
        raise Busy(
            f"{waiting} sequences wait, and this call brings {call.sequences}; the limit is {limits.max_waiting}",
            retry_after_s=limits.retry_after_s,
        )
    if most_tokens is not None and load.waiting_tokens and load.waiting_tokens + max(1, call.tokens) > most_tokens:
        raise Busy(
            f"{load.waiting_tokens} prompt tokens wait, and this call brings {call.tokens}; the limit is {most_tokens}",
            retry_after_s=limits.retry_after_s,
        )


def room(prompt: int, asked: int | None, limit: int, *, prompt_name: str = "prompt", name: str = "max_tokens") -> int:
    """Output tokens that fit behind a prompt where both together are at most `limit`. RequestError where the prompt or `asked` does not.

    `asked` 0 only scores the prompt, which may then fill the limit; None asks for whatever fits. The names are those of the fields.
    """
    left = limit - prompt
    if left < 0 or (left == 0 and asked != 0):
        raise RequestError(
            f"the prompt has {prompt} tokens, but this model takes at most {limit} tokens, prompt and output together"
            + (", which leaves none for the output" if left == 0 else ""),
            param=prompt_name,
        )
    if asked is not None and asked > left:
        raise RequestError(
            f"{name} is {asked} and the prompt has {prompt} tokens, {prompt + asked} together, but this model takes at most {limit};"
            f" ask for at most {left} or leave {name} out",
            param=name,
        )
    return left


def validate(request: Request, length: int, kv_tokens: int, vocab: int, eos_ids: Set[int] | None = frozenset()) -> None:
    """Raise RequestError naming the field if the request could never run in an engine of sequences of `length` and KV of `kv_tokens`.

    `eos_ids` None: its parameters are known to fit.
    """
    params, prompt = request.params, len(request.prompt_ids)
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    left = room(prompt, params.max_tokens, length)
    _check_ids("prompt", request.prompt_ids, vocab)
    if request.pooling not in (None, "last", "mean"):
        raise RequestError(f"this model makes vectors by {request.pooling}; here they are of the last token, or the mean", param="model")
    if request.output_ids:
        _check_output(request, left if params.max_tokens is None else params.max_tokens, vocab)
    _check_ids("prediction", request.prediction or (), vocab)
    if eos_ids is not None:
        _check_params(params, vocab, eos_ids)
    most = prompt + (left if params.max_tokens is None else params.max_tokens)
    if most > kv_tokens:
        raise RequestError(f"{most} tokens do not fit the KV cache of {kv_tokens} tokens", param="max_tokens")


def _check_output(request: Request, most: int, vocab: int) -> None:
    """Of a request that goes on behind what another engine has generated."""
    if request.params.n > 1 or request.params.prompt_logprobs is not None:
        raise RequestError("output_ids belong to one choice (n 1) whose prompt_logprobs have been told", param="output_ids")
    if len(request.output_ids) >= most:
        said = f"output_ids holds {len(request.output_ids)} tokens, which leaves none of {most} to generate"
        raise RequestError(said, param="output_ids")
    _check_ids("output_ids", request.output_ids, vocab)


def _check_params(params: SamplingParams, vocab: int, eos_ids: Set[int]) -> None:
    for field, ids in (
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("banned_token_ids", params.banned_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("bad_words", [t for phrase in params.bad_words_ids for t in phrase]),
    ):
        _check_ids(field, ids, vocab)
    if (listed := len(params.logprob_token_ids)) > MAX_LOGPROB_IDS:
        raise RequestError(f"logprob_token_ids may hold at most {MAX_LOGPROB_IDS} token ids, got {listed}", param="logprob_token_ids")
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


def _scores(request: Request) -> int:
    """Probabilities of a request: each prompt token once, each output token of each choice."""
    params = request.params
    prompt = 0 if params.prompt_logprobs is None else len(request.prompt_ids) * (params.prompt_logprobs + 1)
    told = 0 if params.logprobs is None else (len(params.logprob_token_ids) or params.logprobs) + 1
    output = params.n * (params.max_tokens or 0) * told
    return prompt + output
