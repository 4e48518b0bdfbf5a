"""Which cores to give: contiguous, aligned runs of core numbers, chosen so that the larger runs stay whole.

A run of `size` cores starts at a multiple of `size` (the runtime wants contiguous ascending cores, the collectives aligned ones).
Everything here is a pure function of the set of free cores, so the ledger, the planner and the simulator decide alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_TRIED = 6  # seats in the way of one run, for which every choice of who moves is tried


def runs(free: Collection[int], size: int, total: int) -> list[int]:
    """Starts of all runs of `size` free cores on a node of `total`, ascending."""
    return _runs(_mask(free), size, total)


def choose(free: Collection[int], size: int, total: int, sizes: Sequence[int]) -> int | None:
    """The start of the run to take, None where none is free.

    Best fit: of all free runs the one after whose loss the most runs of the largest size in `sizes` are left, then of the next size, and
    so on; the lowest start among equals. Arrivals of sizes that divide each other therefore never fragment a node.
    """
    return _choose(_mask(free), size, total, sizes)


def _choose(mask: int, size: int, total: int, sizes: Sequence[int]) -> int | None:
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


@dataclass(frozen=True, slots=True)
class Blocker:
    """A run of cores that somebody has: what it costs to send them away, and to put them elsewhere on the node (inf: it cannot be)."""

    key: str
    first: int
    size: int
    away: float
    elsewhere: float = math.inf


@dataclass(frozen=True, slots=True)
class Clearing:
    """How a run is made free: who goes, who moves where, and what that costs."""

    start: int
    away: tuple[str, ...] = ()
    moved: tuple[tuple[str, int], ...] = ()
    cost: float = 0.0


def clear(free: Collection[int], held: Sequence[Blocker], size: int, total: int, sizes: Sequence[int]) -> Clearing | None:
    """The cheapest way to a run of `size`, None where there is none. Cores neither free nor `held` are nobody's to give.

    Among equals the one that leaves the most runs of the largest size, then of the next; then the lowest start. Whoever moves goes to a
    run that is free now. Of more than `_TRIED` in the way none is moved.
    """
    order = sorted({s for s in sizes if s != size}, reverse=True)
    best: tuple[float, list[int], int] | None = None
    found: Clearing | None = None
    for start in _runs(_mask(free) | _mask([core for one in held for core in range(one.first, one.first + one.size)]), size, total):
        run = _run(start, size)
        mask = _mask(free)
        for made, left in _clearings(start, [one for one in held if run & _run(one.first, one.size)], mask & ~run, total, sizes):
            score = (made.cost, [-len(_runs(left & ~run, other, total)) for other in order], start)
            if made.cost < math.inf and (best is None or score < best):
                best, found = score, made
    return found


def _clearings(start: int, touched: Sequence[Blocker], left: int, total: int, sizes: Sequence[int]) -> Iterator[tuple[Clearing, int]]:
    """Every way to send away or move those in the way; what is free then, beside the run and what it cut."""
    able = [one.elsewhere < one.away for one in touched] if len(touched) <= _TRIED else [False] * len(touched)
    for choice in itertools.product(*((True, False) if can else (False,) for can in able)):
        mask, moved, cost = left, [], 0.0
        for one, goes in sorted(zip(touched, choice, strict=True), key=lambda pair: (-pair[0].size, pair[0].key)):
            to = _choose(mask, one.size, total, sizes) if goes else None
            if goes and to is None:
                break
            cost += one.elsewhere if goes else one.away
            if to is not None:
                mask &= ~_run(to, one.size)
                moved.append((one.key, to))
        else:
            freed = mask
            for one in touched:
                freed |= _run(one.first, one.size)
            away = tuple(one.key for one, goes in zip(touched, choice, strict=True) if not goes)
            yield Clearing(start, away, tuple(moved), cost), freed

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
