"""Which cores to give: contiguous, aligned runs of core numbers, chosen so that the larger runs stay whole.

A run of `size` cores starts at a multiple of `size` (the runtime wants contiguous ascending cores, the collectives aligned ones).
Everything here is a pure function of the set of free cores, so the ledger, the planner and the simulator decide alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def runs(free: Collection[int], size: int, total: int) -> list[int]:
    """Starts of all runs of `size` free cores on a node of `total`, ascending."""
    return _runs(_mask(free), size, total)


def choose(free: Collection[int], size: int, total: int, sizes: Sequence[int]) -> int | None:
    """The start of the run to take, None where none is free.

    Best fit: of all free runs the one after whose loss the most runs of the largest size in `sizes` are left, then of the next size, and
    so on; the lowest start among equals. Arrivals of sizes that divide each other therefore never fragment a node.
    """
    mask = _mask(free)
    order = sorted({s for s in sizes if s != size}, reverse=True)
    best: tuple[list[int], int] | None = None
    for start in _runs(mask, size, total):
        left = mask & ~_run(start, size)
        score = ([-len(_runs(left, other, total)) for other in order], start)
        best = score if best is None or score < best else best
    return None if best is None else best[1]


def nearest(free: Collection[int], size: int, total: int, sizes: Sequence[int]) -> tuple[int, int] | None:
    """(size, start) of the largest run smaller than `size` that is free now, None where nothing is."""
    for other in sorted((s for s in sizes if s < size), reverse=True):
        start = choose(free, other, total, sizes)
        if start is not None:
            return other, start
    return None


def compact(cores: Collection[int]) -> str:
    """Core numbers for people: "0-3, 6, 8-9"; "none" for an empty set."""
    parts: list[list[int]] = []
    for core in sorted(set(cores)):
        if parts and parts[-1][1] == core - 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"


def _mask(cores: Collection[int]) -> int:
    mask = 0
    for core in cores:
        mask |= 1 << core
    return mask


def _run(start: int, size: int) -> int:
    return ((1 << size) - 1) << start


def _runs(mask: int, size: int, total: int) -> list[int]:
    return [start for start in range(0, total - size + 1, size) if mask & _run(start, size) == _run(start, size)]
