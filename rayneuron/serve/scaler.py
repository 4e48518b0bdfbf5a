"""TokenLoad: how many replicas Ray Serve's autoscaler should keep for a model, by the work they have; for `serving.autoscaling.policy`."""

from __future__ import annotations

from typing import Any

from rayneuron.policies import scaling


class TokenLoad:
    """Serve makes one in its controller and calls it now and then; `target_ms`: of work that a replica may have waiting.

    Never by the number of calls: one may be four tokens, another a stream of minutes. What waits at gateways is counted in, since they tell
    it to the replicas.
    """

    def __init__(self, target_ms: float = scaling.TARGET_MS) -> None:
        self._target_ms = target_ms

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number wanted, within the bounds of the file, and nothing to remember."""
        told = context.aggregated_metrics or {}
        backlog_ms = list(told.get("backlog_ms", {}).values())
        kv_used = list(told.get("kv_used", {}).values())
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        if not backlog_ms:  # none has said anything yet: as it is
            return max(least, min(context.target_num_replicas, most)), {}
        return scaling.replicas(backlog_ms, kv_used, self._target_ms, max(1, least), most), {}
