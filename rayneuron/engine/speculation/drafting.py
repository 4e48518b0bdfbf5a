"""Drafts for decode steps: asked of a proposer, as many as pay, and what becomes of them. Whatever they are, they change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rayneuron.config_features import SpeculativeConfig
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.grammar import Grammar
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.engine.speculation.lookup import Echo, Prediction
from rayneuron.engine.speculation.pace import FORCED, Candidate, Pace, Record
from rayneuron.types import Profile, TokenDelta

PREDICTED = 0  # the kind of a client's prediction; a match of n ids is kind n

# (sequence, most) -> up to so many ids that may come next, and their kind
Propose = Callable[[Sequence, int], tuple[tuple[int, ...], int]]


@dataclass(slots=True)
class Drafter:
    """What drafting remembers of one sequence."""

    record: Record = field(default_factory=Record)
    echo: Echo | None = None
    prediction: Prediction | None = None
    accepted: int = 0  # drafts of the prediction
    refused: int = 0


class Speculation:
    """Up to `tokens` drafts a row from `propose`; `pace` says how many pay, None: all there are."""

    def __init__(self, tokens: int, propose: Propose, pace: Pace | None = None) -> None:
        self.tokens = tokens
        self._propose = propose
        self._pace = pace

    def propose(self, works: list[Work]) -> list[tuple[int, ...]]:
        """Drafts for every row of a decode step, () for none."""
        pace, rows, length = self._pace, len(works), 1 + max([work.start for work in works])
        found: list[tuple[int, ...]] = []
        candidates = []
        for work in works:
            sequence = work.sequence
            if sequence.drafter is None:
                sequence.drafter = Drafter()
            record = sequence.drafter.record
            most = min(self.tokens, sequence.max_tokens - sequence.generated - 1) if sequence.group is None else 0
            grammar: Grammar | None = sequence.grammar
            drafts = _forced(grammar, most)
            if drafts:
                record.kind = FORCED
            elif most > 0 and not (pace is not None and pace.hopeless(record, rows, length)):
                drafts, record.kind = self._propose(sequence, most)
                drafts = drafts if grammar is None else grammar.allowed(drafts)
            found.append(drafts)
            candidates.append(Candidate(record, len(drafts), sequence.needs == "logits"))
        if pace is None:
            return found
        return [drafts[:n] for drafts, n in zip(found, pace.choose(candidates, length), strict=True)]

    def draft(self, works: list[Work], blocks: Blocks) -> bool:
        """Give works drafts where that pays and there is room: nobody makes room for a draft. Whether there is any."""
        for work, draft in zip(works, self.propose(works), strict=True):
            hold = work.sequence.hold
            if draft and hold is not None and not blocks.extend(hold, work.start + 1 + len(draft)):
                draft = draft[: len(hold.blocks) * blocks.space.block - work.start - 1]
            work.drafts = draft
        return any(work.drafts for work in works)

    def learn(self, plan: Plan, deltas: list[TokenDelta | None]) -> None:
        """A step with drafts has ended; what it gave is told of a client's predictions."""
        for work, delta in zip(plan.works, deltas, strict=True):
            if not work.drafts or delta is None:
                continue
            drafter: Drafter = work.sequence.drafter
            record = drafter.record
            if record.kind == PREDICTED:
                drafter.accepted += work.accepted
                drafter.refused += len(work.drafts) - work.accepted
                delta.predicted = drafter.accepted, drafter.refused
            if self._pace is not None:
                self._pace.learn(record, len(work.drafts), work.accepted)


def _forced(grammar: Grammar | None, most: int) -> tuple[int, ...]:
    """What a constraint leaves no choice of."""
    return grammar.forced(most) if grammar is not None and most > 0 else ()


def speculation(said: SpeculativeConfig, profile: Profile, rows: int) -> Speculation:
    """What a deployment asks for."""
    pace = Pace(profile, rows * (1 + said.num_speculative_tokens)) if said.adaptive else None
    return Speculation(said.num_speculative_tokens, partial(look_up, said.prompt_lookup_min, said.prompt_lookup_max), pace)


def look_up(least: int, most: int, sequence: Sequence, count: int) -> tuple[tuple[int, ...], int]:
    """What a client predicted, else what followed the last `least` to `most` ids before."""
    drafter: Drafter = sequence.drafter
    predicted = sequence.request.prediction
    if predicted:
        if drafter.prediction is None:
            drafter.prediction = Prediction(predicted, least, most)
        drafts = drafter.prediction.propose(sequence.ids, sequence.prompt_len, count)
        if drafts:
            return drafts, PREDICTED
    if drafter.echo is None:
        drafter.echo = Echo(least, most)
    return drafter.echo.propose(sequence.ids, count)
