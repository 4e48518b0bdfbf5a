"""The shell blocks of docs/ run as they stand, on this machine; those that begin with `# slow` in the slow tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve import own_ray

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}", marks=[pytest.mark.slow] if block.startswith("# slow\n") else [])
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, block in enumerate(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S))
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", BLOCKS)
def test_it_runs_as_it_is_written(block: str) -> None:
    with own_ray.temporary() as folder:
        (folder / "rayneuron").write_text(f'#!/bin/sh\nexec {sys.executable} -m rayneuron "$@"\n')
        (folder / "rayneuron").chmod(0o755)
        paths = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {
            "PATH": paths, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled",
            "RAYNEURON_LEDGER": f"{folder}/cores", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = ["bash", "-e", "-m", "-o", "pipefail", "-c", block]
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stdout[-2000:] + ran.stderr[-2000:]
