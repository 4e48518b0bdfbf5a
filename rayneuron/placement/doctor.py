"""What is wrong with the cores of this machine: every node's ledger, who holds what, and records nobody stands behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayneuron.placement import records
from rayneuron.placement.instances import Instance, declared
from rayneuron.placement.ledger import Ledger
from rayneuron.policies.packing import compact

MOST_CORES = 128  # bytes of the lock file that are looked at; no node has more cores


def report(directory: Path, kind: Instance | None = None, *, clean: bool = False) -> Iterator[str]:
    """Lines for people, a ledger after the other; `clean` deletes the records of owners that are gone. Locks need no cleaning."""
    nodes = sorted(folder for folder in directory.glob("*") if (folder / "cores.lock").is_file()) if directory.is_dir() else []
    if not nodes:
        yield f"cores: no ledger under {directory}, so nobody has taken any on this machine"
    for node in nodes:
        yield from _node(node, kind or declared(MOST_CORES, MOST_CORES), kind is not None, clean)


def _node(folder: Path, kind: Instance, known: bool, clean: bool) -> Iterator[str]:
    ledger = Ledger(folder, kind)
    free = ledger.free()
    held = frozenset(range(kind.cores)) - free
    yield f"cores of {folder.name}: held {compact(held)}" + (f", free {compact(free)} of {kind.name}" if known else "")
    for holder in ledger.holders():
        yield f"  {compact(holder.cores)}: pid {holder.pid}, {holder.deployment or 'no record (a child of a former owner?)'}"
    stale = [(path, h) for path, h in records.read(folder) if h is None or not h.alive or not set(h.cores) <= held]
    for path, owner in stale:
        who = "unreadable" if owner is None else f"{compact(owner.cores)} of pid {owner.pid} ({owner.deployment}), which has ended"
        yield f"  stale record {path.name}: {who}"
    if clean:
        for path in ledger.clean():
            yield f"  removed {path.name}"
