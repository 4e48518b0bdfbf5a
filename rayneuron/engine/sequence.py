"""The state of one choice of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayneuron.engine.blocks import Hold
from rayneuron.types import FinishReason, Request, SamplingParams, Stamps, TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated ids, how many of them have KV (`computed`), and what holds it (None while waiting).

    `unseen`: ids that steps under way will add and the host has not seen; those steps' KV counts as computed. `epoch` rises when steps
    under way are no longer valid for this sequence.
    """

    request: Request
    index: int
    ids: list[int]
    seed: int
    max_tokens: int
    order: int
    leader: Sequence | None = None  # the choice whose prompt KV may be shared
    prompt_len: int = 0
    computed: int = 0
    unseen: int = 0
    epoch: int = 0
    hold: Hold | None = None
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()  # EOS and the request's own
    queued: bool = False
    stamps: Stamps = field(default_factory=Stamps)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    edits: Any = None  # engine.logits.Edits, where this request edits logits; made with the first row
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def params(self) -> SamplingParams:
        """How this request samples."""
        return self.request.params

    @property
    def length(self) -> int:
        """Ids, those under way included."""
        return len(self.ids) + self.unseen

    @property
    def remaining(self) -> int:
        """Ids that have no KV yet; 1 while decoding, 0 while the next id is known to nobody."""
        return self.length - self.computed

    def rewind(self, computed: int) -> None:
        """Steps under way no longer count; only the first `computed` ids have KV."""
        self.computed = computed
        self.unseen = 0
        self.epoch += 1

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.ids) - self.prompt_len

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: priority first (lower earlier), then arrival."""
        return (self.request.priority, self.order)
