"""Drafts for decode steps: asked of a proposer, as many as pay, and what becomes of them. Whatever they are, they change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rayneuron.config_features import SpeculativeConfig
from rayneuron.devices.base import DRAFTED, IF_SURE
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import Capacity
from rayneuron.engine.grammar import Grammar
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.engine.speculation.lookup import Echo, Prediction
from rayneuron.engine.speculation.pace import CHAINED, FORCED, SURE, Candidate, Pace, Record
from rayneuron.engine.speculation.reading import MOST, Reached, Readings
from rayneuron.policies.chunks import fit
from rayneuron.types import Profile, TokenDelta

PREDICTED = 0  # the kind of a client's prediction; a match of n ids is kind n

# Why a step tries no draft: none were found; what one takes without is not known yet; those that are there do not pay; the draft model has
# still to read the text; there is no free KV for them.
NONE, REST, COST, BEHIND, ROOM = "none", "rest", "cost", "behind", "room"

# (sequence, most) -> up to so many ids that may come next, and their kind
Propose = Callable[[Sequence, int], tuple[tuple[int, ...], int]]


@dataclass(slots=True)
class Drafter:
    """What drafting remembers of one sequence."""

    record: Record = field(default_factory=Record)
    read: Reached = field(default_factory=Reached)
    echo: Echo | None = None
    prediction: Prediction | None = None
    accepted: int = 0  # drafts of the prediction
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Chain:
    """What drafts within a step: how far a draft model has `read` what (None: heads, which have seen all the model has computed), the most
    positions it can place, and the most drafts a row it can make. `stops`: of likeliest ones it makes none behind one it is not sure of."""

    reading: Readings | None
    limit: int
    most: int = MOST
    stops: bool = False


class Speculation:
    """Up to `tokens` drafts a row from `propose`, and where it has none from a draft model, if there is one; `pace` says how many pay,
    None: all there are. `schedule`: (first, last, most) for steps of so many rows, where that is not `tokens`."""

    def __init__(
        self, tokens: int, propose: Propose, pace: Pace | None = None, chain: Chain | None = None,
        schedule: tuple[tuple[int, int, int], ...] = (),
    ) -> None:  # fmt: skip
        self.tokens = tokens
        self._schedule = schedule
        self._propose = propose
        self._pace = pace
        self._chain = chain
        self._why = NONE  # the rows that were looked at last had no drafts

    def _proposed(self, works: list[Work]) -> tuple[list[tuple[int, ...]], str]:
        """Drafts for every row of a decode step, () for none, nothing where none are looked for; and why nobody has any, if so."""
        pace, chain, rows, length = self._pace, self._chain, len(works), 1 + max([work.start for work in works])
        tokens = next((most for first, last, most in self._schedule if first <= rows <= last), self.tokens)
        if not tokens:
            return [], REST
        sure = chain is not None and chain.stops and all([work.sequence.needs == "likeliest" for work in works])
        if pace is not None and not pace.begins(rows, length):
            return [], REST
        looks = pace is None or pace.looks or chain is not None
        if not looks and all([work.sequence.grammar is None for work in works]):
            return [], self._why
        found: list[tuple[int, ...]] = []
        behind: dict[int, int] = {}
        why = NONE if looks else self._why
        for i, work in enumerate(works):
            sequence = work.sequence
            drafts: tuple[int, ...] = ()
            drafter: Drafter = sequence.drafter or Drafter()
            sequence.drafter = drafter
            most = min(tokens, sequence.max_tokens - sequence.generated - 1) if sequence.search is None else 0
            grammar: Grammar | None = sequence.grammar
            if grammar is not None and most > 0 and (drafts := grammar.forced(most)):  # what leaves no choice
                drafter.record.kind = FORCED
            elif most > 0 and looks:
                drafts, drafter.record.kind = self._propose(sequence, most)
                if not drafts and pace is not None and drafter.record.kind:
                    why = COST
                drafts = drafts if grammar is None else grammar.allowed(drafts)
            if not drafts and chain is not None and work.start and (most := min(most, chain.most, chain.limit - work.start - 1)) > 0:
                told = DRAFTED - sequence.ids[work.start - 1]
                drafts, drafter.record.kind = (told, *[IF_SURE if sure else told] * (most - 1)), SURE if sure else CHAINED
                behind[i] = chain.reading.behind(sequence, drafter.read, work.start) if chain.reading is not None else 0
            found.append(drafts)
        self._why = why
        if pace is None:
            return found, why
        if not any(found):
            pace.rest()
            return found, why
        candidates = [
            Candidate(work.sequence.drafter.record, len(drafts), work.sequence.needs == "logits", behind.get(i))
            for i, (work, drafts) in enumerate(zip(works, found, strict=True))
        ]
        chosen, self._why = pace.choose(candidates, length), COST
        if not any(chosen):
            pace.rest()
        return [drafts[:n] for drafts, n in zip(found, chosen, strict=True)], COST

    def draft(self, plan: Plan, blocks: Blocks) -> Plan:
        """The plan of a decode step, its works given drafts where that pays and there is room: nobody makes room for a draft."""
        proposed, why = self._proposed(plan.works)
        if not any(proposed):
            plan.paused = why
            return plan
        reading, chained = None if self._chain is None else self._chain.reading, []
        if reading is not None:
            chained = [w for w, draft in zip(plan.works, proposed, strict=True) if draft and draft[0] <= DRAFTED]
            plan.fills = reading.fill(
                (w.sequence, w.sequence.drafter.read, w.start) for w in chained if w.sequence.drafter.read.count < w.start - 1
            )
        for work, draft in zip(plan.works, proposed, strict=True):
            hold = work.sequence.hold
            if draft and hold is not None and not blocks.extend(hold, work.start + 1 + len(draft)):
                draft = draft[: len(hold.blocks) * blocks.space.block - work.start - 1]
            unread = work in chained and work.sequence.drafter.read.count < work.start - 1
            work.drafts = () if unread else draft
            work.wanted = len(work.drafts)
        if any(work.drafts for work in plan.works):
            plan.tag = "verify"
        else:
            plan.paused = BEHIND if plan.fills else ROOM
        return plan

    def learn(self, plan: Plan, deltas: list[TokenDelta | None]) -> None:
        """A step with drafts has ended; what it gave is told of a client's predictions. That a draft model made fewer than were wanted is
        for Pace as if they had not come true."""
        for work, delta in zip(plan.works, deltas, strict=True):
            if not work.drafts or delta is None:
                continue
            drafter: Drafter = work.sequence.drafter
            record = drafter.record
            if record.kind == PREDICTED:
                drafter.accepted += work.accepted
                drafter.refused += len(work.drafts) - work.accepted
                delta.predicted = drafter.accepted, drafter.refused
            if self._chain is not None and self._chain.reading is not None and record.kind <= CHAINED:
                sure = work.start + 1 + min(work.accepted, len(work.drafts) - 1)
                self._chain.reading.reached(work.sequence, drafter.read, sure)
            if self._pace is not None and record.kind <= 0:
                self._pace.learn(record, work.wanted, work.accepted)

    def took(self, plan: Plan, ms: float) -> None:
        """A step has ended, and has taken so long from its planning on."""
        if self._pace is not None and plan.tag != "prefill" and not plan.fills:
            made = [(len(w.drafts), w.sequence.drafter.record.kind) for w in plan.works if w.drafts] if plan.tag == "verify" else []
            passes = max([n for n, kind in made if kind <= CHAINED], default=0)
            self._pace.took(len(plan.works), 1 + max([work.start for work in plan.works]), sum([n for n, _ in made]), ms, passes)


def speculation(
    said: SpeculativeConfig, profile: Profile, capacity: Capacity, limit: int | None = None, whole: bool = False, most: int | None = None
) -> Speculation:  # fmt: skip
    """What a deployment asks for. `limit`: the positions its draft model or heads can place, None where there are none; `whole`: as for
    Pace; `most`: drafts a row that heads can make, None: any number."""
    tokens, lengths = said.num_speculative_tokens, (said.prompt_lookup_min, said.prompt_lookup_max)
    pace = Pace(profile, capacity.rows * (1 + tokens), whole) if said.adaptive else None
    if limit is None:
        return Speculation(tokens, partial(look_up, *lengths, pace=pace), pace, schedule=said.schedule)
    reading = None if said.by_heads else Readings(capacity, fit(profile))
    chain = Chain(reading, limit, most or MOST, stops=reading is not None and said.adaptive and not whole)
    return Speculation(tokens, partial(predicted, *lengths), pace, chain, said.schedule)


def predicted(least: int, most: int, sequence: Sequence, count: int) -> tuple[tuple[int, ...], int]:
    """What a client predicted."""
    drafter: Drafter = sequence.drafter
    said = sequence.request.prediction
    if not said:
        return (), PREDICTED
    if drafter.prediction is None:
        drafter.prediction = Prediction(said, least, most)
    return drafter.prediction.propose(sequence.ids, sequence.prompt_len, count), PREDICTED


def look_up(least: int, most: int, sequence: Sequence, count: int, pace: Pace | None = None) -> tuple[tuple[int, ...], int]:
    """What a client predicted, else what followed the last `least` to `most` ids before, if it may pay; `pace` hears how that fares, tried
    or not."""
    drafter: Drafter = sequence.drafter
    drafts, kind = predicted(least, most, sequence, count)
    if drafts:
        return drafts, kind
    echo, ids, record = drafter.echo, sequence.ids, drafter.record
    if echo is None:
        echo = drafter.echo = Echo(least, most)
    for kind, came in echo.heard(ids):
        if pace is not None:
            pace.heard(record, kind, came)
    record.kind = echo.looks(ids)
    if not record.kind or (pace is not None and pace.hope(record) < pace.bar):
        return (), record.kind
    return echo.propose(ids, count), record.kind
