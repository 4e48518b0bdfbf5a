"""What becomes of one choice of one request when replicas die: a pause. The only writer of its tokens, exactly once each.

Every piece of tokens says of which attempt it is and behind how many tokens it comes; these two alone decide. What was lost is tried again
elsewhere, from the tokens there are. Not for ever: `limit` times, and not where the request itself seems to kill replicas: two crashes with
hardly a token between them. Plainly being there when a replica dies is no sign: long answers would collect it. Replicas that leave are not
counted: each leaves once.

A process that is killed from outside looks like one that the request has killed (the kernel's own killer ends both alike). So an innocent
request that two deaths hit within STRIKE_TOKENS is refused too: the price of losing two replicas to a poisonous one and not the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayneuron.types import FinishReason

STRIKE_TOKENS = 16  # a crash so soon behind the crash before may be the request's own doing; the last tokens before it are lost on the way

Cause = Literal["crash", "step", "leave", "silence", "gap"]  # what ended an attempt; crash and step may be strikes
ReplayState = Literal["waiting", "placed", "done", "failed"]


@dataclass(frozen=True, slots=True)
class PassOn:
    """Give the client the piece without its first `skip` tokens, and its end where it has one."""

    skip: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Again:
    """Find another replica, which goes on behind the tokens there are."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the choice with an error."""

    status: int
    why: str


Effect = PassOn | Again | Fail | None  # None: nothing to do
_ALL = PassOn(0, False)


class Replay:
    """A choice's attempts, counted from 1. `ids`: all tokens the client has. `dropped`: how many late or double pieces there were."""

    __slots__ = ("_from", "_lost", "_strike_at", "_strikes", "attempt", "dropped", "ids", "limit", "most_strikes", "state")

    def __init__(self, limit: int = 3, most_strikes: int = 2) -> None:
        self.limit = limit
        self.most_strikes = most_strikes
        self.state: ReplayState = "waiting"
        self.attempt = 0
        self.ids: list[int] = []
        self.dropped = 0
        self._from = 0  # tokens there were when the attempt began
        self._lost = 0  # attempts, without those whose replica left
        self._strikes = 0
        self._strike_at: int | None = None  # tokens there were at the last one

    def placed(self) -> int:
        """It has been sent to a replica; the number of this attempt."""
        assert self.state == "waiting", self.state
        self.state = "placed"
        self.attempt += 1
        self._from = len(self.ids)
        return self.attempt

    def piece(self, attempt: int, at: int, ids: Sequence[int], end: FinishReason | None) -> Effect:
        """Tokens of an attempt, behind `at` output tokens; `end`: it ends with them. An end by "error" is that of a step."""
        if attempt != self.attempt or self.state != "placed":
            self.dropped += 1
            return None
        skip, count = len(self.ids) - at, len(ids)
        if skip < 0:
            return self.lost(attempt, "gap")
        self.ids += ids[skip:] if skip else ids
        if end in ("stop", "length") and skip <= count:
            self.state = "done"
            return PassOn(skip, True)
        if end == "error":
            return self.lost(attempt, "step")
        if end == "abort":
            self._lost += 1  # nobody had asked for it
            return self.lost(attempt, "leave")
        if skip >= count:
            self.dropped += 1
            return None
        return PassOn(skip, False) if skip else _ALL  # the most frequent one by far

    def back(self, attempt: int) -> None:
        """The replica has not taken it: that attempt was none."""
        if attempt == self.attempt and self.state == "placed" and len(self.ids) == self._from:
            self.state = "waiting"
            self.attempt -= 1

    def lost(self, attempt: int, cause: Cause) -> Effect:
        """An attempt has come to nothing."""
        if attempt != self.attempt or self.state != "placed":
            return None
        if cause in ("crash", "step"):
            again = self._strike_at is not None and len(self.ids) - self._strike_at < STRIKE_TOKENS
            self._strikes, self._strike_at = self._strikes + 1 if again else 1, len(self.ids)
        if self._strikes >= self.most_strikes:
            return self._fail(500, f"{self._strikes} replicas failed while they computed this request; it is not tried again")
        self._lost += cause != "leave"
        if self._lost > self.limit:
            return self._fail(503, f"{self._lost} replicas were lost while they computed this request")
        self.state = "waiting"
        return Again()

    @property
    def suspect(self) -> bool:
        """Whether it may have been its own doing that its replica was lost, and nothing speaks for it since."""
        return self._strikes > 0 and self._strike_at == len(self.ids)

    def finish(self) -> bool:
        """A stop string has ended it, or nobody wants it any more; whether there is an attempt to be cancelled."""
        running = self.state == "placed"
        if self.state in ("placed", "waiting"):
            self.state = "done"
        return running

    def _fail(self, status: int, why: str) -> Fail:
        self.state = "failed"
        return Fail(status, why)
