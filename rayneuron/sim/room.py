"""Whether a fleet fits the memory of this machine: what four small ones take says what a large one will."""

from __future__ import annotations

import os
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

from rayneuron.errors import ConfigError
from rayneuron.sim.fleet import Simulation
from rayneuron.sim.setup import Setup

_GIB, _SOME = 2.0**30, 16  # engines or gateways more; what one takes is lost in what Python keeps or gives back meanwhile


def check(setup: Setup) -> None:
    """Raise ConfigError where a fleet would not even begin."""
    needs, free = needed(setup), _free()
    if needs > free:
        pool = "" if setup.pool is None else f" and {setup.pool.nodes} that only compute prompts"
        raise ConfigError(
            f"engines: {setup.nodes}{pool}, gateways: {setup.gateways}; before the first request they take {needs / _GIB:.4g} GiB of "
            f"memory, and {free / _GIB:.3g} GiB are free here; write fewer"
        )


def needed(setup: Setup) -> float:
    """Bytes of a fleet as it begins: so many for each engine and gateway, and for what each gateway knows of each engine."""

    def taken(nodes: int, gateways: int, prefill: int = 1) -> int:
        pool = None if setup.pool is None else replace(setup.pool, nodes=prefill)
        tracemalloc.start()
        kept = Simulation(replace(setup, nodes=nodes, gateways=gateways, pool=pool), ())
        bytes_ = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert kept.clock.now_s == 0.0
        return bytes_

    taken(1, 1)  # what is kept for all that come, once
    least = taken(1, 1)
    node, gateway = (taken(1 + _SOME, 1) - least) / _SOME, (taken(1, 1 + _SOME) - least) / _SOME
    both = max(0.0, ((taken(1 + _SOME, 1 + _SOME) - least) / _SOME - node - gateway) / _SOME)
    nodes, gateways = setup.nodes - 1, setup.gateways - 1
    pool = 0.0 if setup.pool is None else (setup.pool.nodes - 1) * (taken(1, 1, 1 + _SOME) - least) / _SOME
    return float(least + nodes * node + gateways * gateway + nodes * gateways * both + pool)


def _free() -> float:
    """Bytes that a process may still have."""
    said = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", said.read_text(), re.M) if said.exists() else None
    return 1024.0 * int(found[1]) if found is not None else float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
