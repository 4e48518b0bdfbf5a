"""Beam search of one request: what its beams are, and by which rule they go on and end. Tokens and numbers only; no KV, no logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from rayneuron.constraints import Beams
from rayneuron.types import FinishReason, SamplingParams, TokenDelta, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

    from rayneuron.engine.commit import ReadsLogits
    from rayneuron.engine.hold import Hold
    from rayneuron.engine.sequence import Sequence

Branch = tuple[float, int, int]  # sum of log-probabilities, its beam, the token


class Hypothesis(NamedTuple):
    """What may be answered: its score, its output, and why it ended."""

    score: float
    ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason


@dataclass(slots=True)
class Beam:
    """A sequence, the sum of its tokens' log-probabilities, and those it is to show."""

    sequence: Sequence
    score: float = 0.0
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True, eq=False)
class Search:
    """The beams of one request. All take part in a step or none; `spare`: rows reserved for those that are not there yet.

    `told`: what the step gave, by sequence: the likeliest (token, log-probability), and the logits, for whoever shows more of them.
    `sources`: new beams that hold nothing yet, and of whom they come.
    """

    leader: Sequence
    ends: frozenset[int]
    beams: list[Beam] = field(default_factory=list)
    spare: list[Hold] = field(default_factory=list)
    told: dict[Sequence, tuple[list[tuple[int, float]], Tensor]] = field(default_factory=dict)
    sources: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    done: list[Hypothesis] = field(default_factory=list)  # the best first
    needs: int = 0  # blocks without which it will not come further than it came

    def __post_init__(self) -> None:
        self.begin()

    @property
    def params(self) -> SamplingParams:
        """How its request searches."""
        return self.leader.params

    @property
    def said(self) -> Beams:
        """What its request says of beams."""
        assert self.params.beams is not None
        return self.params.beams

    @property
    def width(self) -> int:
        """Beams at once."""
        return self.said.width

    @property
    def count(self) -> int:
        """Candidates of a beam: one end of each kind leaves enough to go on with."""
        return max(2, 1 + len(self.ends)) * self.width

    @property
    def running(self) -> bool:
        """Whether its beams hold anything."""
        return self.beams[0].sequence.hold is not None

    @property
    def complete(self) -> bool:
        """Whether every beam's step has ended."""
        return len(self.told) == len(self.beams)

    def begin(self) -> None:
        """From the prompt: nothing has been searched."""
        self.beams = [Beam(self.leader, logprobs=None if self.params.logprobs is None else [])]
        self.told, self.sources, self.spare, self.done = {}, [], [], []

    def decide(self, host: ReadsLogits) -> list[Branch]:
        """How it goes on after a complete step, the best first; nothing where it has ended, and `done` holds what is answered."""
        pool = [
            (beam.score + logprob, at, token)
            for at, beam in enumerate(self.beams)
            for token, logprob in self.told[beam.sequence][0]
            if logprob > float("-inf")
        ]
        pool.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        made = self.beams[0].sequence.generated + 1
        last = made >= self.leader.max_tokens
        return (self._as_vllm if self.said.rule == "vllm" else self._as_transformers)(pool, made, last, host)

    def _as_transformers(self, pool: list[Branch], made: int, last: bool, host: ReadsLogits) -> list[Branch]:
        """Those that end among the best `width` compete for the answer; it is over once no beam can come before the worst of them."""
        said = self.said
        pool = pool[: self.count]
        if not (said.early_stopping is True and len(self.done) == self.width):
            for candidate in pool[: self.width]:
                if last or candidate[2] in self.ends:
                    self._end(candidate, candidate[0] / made**said.length_penalty, host)
            del self.done[self.width :]
        going = [] if last else [candidate for candidate in pool if candidate[2] not in self.ends][: self.width]
        if going and len(self.done) == self.width:
            furthest = self.leader.max_tokens if said.early_stopping == "never" and said.length_penalty > 0 else made
            if said.early_stopping is True or going[0][0] / furthest**said.length_penalty <= self.done[-1].score:
                return []
        return going

    def _as_vllm(self, pool: list[Branch], made: int, last: bool, host: ReadsLogits) -> list[Branch]:
        """Every end is kept, however likely; it is over when there is no room for another token. Lengths count the prompt, and no end."""
        said = self.said
        length = self.leader.prompt_len + made
        going = []
        for candidate in pool:
            if candidate[2] in self.ends:
                self._end(candidate, candidate[0] / (length - 1) ** said.length_penalty, host)
            else:
                going.append(candidate)
        del going[self.width :]
        for candidate in going if last else ():
            self._end(candidate, candidate[0] / length**said.length_penalty, host)
        return [] if last else going

    def _end(self, candidate: Branch, score: float, host: ReadsLogits) -> None:
        _, at, token = candidate
        sequence = self.beams[at].sequence
        ids = [*sequence.ids[sequence.prompt_len :], token]
        self.done.append(Hypothesis(score, ids, self.shown(at, token, host), "stop" if token in self.ends else "length"))
        self.done.sort(key=lambda hypothesis: -hypothesis.score)  # equal ones in the order they came

    def shown(self, at: int, token: int, host: ReadsLogits) -> list[TokenLogprobs] | None:
        """The log-probabilities of a beam with another token, where they are shown."""
        beam = self.beams[at]
        if beam.logprobs is None:
            return None
        row, params = self.told[beam.sequence][1], self.params
        entry = host.logprobs([row], [token], params.logprobs or 0)[0]
        return [*beam.logprobs, host.listed(row, entry, params.logprob_token_ids) if params.logprob_token_ids else entry]

    def spread(self, delta: TokenDelta) -> list[TokenDelta]:
        """The same for every choice."""
        return [structs.replace(delta, index=index, stamps=self.leader.stamps) for index in range(self.params.n)]

    def answer(self) -> list[TokenDelta]:
        """The best of what was found, a delta a choice. There are fewer than were asked for only where the vocabulary is smaller."""
        deltas = []
        for index in range(self.params.n):
            found = self.done[min(index, len(self.done) - 1)]
            delta = TokenDelta(self.leader.request.id, index, found.ids, found.logprobs, finish_reason=found.finish_reason)
            if found.finish_reason == "stop":
                delta.eos = found.ids[-1] in self.leader.eos_ids
                delta.stop_token = None if delta.eos else found.ids[-1]
            delta.stamps = self.leader.stamps
            delta.cached_tokens, delta.preemptions = self.leader.cached, self.leader.preemptions
            deltas.append(delta)
        deltas[0].prompt_logprobs = self.leader.prompt_logprobs
        return deltas


def forked(parent: Sequence) -> Sequence:
    """Another beam that begins as `parent` does, and holds nothing yet."""
    own = {"ids": list(parent.ids), "hashes": list(parent.hashes)}
    child = structs.replace(parent, **own, hold=None, prompt_logprobs=None, drafter=None)
    child.edits = None if parent.edits is None else parent.edits.of(child)
    return child
