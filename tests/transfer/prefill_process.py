"""A prefill replica in a process of its own, for tests and to be killed by them: prints its addresses, serves until its input ends."""

from __future__ import annotations

import sys
from pathlib import Path

from rayneuron.transfer.offers import LendingLimits
from tests.transfer.pair import Prefilling, open_engine

if __name__ == "__main__":
    path, lease_s = sys.argv[1:]
    made = Prefilling(open_engine(Path(path), rows=4, shared=True), LendingLimits(lease_s=float(lease_s)))
    print(*made.offers.addresses, flush=True)
    sys.stdin.read()
