"""The policy that Ray Serve's autoscaler is given: what it says, and that Serve makes it, keeps it and calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rayneuron.config import parse
from rayneuron.serve.scaler import TokenLoad


def context(backlog_ms: list[float], kv_used: list[float], target: int = 1, least: int = 1, most: int = 4) -> Any:
    metrics = {"backlog_ms": dict(enumerate(backlog_ms)), "kv_used": dict(enumerate(kv_used))} if backlog_ms else {}
    return SimpleNamespace(
        aggregated_metrics=metrics, target_num_replicas=target, capacity_adjusted_min_replicas=least, capacity_adjusted_max_replicas=most
    )


@pytest.mark.parametrize(
    ("backlog_ms", "kv_used", "wanted"),
    [([100.0], [0.1], 1), ([2001.0], [0.1], 2), ([3000.0, 3500.0], [0.1, 0.1], 4), ([9e9], [0.1], 4), ([0.0, 0.0], [0.5, 0.95], 3),
     ([0.0, 0.0], [0.1, 0.1], 1)],
)  # fmt: skip
def test_so_much_work_so_many_replicas(backlog_ms: list[float], kv_used: list[float], wanted: int) -> None:
    assert TokenLoad(target_ms=2000.0)(context(backlog_ms, kv_used)) == (wanted, {})


def test_before_anybody_has_said_anything_it_stays_as_it_is() -> None:
    assert TokenLoad()(context([], [], target=2)) == (2, {}) and TokenLoad()(context([], [], target=0)) == (1, {})


def test_serve_makes_it_from_a_deployment_file() -> None:
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve.config import AutoscalingConfig

    policy = {"policy_function": "rayneuron.serve.scaler:TokenLoad", "policy_kwargs": {"target_ms": 500.0}}
    config = parse({"model": {"path": "/m"}, "serving": {"autoscaling": {"min_replicas": 1, "max_replicas": 3, "policy": policy}}})
    assert config.serving.autoscaling is not None
    made = AutoscalingConfig(**config.serving.autoscaling.model_dump(exclude_unset=True))
    made.policy.serialize_policy()
    policy_made = _resolve_policy_callable(made.policy)
    assert policy_made(context([1200.0], [0.0])) == (3, {})
