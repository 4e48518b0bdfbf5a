"""A step's output to tokens, logprobs and finish reasons, one delta a sequence.

Pure: what needs the logits on the host is asked of `ReadsLogits`. Shapes: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from rayneuron.devices.base import StepOutput
from rayneuron.engine.scheduler import Plan, Work
from rayneuron.engine.sequence import Sequence
from rayneuron.errors import RequestError
from rayneuron.types import TokenDelta, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
FAILED = "this choice failed; the server log has the details under this request's id"


class ReadsLogits(Protocol):
    """What is read out of logits on the host; `engine.host_sampling` in an engine."""

    def next_id(self, row: Tensor, sequence: Sequence) -> int:
        """The next token of a sequence from its logits [V]."""

    def logprobs(self, row: Tensor, token: int, count: int) -> TokenLogprobs:
        """The chosen token's logprob and the `count` likeliest, of logits [V]."""

    def prompt_logprobs(self, rows: Tensor, following: list[int], count: int) -> list[TokenLogprobs]:
        """The same for every prompt token that follows, of logits [T,V]."""


def advance(plan: Plan, output: StepOutput, now: float, host: ReadsLogits) -> list[TokenDelta | None]:
    """A delta for each sequence of the plan that sampled a token or ended, None for one still in its prompt or no longer meant."""
    ids = output.ids[:, -1].tolist() if output.ids is not None else None
    complete = output.complete.tolist() if output.complete is not None else None
    deltas: list[TokenDelta | None] = []
    for i, work in enumerate(plan.works):
        sequence = work.sequence
        if not work.valid:
            deltas.append(None)
            continue
        if work.followed:
            sequence.unseen -= 1
        token = None if ids is None or (complete is not None and not complete[i]) else ids[i]
        row = None if output.logits is None else output.logits[i]
        try:
            deltas.append(_advance(work, token, None if ids is None else ids[i], row, now, host))
        except Exception as wrong:  # the KV is sound, and the others have their tokens: only this choice ends
            deltas.append(failed(sequence, wrong))
    return deltas


def _advance(work: Work, token: int | None, taken: int | None, row: Tensor | None, now: float, host: ReadsLogits) -> TokenDelta | None:
    """One sequence's delta. `token`: what the device sampled and meant, `taken`: what it goes on with; row: [V], [T,V] for scores."""
    sequence = work.sequence
    if taken is None:
        assert row is not None
        row = _score(work, row, host)
    if not work.last:
        return None
    if sequence.max_tokens == 0:
        return _scored(sequence)
    if token is None or sequence.edited:
        assert row is not None
        token = host.next_id(row, sequence)
        if sequence.computed > work.start + work.count and taken is not None and token != taken:
            sequence.rewind(work.start + work.count)  # a step is under way with the token that the device had taken
    return _append(sequence, token, row, now, host)


def failed(sequence: Sequence, wrong: Exception) -> TokenDelta:
    """The last delta of a choice whose token could not be told."""
    asked = isinstance(wrong, RequestError)
    if not asked:
        log.error("request %s, choice %d failed", sequence.request.id, sequence.index, exc_info=wrong)
    sequence.finish_reason = "error"
    delta = TokenDelta(sequence.request.id, sequence.index, [], finish_reason="error", preemptions=sequence.preemptions)
    delta.error, delta.fault = str(wrong) if asked else FAILED, "request" if asked else "choice"
    return delta


def _score(work: Work, logits: Tensor, host: ReadsLogits) -> Tensor:
    """Report the prompt's logprobs of this chunk; returns the logits [V] of its last position. logits: [T, V]."""
    sequence = work.sequence
    assert sequence.prompt_logprobs is not None
    following = sequence.ids[work.start + 1 : work.start + work.count + 1]
    if following:
        count = sequence.params.prompt_logprobs or 0
        sequence.prompt_logprobs += host.prompt_logprobs(logits[: len(following)], following, count)
    return logits[work.count - 1]


def _scored(sequence: Sequence) -> TokenDelta:
    """The only delta of a request that asked for no token."""
    sequence.finish_reason = "length"
    delta = TokenDelta(sequence.request.id, sequence.index, [], finish_reason="length", preemptions=sequence.preemptions)
    delta.cached_tokens = sequence.cached
    delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    return delta


def _append(sequence: Sequence, token: int, row: Tensor | None, now: float, host: ReadsLogits) -> TokenDelta:
    request = sequence.request
    sequence.append(token)
    generated = len(sequence.ids) - sequence.prompt_len
    delta = TokenDelta(request.id, sequence.index, [token])
    if generated == 1 and not sequence.stamps.first_token:
        sequence.stamps.prefill_done = sequence.stamps.first_token = now
        delta.cached_tokens = sequence.cached
        delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    if sequence.needs == "logits" and (count := request.params.logprobs) is not None:
        assert row is not None
        delta.logprobs = [host.logprobs(row, token, count)]
    if token in sequence.stop_ids and generated >= request.params.min_tokens:
        delta.finish_reason = "stop"
        delta.eos = token in sequence.eos_ids
        delta.stop_token = None if delta.eos else token
    elif generated >= sequence.max_tokens:
        delta.finish_reason = "length"
    sequence.finish_reason = delta.finish_reason
    if sequence.preemptions:
        delta.preemptions = sequence.preemptions
    return delta
