"""What is wrong with the cores of this machine: every node's ledger, who holds what, and records nobody stands behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rayneuron import settings
from rayneuron.devices.neuron.releases import VISIBLE
from rayneuron.errors import ConfigError
from rayneuron.placement import cores, instances, outside, ports, records
from rayneuron.placement.instances import Instance, declared
from rayneuron.placement.ledger import Ledger
from rayneuron.policies.packing import compact

MOST_CORES = 128  # bytes of the lock file that are looked at; no node has more cores


def report(
    directory: Path, named: str | None = None, *, clean: bool = False, visible: str | None = None, root: Path = Path("/")
) -> Iterator[str]:
    """Lines for people: what this machine has, then a ledger after the other; `clean` deletes the records of owners that are gone.

    `named`: the machine's type, else its devices say it; `visible`: NEURON_RT_VISIBLE_CORES. Locks need no cleaning. Raises ConfigError.
    """
    kind, left = instances.instance(named) if named else None, frozenset(range(MOST_CORES))
    try:
        chips, product = cores.probe(root)
    except ConfigError as problem:
        chips, product, root = (), None, Path("/nowhere")
        yield f"devices: {problem.message}"
    if kind is None and chips:
        kind = cores.detect(cores.Facts(chips=chips, product=product, vcpus=os.cpu_count() or 1))
        for wrong in cores.check_links(kind, chips):
            yield f"devices: {wrong}"
    if kind is not None:
        left = cores.left_here(kind, visible, root)
        yield f"{kind.name}: cores {compact(left)}" + (f" of {kind.cores} are here and left to us" if len(left) < kind.cores else "")
    risk = ports.endangered(ports.pool(settings.root_ports()), root) if kind is not None else None
    if risk is not None:
        yield f"ports: {risk}"
    nodes = sorted(folder for folder in directory.glob("*") if (folder / "cores.lock").is_file()) if directory.is_dir() else []
    if not nodes:
        yield f"cores: no ledger under {directory}, so nobody has taken any on this machine"
    for node in nodes:
        yield from _node(node, kind or declared(MOST_CORES, MOST_CORES), left if kind is not None else None, clean)
    free = [Ledger(node, kind or declared(MOST_CORES, MOST_CORES)).free() for node in nodes]
    strange = outside.said(outside.taken(chips, frozenset.intersection(*free) if free else frozenset(range(MOST_CORES))))
    if strange:
        yield f"cores {strange}: end it, or start Ray with {VISIBLE} of the others"


def _node(folder: Path, kind: Instance, left: frozenset[int] | None, clean: bool) -> Iterator[str]:
    ledger = Ledger(folder, kind)
    free = ledger.free()
    held = frozenset(range(kind.cores)) - free
    yield f"cores of {folder.name}: held {compact(held)}" + (f", free {compact(free & left)} of {kind.name}" if left is not None else "")
    for holder in ledger.holders():
        yield f"  {compact(holder.cores)}: pid {holder.pid}, {holder.deployment or 'no record (a child of a former owner?)'}"
    stale = [(path, h) for path, h in records.read(folder) if h is None or not h.alive or not set(h.cores) <= held]
    for path, owner in stale:
        who = "unreadable" if owner is None else f"{compact(owner.cores)} of pid {owner.pid} ({owner.deployment}), which has ended"
        yield f"  stale record {path.name}: {who}"
    if clean:
        for path in ledger.clean():
            yield f"  removed {path.name}"
