"""Waiting and running sequences to the plan of the next step: chunks of prefill alternate with decode steps."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Literal

from rayneuron.engine.blocks import Blocks, Hold
from rayneuron.engine.buckets import Capacity, pack_prefill
from rayneuron.engine.prefix_buckets import chunk_fit
from rayneuron.engine.sequence import Sequence


@dataclass(slots=True)
class Work:
    """One sequence's part of a step: compute KV for ids[start : start + count]."""

    sequence: Sequence
    start: int
    count: int
    last: bool = field(init=False)  # a token is sampled at the end: every id has KV afterwards
    followed: bool = field(init=False, default=False)  # the device hands that token to the next step itself
    epoch: int = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.start + self.count == self.sequence.length
        self.epoch = self.sequence.epoch

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


class Scheduler:
    """Decides who runs. No torch, no clock, no I/O; every admitted sequence fits alone, so service in order never starves one."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.blocks = Blocks(capacity.space)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.waiting_tokens = 0  # prompt tokens of `waiting`, preempted sequences with all their tokens
        self.preemptions = 0
        self._prefilled_last = False

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence at its place by priority and arrival."""
        insort(self.waiting, sequence, key=lambda s: s.rank)
        self.waiting_tokens += sequence.remaining

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or running, and free what it holds."""
        if sequence.hold is not None:
            self.blocks.release(sequence.hold)
            sequence.hold = None
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self.waiting_tokens -= sequence.remaining

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to do."""
        self._admit()
        prefills = [s for s in self.running if s.remaining > 1]
        decodes = [s for s in self.running if s.remaining == 1]
        if prefills and (self._prefilled_last is False or not decodes):
            self._prefilled_last = True
            return Plan("prefill", self._chunks(prefills), self._copies())
        self._prefilled_last = False
        if not decodes:
            return None  # nobody is there, or everybody waits for a token under way
        decodes = self._grow(decodes)
        if decodes:
            return Plan("decode", [Work(s, s.computed, 1) for s in decodes], self._copies())
        return self.plan()  # growing has preempted every decoding sequence; whoever is left or waits can now be served

    def withdraw(self, plan: Plan) -> None:
        """A plan will not be run: what it would have copied is still to be copied."""
        into = {target: (source, target) for source, target in plan.copies}
        for hold in self._holds():
            hold.copy = next((into[block] for block in hold.blocks if block in into), hold.copy)

    def launch(self, plan: Plan, overlaps: bool) -> None:
        """A step has begun: its KV counts as computed. `overlaps`: what the device knows itself of the next token may be planned already.

        Not known to the device: a token that the host edits, or samples from the scores of a prompt; not wanted: one after the last.
        """
        hidden = not overlaps or (plan.tag == "prefill" and wants_scores(plan.works[0].sequence))
        for work in plan.works:
            sequence = work.sequence
            sequence.computed = work.start + work.count
            more = sequence.generated + sequence.unseen + 1 < sequence.max_tokens
            if work.last and more and not hidden and not sequence.params.edits_logits:
                work.followed = True
                sequence.unseen += 1

    def _holds(self) -> list[Hold]:
        return [s.hold for s in self.running if s.hold is not None]

    def _copies(self) -> list[tuple[int, int]]:
        """Copies of blocks that sequences wait for, before anything is written."""
        copies = []
        for hold in self._holds():
            if hold.copy is not None:
                copies.append(hold.copy)
                hold.copy = None
        return copies

    def _admit(self) -> None:
        while self.waiting:
            head = self.waiting[0]
            like, known = self._shareable(head)
            hold = self.blocks.admit(len(head.ids), like, known)
            if hold is None:
                victim = max(self.running, key=lambda s: s.rank, default=None)
                if victim is None or victim.request.priority <= head.request.priority:
                    break
                self._preempt(victim)
                continue
            self.waiting.pop(0)
            self.waiting_tokens -= head.remaining
            head.hold, head.computed = hold, known
            self.running.append(head)

    @staticmethod
    def _shareable(sequence: Sequence) -> tuple[Hold | None, int]:
        """What the leading choice holds, and how many prompt positions of it serve here; the last is computed anew, for its logits."""
        leader = sequence.leader
        wanted = sequence.prompt_len - 1
        if leader is None or leader.hold is None or leader.computed < wanted:
            return None, 0
        return leader.hold, wanted

    def _chunks(self, prefills: list[Sequence]) -> list[Work]:
        prefills.sort(key=lambda s: s.rank)
        first = prefills[0]
        if wants_scores(first):
            return [Work(first, first.computed, min(first.remaining, self.capacity.scores))]
        alike = [s for s in prefills if not wants_scores(s)]
        if self.capacity.prefix:
            return [self._behind_prefix(first)]
        counts = pack_prefill(self.capacity, (s.remaining for s in alike))
        return [Work(s, s.computed, n) for s, n in zip(alike, counts, strict=False)]

    def _behind_prefix(self, first: Sequence) -> Work:
        """A chunk with its bucket's free places taken by the end of what is computed already, which shortens the prefix."""
        count = min(first.remaining, self.capacity.chunk)
        again = chunk_fit(self.capacity, count, first.computed).recomputed
        return Work(first, first.computed - again, count + again)

    def _grow(self, decodes: list[Sequence]) -> list[Sequence]:
        """Room for one more token each, in order of service; the last in order makes room for those before it."""
        order = sorted(decodes, key=lambda s: s.rank)
        kept: list[Sequence] = []
        for sequence in order:
            if sequence.hold is None:
                continue
            while not self.blocks.extend(sequence.hold, sequence.length):
                victim = max(self.running, key=lambda s: s.rank)
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                kept.append(sequence)
        return [s for s in kept if s.hold is not None]

    def _preempt(self, victim: Sequence) -> None:
        """Back to the queue, at its old place; its KV is recomputed when its turn comes."""
        assert victim.hold is not None
        self.blocks.release(victim.hold)
        self.running.remove(victim)
        victim.hold = None
        victim.rewind(0)
        if victim.prompt_logprobs is not None:
            victim.prompt_logprobs = [None]  # they are computed again with the prompt
        victim.preemptions += 1
        self.preemptions += 1
        self.add(victim)

    def check(self) -> None:
        """Raise AssertionError if a row or block is owned twice or by nobody."""
        assert len(self._holds()) == len(self.running), "a sequence runs that holds nothing"
        self.blocks.check(self._holds())
        assert all(s.hold is None for s in self.waiting)
        assert self.waiting_tokens == sum(s.remaining for s in self.waiting)


def wants_scores(sequence: Sequence) -> bool:
    """Whether the logits of every prompt position are still to be reported."""
    return sequence.prompt_logprobs is not None and sequence.computed < sequence.prompt_len - 1 and sequence.generated == 0
