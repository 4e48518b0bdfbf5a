"""One choice of one request: its state, its part of a step, and what becomes of it by a step's output, one delta a sequence.

Pure: what needs the logits on the host is asked of `ReadsLogits`. Shapes: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rayneuron.devices.base import StepOutput
from rayneuron.engine.blocks import Hold
from rayneuron.engine.remote import Loan
from rayneuron.errors import RequestError
from rayneuron.types import FinishReason, Request, SamplingParams, Stamps, TokenDelta, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
FAILED = "this choice failed; the server log has the details under this request's id"

# follows: another choice computes the prompt it will share; waiting: it holds nothing; remote: another pool computes its prompt, into what
# it holds; prefill: more than one id has no KV; decode: one; due: none, its next id is on the way. Who has ended is nowhere any more.
Phase = Literal["follows", "waiting", "remote", "prefill", "decode", "due"]


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated ids, how many of them have KV (`computed`), and what holds it (None while waiting).

    `unseen`: ids that steps under way will add and the host has not seen; those steps' KV counts as computed, as `settled` once they have
    ended. `epoch` rises when steps under way are no longer valid for this sequence. `loan`: it is computed for somebody else; it ends with
    its first token, and is not preempted. `asked`: the key under which another pool computes its prompt.
    """

    request: Request
    index: int
    ids: list[int]
    seed: int
    max_tokens: int
    order: int
    leader: Sequence | None = None  # the choice whose prompt KV may be shared
    prompt_len: int = 0
    phase: Phase = "waiting"
    computed: int = 0
    settled: int = 0
    unseen: int = 0
    epoch: int = 0
    hold: Hold | None = None
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    cached: int = 0  # prompt tokens whose KV was there before its first step
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()  # EOS and the request's own
    stamps: Stamps = field(default_factory=Stamps)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    loan: Loan | None = None
    asked: str = ""
    edits: Any = None  # engine.logits.Edits, where this request edits logits; made with the first row
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    rank: tuple[int, int] = field(init=False)  # order of service: priority first (lower earlier), then arrival
    edited: bool = field(init=False)  # the host edits its logits
    needs: Literal["likeliest", "sampled", "logits"] = field(init=False)  # the least a step must return where it samples

    def __post_init__(self) -> None:
        params = self.request.params
        self.rank = (self.request.priority, self.order)
        self.edited = params.edits_logits
        self.needs = "logits" if self.edited or params.logprobs is not None else "sampled" if params.temperature else "likeliest"

    @property
    def params(self) -> SamplingParams:
        """How this request samples."""
        return self.request.params

    @property
    def length(self) -> int:
        """Ids, those under way included."""
        return len(self.ids) + self.unseen

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Ids that have no KV yet."""
        return len(self.ids) + self.unseen - self.computed

    def run(self, computed: int) -> None:
        """It holds blocks, and its first `computed` ids have KV or will when the steps under way have ended."""
        self.computed = computed
        left = len(self.ids) + self.unseen - computed
        self.phase = "decode" if left == 1 else "prefill" if left else "due"

    def append(self, token: int) -> None:
        """The next id is known."""
        self.ids.append(token)
        self.run(self.computed)

    def rewind(self, computed: int) -> None:
        """Steps under way no longer count; only the first `computed` ids have KV."""
        self.unseen = 0
        self.epoch += 1
        self.settled = min(self.settled, computed)
        self.run(computed)


class Work:
    """One sequence's part of a step: compute KV for ids[start : start + count].

    `last`: a token is sampled at the end: every id has KV afterwards. `followed`: the device hands that token to the next step itself.
    """

    __slots__ = ("count", "epoch", "followed", "last", "sequence", "start")

    def __init__(self, sequence: Sequence, start: int, count: int) -> None:
        self.sequence = sequence
        self.start = start
        self.count = count
        self.last = start + count == len(sequence.ids) + sequence.unseen
        self.followed = False
        self.epoch = sequence.epoch

    @property
    def valid(self) -> bool:
        """Whether its result still counts: the sequence has not ended, been preempted or rewound since."""
        return self.epoch == self.sequence.epoch and self.sequence.finish_reason is None


@dataclass(slots=True)
class Plan:
    """What one step does. `copies`: (from, to) blocks of prompt KV that choices of one request share in part, copied before the step."""

    tag: Literal["prefill", "decode"]
    works: list[Work]
    copies: list[tuple[int, int]] = field(default_factory=list)


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
    delta = TokenDelta(request.id, sequence.index, [token])
    if not sequence.stamps.first_token:
        sequence.stamps.prefill_done = sequence.stamps.first_token = now
        delta.cached_tokens = sequence.cached
        delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    if sequence.needs == "logits" and (count := request.params.logprobs) is not None:
        assert row is not None
        delta.logprobs = [host.logprobs(row, token, count)]
    return ended(sequence, delta)


def ended(sequence: Sequence, delta: TokenDelta) -> TokenDelta:
    """A delta that holds the last of its ids, with why that ends the sequence, if it does."""
    token, generated = sequence.ids[-1], sequence.generated
    if token in sequence.stop_ids and generated >= sequence.params.min_tokens:
        delta.finish_reason = "stop"
        delta.eos = token in sequence.eos_ids
        delta.stop_token = None if delta.eos else token
    elif generated >= sequence.max_tokens:
        delta.finish_reason = "length"
    sequence.finish_reason = delta.finish_reason
    delta.preemptions = sequence.preemptions
    return delta
