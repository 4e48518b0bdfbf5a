"""The benchmarks are scripts beside each other, so their folder is on the path, as it is when one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "examples" / "bench"), str(HERE)]
