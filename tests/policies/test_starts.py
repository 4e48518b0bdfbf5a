"""What a start is expected to take: learned from its parts, guessed where nobody has measured."""

from __future__ import annotations

import pytest

from rayneuron.policies.starts import expected_s, learned


def test_what_a_start_takes_is_learned() -> None:
    known = learned({}, {"spawn": 5.0, "weights": 16.0})
    assert known == {"spawn": 5.0, "weights": 16.0} and expected_s(known, 0) == 21.0
    assert learned(known, {"spawn": 6.0, "weights": 16.0})["spawn"] == pytest.approx(5.3)
    assert expected_s(known, 0, resident=1.0) == pytest.approx(6.6) and expected_s({}, 16 * 10**9) == 26.0


