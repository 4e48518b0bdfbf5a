"""KV copied and hashed in one pass, by the kernels: a hand-off reads memory once, and no interpreter between two blocks."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rayneuron.devices.base import Carried, Carry, KvRuns

LEAST_BYTES = 241  # of a run; what is shorter XXH3 hashes in another way, which the kernels do not know


def by(found: ctypes.CDLL | None) -> Carry | None:
    """What does it, of the kernels; None without."""
    return None if found is None else partial(carry, found)


def carry(found: ctypes.CDLL, of: KvRuns, to: KvRuns | None = None) -> Carried:
    """As `devices.base.Carry`. Every byte of `to` is the one that was hashed, whoever else writes `of` meanwhile. Raises IndexError."""
    source, size = _addresses(of), of.heads * of.units[0].shape[-1]
    target = source if to is None else _addresses(to)
    if size < LEAST_BYTES or (to is not None and (len(target), to.heads * to.units[0].shape[-1]) != (len(source), size)):
        raise IndexError(f"{len(source)} runs of {size} bytes into {len(target)}")
    held = source, target, of, to  # all memory whose address is taken: it stays for as long as what is returned

    def carried(first: int, end: int) -> NDArray[np.uint64]:
        begin, into, _, copied = held
        if not 0 <= first < end <= len(begin):
            raise IndexError(f"runs {first} to {end} of {len(begin)}")
        sums = np.empty(end - first, np.uint64)
        there = None if copied is None else into.ctypes.data + 8 * first
        found.rn_carry(begin.ctypes.data + 8 * first, there, size, end - first, sums.ctypes.data)
        return sums

    return carried


def _addresses(runs: KvRuns) -> NDArray[np.uint64]:
    """Where each run begins; the kernels look at nothing else, so it is here that a block must be one."""
    blocks, heads, unit = runs.units[0].shape
    places = np.asarray(runs.blocks, np.int64)
    if not (0 <= places.min() <= places.max() < blocks and 0 <= runs.head < runs.head + runs.heads <= heads):
        raise IndexError(f"blocks {places.min()} to {places.max()} of {blocks}, heads {runs.head}+{runs.heads} of {heads}")
    layers = np.array([units.__array_interface__["data"][0] for units in runs.units], np.int64)
    found: NDArray[np.uint64] = (layers[:, None] + (places * heads + runs.head) * unit).reshape(-1).astype(np.uint64)
    return found
