"""What a desk may promise, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeskLimits:
    """`admit_ms`: a request is sent while some replica would begin it so soon (None: as one step of a prompt takes, at most 200 ms).

    `max_wait_s`: predicted to wait longer, it is refused.

    An order that was not acknowledged for `suspect_s` keeps others away from its replica, after `silent_s` the replica is lost.
    """

    admit_ms: float | None = None
    max_wait_s: float = 30.0
    max_queue_tokens: int | None = 1_000_000
    suspect_s: float = 1.0
    silent_s: float = 3.0
    session_ttl_s: float = 600.0
