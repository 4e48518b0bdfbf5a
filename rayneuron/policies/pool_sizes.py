"""How many replicas a prefill pool should have, by what they say of themselves; for `autoscaling.policy`, which bounds and delays it."""

from __future__ import annotations

import math
from typing import Any


class PromptTokens:
    """So many that each has `tokens` of prompts before it, one more where what is kept for others fills the KV of any (`full`, a share).

    Serve's own policy counts calls, and prefill replicas get none.
    """

    def __init__(self, tokens: float = 8192, full: float = 0.9) -> None:
        self.tokens, self.full = tokens, full

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Of Ray Serve's AutoscalingContext: the replicas wanted, and what is to be remembered."""
        said = ctx.aggregated_metrics or {}
        waiting, kept = (said.get(name, {}).values() for name in ("prompt_tokens", "kv_used"))
        if not waiting:
            return ctx.target_num_replicas, {}  # nobody has said anything yet
        wanted = math.ceil(sum(waiting) / self.tokens)
        return (max(wanted, len(kept) + 1) if max(kept, default=0.0) > self.full else wanted), {}
