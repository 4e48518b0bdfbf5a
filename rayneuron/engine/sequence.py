"""The state of one choice of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayneuron.types import FinishReason, Request, SamplingParams, Stamps, TokenLogprobs


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and generated ids, how many of them have KV (`computed`), and the row that holds it (None while waiting)."""

    request: Request
    index: int
    ids: list[int]
    seed: int
    max_tokens: int
    order: int
    leader: Sequence | None = None  # the choice whose prompt KV may be copied
    prompt_len: int = 0
    computed: int = 0
    row: int | None = None
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()  # EOS and the request's own
    queued: bool = False
    stamps: Stamps = field(default_factory=Stamps)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def params(self) -> SamplingParams:
        """How this request samples."""
        return self.request.params

    @property
    def remaining(self) -> int:
        """Ids that have no KV yet; 1 while decoding."""
        return len(self.ids) - self.computed

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.ids) - self.prompt_len

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: priority first (lower earlier), then arrival."""
        return (self.request.priority, self.order)
