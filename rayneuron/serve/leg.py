"""One request of a call in flight: its text, which of its choices are done, and what is counted of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rayneuron.serve.telemetry import Telemetry
from rayneuron.serve.trace import OnEnd
from rayneuron.types import Delta, FinishReason, Request, Stamps, TokenDelta


class Assembles(Protocol):
    """Turns the token deltas of one request into text deltas (text.Assembler)."""

    def push(self, delta: TokenDelta) -> Delta | None: ...


def join(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one choice as one. Finish and usage are the last one's."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    scored = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Delta(
        request_id=first.request_id,
        index=first.index,
        text="".join([delta.text for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[entry for part in scored for entry in part] if scored else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
        usage=last.usage,
        error=last.error,
    )


class Leg:
    """One request of a flight: its text, which choices are done, and what telemetry wants to know of it."""

    __slots__ = ("answered", "assembler", "begun", "done", "ended", "last_s", "request", "tokens")

    def __init__(self, request: Request, assembler: Assembles, ended: OnEnd | None = None) -> None:
        self.request = request
        self.assembler = assembler
        self.ended = ended
        self.begun = False
        self.answered = False  # a choice of it came to a good end
        self.done: set[int] = set()
        self.last_s: dict[int, float] = {}
        self.tokens: dict[int, int] = {}

    def measure(self, piece: TokenDelta, now_s: float, telemetry: Telemetry) -> None:
        """Count one token delta."""
        before = self.last_s.get(piece.index)
        if before is not None:
            telemetry.inter_token.observe(now_s - before)
        elif not self.last_s:
            telemetry.prefilled(len(self.request.prompt_ids), piece.cached_tokens, now_s - self.request.arrival_s)
        self.last_s[piece.index] = now_s
        self.tokens[piece.index] = self.tokens.get(piece.index, 0) + len(piece.token_ids)

    def finish(self, piece: TokenDelta, reason: FinishReason, now_s: float, telemetry: Telemetry) -> None:
        """Count the end of a choice; one that a stop string ended has no stamps of the engine yet."""
        tokens = self.tokens[piece.index]
        self.answered |= reason != "error"
        stamps = piece.stamps or Stamps(arrived=self.request.arrival_s, finished=now_s)
        self.done.add(piece.index)
        telemetry.finished(reason, tokens, stamps, now_s)
        if len(self.done) == self.request.params.n:
            telemetry.complete(max(self.tokens.values()))
        if self.ended is not None:
            self.ended(piece.index, reason, tokens, stamps)

    def drop(self, failed: bool, telemetry: Telemetry) -> bool:
        """Count the choices that will not end; False where there are none."""
        left = [index for index in range(self.request.params.n) if index not in self.done]
        if left:
            telemetry.dropped(len(left), failed)
        if self.ended is not None:
            stamps = Stamps(arrived=self.request.arrival_s, finished=time.monotonic())
            for index in left:
                self.ended(index, "error" if failed else "abort", self.tokens.get(index, 0), stamps)
        return bool(left)
