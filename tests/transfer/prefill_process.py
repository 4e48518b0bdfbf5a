"""A prefill replica in a process of its own, for tests and to be killed by them: prints its addresses, serves until its input ends."""

from __future__ import annotations

import sys
from pathlib import Path

from rayneuron.transfer.offers import LendingLimits
from tests.transfer.pair import Prefilling, open_engine


class Said:
    """A lender that says it is somewhere else."""

    def __init__(self, lender, address: str) -> None:
        self._lender, self.addresses = lender, (address,)

    def __getattr__(self, name):
        return getattr(self._lender, name)


if __name__ == "__main__":
    path, lease_s, *said = sys.argv[1:]
    engine = open_engine(Path(path), rows=4, shared=True)
    made = Prefilling(engine, LendingLimits(lease_s=float(lease_s)), lambda lender: Said(lender, said[0]) if said else lender)
    print(*made.offers.addresses, made.lender.addresses[0], flush=True)
    sys.stdin.read()
