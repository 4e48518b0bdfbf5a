"""One request of a flight: what reads its tokens, which choices are done, and what telemetry wants to know of it."""

from __future__ import annotations

import time
from typing import Protocol

from rayneuron.serve.telemetry import Telemetry
from rayneuron.serve.trace import OnEnd
from rayneuron.types import Delta, FinishReason, Request, Stamps, TokenDelta


class Takes(Protocol):
    """What tokens become: text (`text.text.Assembler`), or a frame for a gateway, which has none to return (`serve.hub`)."""

    def push(self, delta: TokenDelta) -> Delta | None: ...


class ActiveRequest:
    """One request of a flight: its text, which choices are done, and what telemetry wants to know of it."""

    __slots__ = ("answered", "assembler", "begun", "done", "ended", "last_s", "request", "tokens")

    def __init__(self, request: Request, assembler: Takes, ended: OnEnd | None = None) -> None:
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
