"""The kernel tests built with address and undefined-behaviour sanitizers: `python -m tests.devices.cpu.sanitized`; a minute, by hand.

Exits non-zero when a test fails or a sanitizer speaks.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rayneuron.devices.cpu import library

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")
PARTS = ("kernels", "panels", "tiles", "families", "carry")
TESTS = (*(f"tests/devices/cpu/test_{part}.py" for part in PARTS), "tests/engine/test_sampling.py")


def preloaded() -> str:
    """The sanitizers' libraries, which must be there before Python starts."""
    found = (
        subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True, check=True) for n in ("libasan.so", "libubsan.so")
    )
    return ":".join(ran.stdout.strip() for ran in found)


def main() -> int:
    """Start again under the sanitizers, then run the tests."""
    if "LD_PRELOAD" not in os.environ:
        told = {"LD_PRELOAD": preloaded(), "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.devices.cpu.sanitized"], {**os.environ, **told})
    library.FLAGS = (*library.FLAGS, *FLAGS)
    del os.environ["LD_PRELOAD"]  # the compiler must not run under it
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *TESTS]))


if __name__ == "__main__":
    sys.exit(main())
