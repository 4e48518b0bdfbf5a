"""A plan as text for people: what `rayneuron plan` prints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from rayneuron.config import Deployment
from rayneuron.devices.neuron.releases import COMPILER_BYTES, compile_minutes, workers
from rayneuron.devices.neuron.targets import Move, listed
from rayneuron.placement import cores, instances
from rayneuron.placement.fitting import Wanted, gib, parts
from rayneuron.placement.instances import Instance
from rayneuron.placement.plan import PlacementPlan, PlannedGroup, PlannedWorker, address, plan, read_draft, read_raw, target
from rayneuron.policies import packing


def describe(
    deployments: Mapping[str, Deployment],
    *,
    named: str | None = None,
    nodes: int | None = None,
    vcpus: int,
    ranks_per_process: Callable[[str], int],
    resolve: Callable[[str], Path] = Path,
    visible: str | None = None,
) -> str:
    """What `rayneuron plan` prints. `ranks_per_process` maps a device's name to how many ranks one of its processes drives.

    `visible`: NEURON_RT_VISIBLE_CORES of this machine, taken for every node's.
    """
    wanted = {
        name: Wanted(config, raw := read_raw(config, resolve), ranks_per_process(config.device), read_draft(config, raw, resolve))
        for name, config in deployments.items()
    }
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = target(wanted, named, vcpus, memory_bytes)
    return format(plan(wanted, kind, nodes, left=None if kind.name == instances.MACHINE else cores.left_here(kind, visible)))


def format(made: PlacementPlan) -> str:
    """The plan for people: placement, ranks, memory and environment of every worker."""
    lines = _head(made)
    for group in made.groups:
        lines += ["", _title(group, made.counted), *_graphs(group, made.instance)]
        for place in group.places:
            lines += _worker(place, made)
    tail = [f"node {i} free: {packing.compact(free)}{_loading(made, i)}" for i, free in enumerate(made.free)] if made.counted else []
    tail += [f"note: {note}" for note in made.notes]
    return "\n".join([*lines, *([""] if tail else []), *tail]) + "\n"


def _loading(made: PlacementPlan, node: int) -> str:
    has = made.instance.host_memory_bytes
    return f"; host memory while loading: {gib(made.loading[node])} of {gib(has)} GiB" if has else ""


def _head(made: PlacementPlan) -> list[str]:
    kind = made.instance
    if not made.counted:
        shared = f" shared by {kind.cores} ranks" if kind.cores > 1 else ""
        return [f"{kind.name}: {kind.vcpus} CPUs, {gib(kind.host_memory_bytes)} GiB{shared}; no instance is named, so no cores are counted"]
    return [
        f"{made.nodes} x {kind.name}: {kind.cores} cores of {gib(kind.core_memory_bytes)} GiB, "
        f"tensor_parallel {', '.join(map(str, kind.degrees))}",
        *([f"of each node only cores {packing.compact(made.left)} are there or left to us"] if len(made.left) < kind.cores else []),
        f"addresses and ports are stand-ins ({address(0)} is node 0); real ones are found at start",
    ]


def _title(group: PlannedGroup, counted: bool) -> str:
    shape = group.layout
    words = (
        f"{group.name} replica {group.replica}: tensor_parallel {shape.tensor_parallel} x pipeline_parallel {shape.pipeline_parallel} "
        f"on {shape.nodes} node{'s' * (shape.nodes > 1)}, {len(group.graphs)} graphs"
    )
    if not counted and len(shape.workers) == 1:
        return words  # the replica alone, in no placement group
    same = len({tuple(bundle.items()) for bundle in shape.bundles}) == 1
    bundles = [f"{{{', '.join(f'{k}: {v:g}' for k, v in bundle.items())}}}" for bundle in shape.bundles]
    listed = f"{len(bundles)} x {bundles[0]}" if same and len(bundles) > 1 else f"[{', '.join(bundles)}]"
    return f"{words}, bundles {listed} {shape.strategy}"


def _graphs(group: PlannedGroup, kind: Instance) -> list[str]:
    """The graphs by name, where they are compiled ahead, and how long that may take; nobody has measured it on hardware."""
    if not any(isinstance(one, Move) for one in group.graphs):
        return []
    at_once = min(len(group.graphs), workers(kind.host_memory_bytes or COMPILER_BYTES, kind.vcpus))
    low, high = (round(-(-len(group.graphs) // at_once) * minutes) for minutes in compile_minutes(group.layers))
    return [
        *listed(group.graphs),
        f"  compiling, once: {at_once} at a time of {gib(COMPILER_BYTES)} GiB host memory each, {low} to {high} minutes (a guess)",
    ]


def _worker(place: PlannedWorker, made: PlacementPlan) -> list[str]:
    worker, held, kind = place.worker, place.memory, made.instance
    where = f", cores {packing.compact(place.cores)}" if made.counted else ""
    return [
        f"  worker {worker.index}: node {place.node}, stage {worker.stage}, ranks {packing.compact(worker.ranks)}{where}",
        f"    GiB a {'core' if made.counted else 'rank'}: {parts(held)} = {gib(held.total)} of {gib(kind.core_memory_bytes)} "
        f"({100 * held.total / kind.core_memory_bytes:.0f} %)",
        *(f"    {name}={value}" for name, value in place.environment.items()),
    ]
