"""Keeper: one a node, as a Ray actor there: which cores are free by the ledger, who holds the others, and weights kept in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayneuron import settings, sources
from rayneuron.devices.neuron.releases import VISIBLE
from rayneuron.errors import RayNeuronError
from rayneuron.host import pages
from rayneuron.placement import cores, outside
from rayneuron.placement.ledger import Ledger

_OUTSIDE_S = 10.0  # neuron-ls is a program, and is not started at every look


class Keeper:
    """The eyes of the arbiter on a node. `node`: its address, as replicas there know it."""

    def __init__(self, node: str, instance: str) -> None:
        kind = cores.this_node(instance, None, 1)
        self._ledger = Ledger(settings.ledger_dir() / node, kind)
        self._left = cores.left_here(kind, settings.given(VISIBLE))
        self._warming: threading.Thread | None = None
        self._chips, self._looked_s = outside.look(), time.monotonic()

    def look(self) -> dict[str, Any]:
        """Cores that are free, all that are ours to give, and who holds the others, also without the ledger."""
        if time.monotonic() - self._looked_s > _OUTSIDE_S:
            self._chips, self._looked_s = outside.look(), time.monotonic()
        held = [{"cores": list(h.cores), "pid": h.pid, "deployment": h.deployment} for h in self._ledger.holders()]
        free = self._ledger.free() & self._left
        others = frozenset[int]().union(*outside.taken(self._chips, free))
        return {"free": sorted(free - others), "left": sorted(self._left), "holders": held}

    def weights(self, source: str) -> tuple[int, float]:
        """Bytes of a model's weights on this node, and the share of them that is in memory; (0, 0) where it is not here yet."""
        files = _files(source)
        return sum(file.stat().st_size for file in files), pages.resident(files)

    def warm(self, wanted: Sequence[str], most_bytes: int) -> None:
        """Read the weights of some models ahead, the first of them first, on a thread of its own."""
        if self._warming is None or not self._warming.is_alive():
            self._warming = threading.Thread(target=_warm, args=(list(wanted), most_bytes), daemon=True)
            self._warming.start()


def _warm(wanted: Sequence[str], most_bytes: int) -> None:
    for source in wanted:
        most_bytes -= pages.warm(_files(source), most_bytes)


def _files(source: str) -> list[Path]:
    try:
        folder = sources.located(source)
    except RayNeuronError:
        return []
    return [] if folder is None else pages.weight_files(folder)
