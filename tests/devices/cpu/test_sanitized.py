"""The kernels under the sanitizers, in a process that has their libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_sanitizer_speaks_of_the_kernels() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.devices.cpu.sanitized"], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    assert " passed" in ran.stdout.splitlines()[-1] and "runtime error" not in ran.stdout + ran.stderr
