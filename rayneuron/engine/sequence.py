"""One choice of one request: its state, and its part of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct, field

from rayneuron.engine.blocks import Blocks
from rayneuron.engine.hold import Hold
from rayneuron.engine.remote import Loan
from rayneuron.types import FinishReason, Request, SamplingParams, Stamps, TokenLogprobs

# follows: another choice computes the prompt it will share; waiting: it holds nothing; remote: another pool computes its prompt, into what
# it holds; prefill: more than one id has no KV, or one whose hidden state is wanted; decode: one; due: none, its next id is on the way.
# Who has ended is nowhere any more.
Phase = Literal["follows", "waiting", "remote", "prefill", "decode", "due"]


class Sequence(Struct, eq=False):
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
    hashes: list[bytes] = []  # of its full blocks, as far as they were needed
    cached: int = 0  # prompt tokens whose KV was there before its first step
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()  # EOS and the request's own
    stamps: Stamps = field(default_factory=Stamps)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: Any = None  # the sum of its hidden states so far, a tensor [E]
    loan: Loan | None = None
    asked: str = ""
    edits: Any = None  # engine.logits.Edits, where this request edits logits; made with the first row
    grammar: Any = None  # engine.grammar.Grammar, where its output is constrained; made once that is compiled
    drafter: Any = None  # engine.speculation.drafting.Drafter, where this engine drafts; made with the first decode step
    search: Any = None  # engine.beams.Search, where its request searches beams
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    rank: tuple[int, int] = (0, 0)  # order of service: priority first (lower earlier), then arrival
    whole: bool = False  # every hidden state of its prompt is wanted: KV that is there already does not help
    ends: Phase = "decode"  # in which its last id is computed
    several: bool = False  # its request has other choices
    edited: bool = False  # the host edits its logits, or chooses among them
    needs: Literal["likeliest", "sampled", "logits"] = "likeliest"  # the least a step must return where it samples
    how: tuple[float, int, float, float] = (0.0, 0, 1.0, 0.0)  # it draws: temperature, top_k, top_p, min_p; as it is, the likeliest

    def __post_init__(self) -> None:
        params = self.request.params
        self.rank = (self.request.priority, self.order)
        self.whole = self.request.pooling == "mean"
        if self.request.pooling is not None:
            self.ends = "prefill"
        self.several = params.n > 1
        typical = params.typical_p < 1.0 and not params.greedy
        constrained = params.structured_outputs is not None
        self.edited = params.edits_logits or typical or constrained or params.beams is not None
        if params.temperature:
            self.how = (params.temperature, max(params.top_k, 0), params.top_p, params.min_p)
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

    def named(self, at: int) -> bytes | None:
        """The hash of its block at a place, where its ids are known to fill that."""
        return self.hashes[at] if at < len(self.hashes) else None

    def run(self, computed: int) -> None:
        """It holds blocks, and its first `computed` ids have KV or will when the steps under way have ended."""
        self.computed = computed
        left = len(self.ids) + self.unseen - computed
        self.phase = self.ends if left == 1 else "prefill" if left else "due"

    def skip_to(self, known: int) -> None:
        """The first `known` ids have KV that others have computed; the last id is computed anyhow, for its logits."""
        if known:
            known = min(known, len(self.ids) - 1)
            if self.leader is None and not self.preemptions:
                self.cached += min(known, self.prompt_len) - min(self.computed, self.prompt_len)
        self.run(known)

    def append(self, token: int) -> None:
        """The next id is known."""
        self.ids.append(token)
        left = len(self.ids) + self.unseen - self.computed
        self.phase = self.ends if left == 1 else "prefill" if left else "due"

    def rewind(self, computed: int) -> None:
        """Steps under way no longer count; only the first `computed` ids have KV."""
        self.unseen, self.pooled = 0, None
        self.epoch += 1
        self.settled = min(self.settled, computed)
        self.run(computed)


class Work(Struct, eq=False, gc=False):
    """One sequence's part of a step: compute KV for ids[start : start + count], and for `drafts` behind them: ids that may come next.

    `last`: a token is sampled at the end: every id has KV afterwards. `followed`: the device hands that token to the next step itself.
    `accepted`: how many drafts came true. A draft never counts as computed before. `wanted`: drafts that were planned, of which a draft
    model may make fewer.
    """

    sequence: Sequence
    start: int
    count: int
    last: bool
    epoch: int
    drafts: tuple[int, ...] = ()
    followed: bool = False
    accepted: int = 0
    wanted: int = 0

    @classmethod
    def of(cls, sequence: Sequence, start: int, count: int) -> Work:
        """As the sequence is now."""
        return cls(sequence, start, count, start + count == len(sequence.ids) + sequence.unseen, sequence.epoch)

    @property
    def tokens(self) -> int:
        """New tokens of its row."""
        return self.count + len(self.drafts)

    @property
    def valid(self) -> bool:
        """Whether its result still counts: the sequence has not ended, been preempted or rewound since."""
        return self.epoch == self.sequence.epoch and self.sequence.finish_reason is None


class Plan(Struct):
    """What one step does. `copies`: (from, to) blocks of prompt KV that choices of one request share in part, copied before the step;
    `installs`: (slot, adapter) to be put before it; `begins`: whose first it is; `fills`: what a draft model reads before it; `paused`: why
    it tries no draft, where drafts are tried at all."""

    tag: Literal["prefill", "decode", "verify"]
    works: list[Work]
    copies: list[tuple[int, int]] = []
    installs: list[tuple[int, str]] = []
    begins: list[Sequence] = []
    fills: list[Work] = []
    paused: str = ""


def wants_scores(sequence: Sequence) -> bool:
    """Whether the logits of every prompt position are still to be reported."""
    return sequence.prompt_logprobs is not None and sequence.computed < sequence.prompt_len - 1 and sequence.generated == 0


def shareable(sequence: Sequence) -> tuple[Hold | None, int]:
    """What the leading choice holds, and how many prompt positions of it serve here; the last is computed anew where its logits are
    wanted."""
    leader = sequence.leader
    wanted = sequence.prompt_len - (not sequence.generated)
    if leader is None or leader.hold is None or not leader.hold.blocks or leader.settled < wanted:
        return None, 0
    return leader.hold, wanted


def begins_alike(sequence: Sequence, blocks: Blocks, root: Callable[[Sequence], bytes]) -> bool:
    """Whether the first block that one just admitted does not share is begun as a copy. `root`: of its hashes, where it shares none."""
    assert sequence.hold is not None
    if blocks.registered.part is None:
        return False
    shared = sequence.hold.shared
    first = shared * blocks.space.block
    ids = sequence.ids[first : min(first + blocks.space.block, len(sequence.ids) - 1)]
    return blocks.begin_alike(sequence.hold, sequence.hashes[shared - 1] if shared else root(sequence), ids, spare=blocks.space.rows)


def keep_end(sequence: Sequence, blocks: Blocks) -> None:
    """Of one that gives back what it holds: who goes on from there finds the block it has filled in part, behind full ones, too. KV of
    the last id is not sure, nor what steps under way still write behind it."""
    hold, size, known = sequence.hold, blocks.space.block, blocks.registered
    if known.part is None or sequence.search is not None:
        return
    assert hold is not None
    at, end = hold.shared, min(sequence.settled, len(sequence.ids) - 1)
    if end % size < known.part:
        return
    if 0 < at == end // size <= len(sequence.hashes) and known.get(sequence.hashes[at - 1]) == hold.blocks[at - 1]:
        known.enter_part(hold.blocks[at], sequence.hashes[at - 1], sequence.ids[at * size : end])
