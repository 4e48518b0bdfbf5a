"""The kernel tests built with address and undefined-behaviour sanitizers: `python -m tests.devices.cpu.sanitized`; minutes, by hand.

Exits non-zero when a test fails, a sanitizer speaks, or there is nothing to test: without kernels most tests skip.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rayneuron.devices.cpu import library

FLAGS = ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")
LONGEST_S = 1800.0  # of one file: the sanitizers take the compiler several times as long
PARTS = ("kernels", "panels", "tiles", "families", "unread", "carry")
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
    library._LONGEST_S = LONGEST_S
    del os.environ["LD_PRELOAD"]  # the compiler must not run under it
    if library.library() is None:
        print("the kernels could not be built with the sanitizers, or do not load under them; the log above says why", file=sys.stderr)
        return 1
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *TESTS]))


if __name__ == "__main__":
    sys.exit(main())
