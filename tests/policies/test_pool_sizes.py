"""How many prefill replicas: as many as have enough to do, and one more where none has room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rayneuron.policies.pool_sizes import PromptTokens


@pytest.mark.parametrize(
    ("tokens", "kept", "wanted"),
    [
        ([0.0], [0.0], 0),  # Serve keeps to the least
        ([1.0], [0.0], 1),
        ([1000.0], [0.5], 1),
        ([1001.0], [0.5], 2),
        ([1500.0, 1500.0], [0.1, 0.2], 3),
        ([10.0, 20.0], [0.95, 0.2], 3),  # one cannot keep more for others
        ([9000.0, 0.0], [0.95, 0.2], 9),
    ],
)
def test_each_has_so_many_tokens_before_it(tokens: list[float], kept: list[float], wanted: int) -> None:
    said = {"prompt_tokens": dict(enumerate(tokens)), "kv_used": dict(enumerate(kept)), "waiting": {0: 5.0}}
    assert PromptTokens(tokens=1000)(SimpleNamespace(aggregated_metrics=said, target_num_replicas=7)) == (wanted, {})


@pytest.mark.parametrize("said", [None, {}, {"prompt_tokens": {}}])
def test_before_anybody_has_said_anything_it_stays(said: object) -> None:
    assert PromptTokens()(SimpleNamespace(aggregated_metrics=said, target_num_replicas=2)) == (2, {})
