"""What becomes of sequences by a step's output: one delta a sequence.

Pure: what needs the logits on the host is asked of `ReadsLogits`. Shapes: B rows, T new tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from rayneuron.devices.base import DRAFTED, StepOutput
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.errors import RequestError
from rayneuron.types import TokenDelta, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
FAILED = "this choice failed; the server log has the details under this request's id"


class ReadsLogits(Protocol):
    """What is read out of logits on the host; `engine.host_sampling` in an engine."""

    def next_id(self, row: Tensor, sequence: Sequence, taken: int | None) -> int:
        """The next token of a sequence from its logits [V]; `taken`: what the device has chosen of them, as if nothing were edited."""

    def next_ids(self, rows: Ids[Tensor], sequences: Ids[Sequence], taken: Ids[int | None]) -> list[int | None]:
        """The same of several, as far as one call can choose them: that costs little more than one."""

    def candidates(self, row: Tensor, sequence: Sequence) -> list[tuple[int, float]]:
        """What a beam may go on with, from its logits [V], each with its log-probability."""

    def logprobs(self, rows: Ids[Tensor], tokens: Ids[int], count: int) -> list[TokenLogprobs]:
        """Of each row of logits [V] its token's logprob and the `count` likeliest."""

    def saw(self, sequence: Sequence, row: Tensor) -> None:
        """A token that reports logprobs was chosen from logits [V]."""

    def listed(self, row: Tensor, entry: TokenLogprobs, ids: Ids[int]) -> TokenLogprobs:
        """An entry of logits [V] with these `ids` instead of the likeliest."""


@dataclass(slots=True)
class _Step:
    """What the deltas of a step share. `asked`: tokens whose logprobs are still to be told, by how many alternatives."""

    now: float
    host: ReadsLogits
    asked: dict[int, list[tuple[TokenDelta, int, Tensor, Sequence]]] = field(default_factory=dict)

    def ask(self, delta: TokenDelta, token: int, row: Tensor, sequence: Sequence) -> None:
        """Have a delta tell of one token more."""
        self.host.saw(sequence, row)
        count = 0 if sequence.params.logprob_token_ids else sequence.params.logprobs or 0
        self.asked.setdefault(count, []).append((delta, token, row, sequence))

    def tell(self, deltas: list[TokenDelta | None]) -> list[TokenDelta | None]:
        """The deltas, which tell all that has been asked: one call for many rows costs little more than for one. Who cannot be told
        ends alone."""
        ended: dict[int, TokenDelta] = {}
        for count, asked in self.asked.items():
            try:
                self._tell(count, asked)
            except Exception:
                for one in asked:
                    try:
                        self._tell(count, [one])
                    except Exception as wrong:
                        ended[id(one[0])] = failed(one[3], wrong)
        return [delta and ended.get(id(delta), delta) for delta in deltas] if ended else deltas

    def _tell(self, count: int, asked: list[tuple[TokenDelta, int, Tensor, Sequence]]) -> None:
        entries = self.host.logprobs([row for _, _, row, _ in asked], [token for _, token, _, _ in asked], count)
        for place, (_, _, row, sequence) in enumerate(asked):
            if ids := sequence.params.logprob_token_ids:
                entries[place] = self.host.listed(row, entries[place], ids)
        for (delta, *_), entry in zip(asked, entries, strict=True):
            delta.logprobs = [*(delta.logprobs or ()), entry]


def advance(plan: Plan, output: StepOutput, now: float, host: ReadsLogits) -> list[TokenDelta | None]:
    """A delta for each sequence of the plan that sampled a token or ended, None for one still in its prompt or no longer meant."""
    step = _Step(now, host)
    deltas = _verified(plan.works, output, step) if plan.tag == "verify" else _advanced(plan.works, output, step)
    return step.tell(deltas)


def _advanced(works: list[Work], output: StepOutput, step: _Step) -> list[TokenDelta | None]:
    """The deltas of a step without drafts."""
    ids = output.ids[:, -1].tolist() if output.ids is not None else None
    complete = output.complete.tolist() if output.complete is not None else None
    rows = output.logits.unbind() if output.logits is not None else ()
    chosen: dict[int, int | None] = {}
    if rows and ids is not None and (held := [i for i, w in enumerate(works) if w.last and w.sequence.grammar is not None and w.valid]):
        taken = [ids[i] if complete is None or complete[i] else None for i in held]
        found = step.host.next_ids([rows[i] for i in held], [works[i].sequence for i in held], taken)
        chosen = dict(zip(held, found, strict=True))
    deltas: list[TokenDelta | None] = []
    pooled, plain = output.pooled, not rows and complete is None
    for i, work in enumerate(works):
        sequence = work.sequence
        if work.epoch != sequence.epoch or sequence.finish_reason is not None:
            deltas.append(None)
            continue
        if work.followed:
            sequence.unseen -= 1
        try:
            if pooled is not None:
                deltas.append(_pool(work, pooled[i]))
            elif plain and ids is not None and work.last and sequence.max_tokens:  # nearly always
                deltas.append(_append(TokenDelta(sequence.request.id, sequence.index, []), sequence, ids[i], None, step))
            else:
                token = None if ids is None or (complete is not None and not complete[i]) else ids[i]
                row = rows[i] if rows else None
                deltas.append(_advance(work, token, None if ids is None else ids[i], row, step, chosen.get(i)))
        except Exception as wrong:  # the KV is sound, and the others have their tokens: only this choice ends
            deltas.append(failed(sequence, wrong))
    return deltas


def _verified(works: list[Work], output: StepOutput, step: _Step) -> list[TokenDelta | None]:
    """The deltas of a step with drafts. ids [n] are those of the true tokens one after another, [B,T] have a line a row."""
    assert output.ids is not None
    width = output.ids.shape[1] if output.ids.dim() == 2 else None
    ids, logits = output.ids.flatten().tolist(), None if output.logits is None else output.logits.flatten(0, -2)
    complete = [True] * len(ids) if output.complete is None else output.complete.flatten().tolist()
    drafted = None if output.drafts is None else output.drafts.tolist()
    deltas: list[TokenDelta | None] = []
    at = 0
    for i, work in enumerate(works):
        if drafted is not None:  # by the model, within the step
            work.drafts = tuple(takewhile(DRAFTED.__lt__, drafted[i][work.count : work.tokens]))  # maybe fewer than were wanted
        at = at if width is None else i * width
        mine = slice(at, at + work.tokens)
        at = mine.stop
        if not work.valid:
            deltas.append(None)
            continue
        told = [token if known else None for token, known in zip(ids[mine], complete[mine], strict=True)]
        try:
            if work.sequence.search is not None and logits is not None:
                deltas.append(_advance(work, told[0], ids[mine.start], logits[mine.start], step))
                continue
            deltas.append(_accept(work, told, None if logits is None else logits[mine], step))
        except Exception as wrong:
            deltas.append(failed(work.sequence, wrong))
    return deltas


def _accept(work: Work, told: list[int | None], rows: Tensor | None, step: _Step) -> TokenDelta:
    """The token behind the last known one, and behind every draft that is the token its own position has.

    Each token is chosen as without drafts: from the ids before it, with its own position's random number. So nothing is drawn to accept,
    nothing is taken back, and no request can tell what was drafted. With a draft of one token a position this is also the rejection
    sampling of Leviathan et al. (2023): it is accepted with the probability that the model gives it, else another is drawn from the rest.
    """
    sequence = work.sequence
    delta = TokenDelta(sequence.request.id, sequence.index, [])
    for j, token in enumerate(told):
        row = None if rows is None else rows[j]
        try:
            if token is None or sequence.edited:
                assert row is not None
                token = step.host.next_id(row, sequence, token)
            _append(delta, sequence, token, row, step)
        except Exception:
            if not j:
                raise
            break  # what it has is delivered; the next step meets the same, and tells it
        if j == len(work.drafts) or token != work.drafts[j]:
            break
        work.accepted += 1
        if delta.finish_reason is not None:
            break
    sequence.run(len(sequence.ids) - 1)  # drafts that came true have KV; what others wrote is written again
    return delta


def _advance(
    work: Work, token: int | None, taken: int | None, row: Tensor | None, step: _Step, chosen: int | None = None
) -> TokenDelta | None:
    """One sequence's delta. `token`: what the device sampled and meant, `taken`: what it goes on with; row: [V], [T,V] for scores;
    `chosen`: what the host has chosen already."""
    sequence = work.sequence
    if taken is None:
        assert row is not None
        row = _score(work, row, step.host)
    if not work.last:
        return None
    if sequence.max_tokens == 0:
        return _scored(sequence)
    if token is None or sequence.edited:
        assert row is not None
        if sequence.search is not None:
            sequence.search.told[sequence] = step.host.candidates(row, sequence), row
            return None
        token = step.host.next_id(row, sequence, token) if chosen is None else chosen
        if sequence.computed > work.start + work.count and taken is not None and token != taken:
            sequence.rewind(work.start + work.count)  # a step is under way with the token that the device had taken
    return _append(TokenDelta(sequence.request.id, sequence.index, []), sequence, token, row, step)


def _pool(work: Work, row: Tensor) -> TokenDelta | None:
    """The only delta of a request for hidden states, once the last of its prompt is there. row: [2,E], the last and the sum of the step."""
    sequence = work.sequence
    sequence.pooled = row[1] if sequence.pooled is None else sequence.pooled + row[1]
    if not work.last:
        return None
    delta = _scored(sequence)
    delta.finish_reason = sequence.finish_reason = "stop"
    pooled = sequence.pooled / sequence.prompt_len if sequence.whole else row[0]
    delta.pooled = pooled.numpy().tobytes()
    return delta


def failed(sequence: Sequence, wrong: Exception) -> TokenDelta:
    """The last delta of a choice whose token could not be told."""
    asked = isinstance(wrong, RequestError)
    if not asked:
        log.error("request %s, choice %d failed", sequence.request.id, sequence.index, exc_info=wrong)
    sequence.finish_reason = "error"
    delta = TokenDelta(sequence.request.id, sequence.index, [], finish_reason="error", preemptions=sequence.preemptions)
    delta.error, delta.fault = str(wrong) if asked else FAILED, "request" if asked else "choice"
    delta.param = wrong.param if isinstance(wrong, RequestError) else None
    return delta


def _score(work: Work, logits: Tensor, host: ReadsLogits) -> Tensor:
    """Report the prompt's logprobs of this chunk; returns the logits [V] of its last position. logits: [T, V]."""
    sequence = work.sequence
    assert sequence.prompt_logprobs is not None
    following = sequence.ids[work.start + 1 : work.start + work.count + 1]
    if following:
        count = sequence.params.prompt_logprobs or 0
        sequence.prompt_logprobs += host.logprobs(logits[: len(following)].unbind(), following, count)
    return logits[work.count - 1]


def _scored(sequence: Sequence) -> TokenDelta:
    """The only delta of a request that asked for no token."""
    sequence.finish_reason = "length"
    delta = TokenDelta(sequence.request.id, sequence.index, [], finish_reason="length", preemptions=sequence.preemptions)
    delta.cached_tokens = sequence.cached
    delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    return delta


def _append(delta: TokenDelta, sequence: Sequence, token: int, row: Tensor | None, step: _Step) -> TokenDelta:
    """One token more, of the sequence and of its delta."""
    sequence.append(token)
    if sequence.needs == "logits" and sequence.request.params.logprobs is not None:
        assert row is not None
        step.ask(delta, token, row, sequence)
    delta.token_ids.append(token)
    if not sequence.stamps.first_token:
        sequence.stamps.prefill_done = sequence.stamps.first_token = step.now
        delta.cached_tokens = sequence.cached
        delta.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    return ended(sequence, delta) if token in sequence.stop_ids or len(sequence.ids) >= sequence.prompt_len + sequence.max_tokens else delta


def adopt(choices: Mapping[int, Sequence], heard: Iterable[TokenDelta], now: float) -> list[TokenDelta]:
    """First tokens that another engine has sampled, as if they had been here. A choice that failed there has none, and is computed."""
    deltas: list[TokenDelta] = []
    for said in heard:
        choice = choices.get(said.index)
        if choice is None or choice.generated or len(said.token_ids) != 1:
            continue
        choice.ids += said.token_ids
        delta = TokenDelta(choice.request.id, choice.index, said.token_ids, said.logprobs, prompt_logprobs=said.prompt_logprobs)
        delta.cached_tokens, delta.remote = max(choice.cached, said.cached_tokens), True
        choice.prompt_logprobs = None
        choice.stamps.prefill_done = choice.stamps.handed_over = choice.stamps.first_token = now
        deltas.append(ended(choice, delta))
    return deltas


def ended(sequence: Sequence, delta: TokenDelta) -> TokenDelta:
    """A delta that holds the last of its ids, with why that ends the sequence, if it does."""
    token, generated = sequence.ids[-1], sequence.generated
    early = generated < sequence.params.min_tokens and (sequence.grammar is None or token not in sequence.eos_ids)
    if token in sequence.stop_ids and not early:
        delta.finish_reason = "stop"
        delta.eos = token in sequence.eos_ids
        delta.stop_token = None if delta.eos else token
    elif generated >= sequence.max_tokens:
        delta.finish_reason = "length"
    sequence.finish_reason = delta.finish_reason
    delta.preemptions = sequence.preemptions
    return delta
