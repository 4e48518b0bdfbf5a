"""The plan of a deployment file: where every replica of every model goes, its environment, and whether it fits; without a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayneuron import models
from rayneuron.config import Deployment
from rayneuron.devices.neuron.targets import Target
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import heads
from rayneuron.models.config_json import read_json
from rayneuron.models.heads import Heads
from rayneuron.placement import instances
from rayneuron.placement.environment import Endpoints, Host, environment, host_of
from rayneuron.placement.fitting import Wanted, capacity_of, check_host, check_memory, check_together, graphs_of, host_memory, stage_memory
from rayneuron.placement.instances import Instance
from rayneuron.placement.layout import Layout, Worker, check_chip, layout
from rayneuron.placement.memory import Memory, float8
from rayneuron.policies import packing

FIRST_PORT = 20000  # stand-ins: at run time each listener binds a free port itself and publishes it
MOST_NODES = 64  # how far a refusal looks for a number of nodes that would do
KERNEL = "6.1"  # of Amazon Linux 2023

Spots = Mapping[tuple[int, int], tuple[int, int]]  # (stage, node of the group) -> (node of the plan, first core)


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker on its node. `node` counts the plan's nodes, `cores` are the node's."""

    worker: Worker
    node: int
    cores: tuple[int, ...]
    memory: Memory
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """One replica. `graphs`: those of each of its processes; `layers`: of its longest stage."""

    name: str
    replica: int
    layout: Layout
    graphs: Sequence[Target]
    layers: int
    places: tuple[PlannedWorker, ...]


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """All replicas of a deployment file on `nodes` equal instances. `free`: what remains of each node, of the cores `left` to us;
    `loading`: bytes of a node's own memory while all of its replicas load."""

    instance: Instance
    nodes: int
    groups: tuple[PlannedGroup, ...]
    free: tuple[frozenset[int], ...]
    notes: tuple[str, ...]
    left: frozenset[int]
    loading: tuple[int, ...]

    @property
    def counted(self) -> bool:
        """Whether cores are counted and environments made: not on a plain machine that names no instance."""
        return self.instance.name != instances.MACHINE


@dataclass(frozen=True, slots=True)
class _Laid:
    """One application, laid out: `memory` a core of each stage, and its graphs."""

    layout: Layout
    memory: Sequence[Memory]
    graphs: Sequence[Target]
    layers: int

    @property
    def node_cores(self) -> int:
        return sum(len(worker.ranks) for worker in self.layout.on_node(0))


@dataclass(slots=True)
class _Nodes:
    """Free cores a node while groups are placed, and the groups placed so far: (name, replica, spots)."""

    free: list[set[int]]
    placed: list[tuple[str, int, Spots]]


def plan(
    wanted: Mapping[str, Wanted], instance: Instance, nodes: int | None = None, *, left: frozenset[int] | None = None
) -> PlacementPlan:
    """Place every replica on `nodes` instances (None: as many as the largest group spans), of each on the cores that are `left` to us.

    Raises ConfigError or CheckpointError naming the application, what it wants, what there is, and what would fit.
    """
    laid = {name: _lay(name, want, instance) for name, want in wanted.items()}
    count = nodes or max((one.layout.nodes for one in laid.values()), default=1)
    left = frozenset(range(instance.cores)) if left is None else left
    state, short = _place_all(wanted, laid, instance, count, left)
    if short is not None:
        raise ConfigError(_refusal(short, state, wanted, laid, instance, nodes or count, left), param="nodes")
    hosts = {n: host_of(w.config, capacity_of(w.config, w.raw).length, float8(w.config, w.raw), KERNEL) for n, w in wanted.items()}
    groups = tuple(
        _group(name, replica, laid[name], spots, instance, i, hosts[name], name if wanted[name].replicas == 1 else f"{name}#{replica}")
        for i, (name, replica, spots) in enumerate(state.placed)
    )
    if instance.name == instances.MACHINE:
        check_together([place.memory for group in groups for place in group.places], count * instance.host_memory_bytes)
    else:
        check_host(max(_loading(groups, count)), max(_loading([_quantized(g, wanted[g.name]) for g in groups], count)), instance)
    notes = [f"{name}: {note}" for name, one in laid.items() for note in one.layout.notes]
    notes += [
        f"{n}: the file says instance: {w.config.instance}" for n, w in wanted.items() if w.config.instance not in (None, instance.name)
    ]
    return PlacementPlan(instance, count, groups, tuple(map(frozenset, state.free)), tuple(notes), left, _loading(groups, count))


def _loading(groups: Sequence[PlannedGroup], count: int) -> tuple[int, ...]:
    """Bytes of each node's own memory while all of its workers load."""
    return tuple(host_memory([p for g in groups for p in g.places if p.node == node]) for node in range(count))


def _quantized(group: PlannedGroup, want: Wanted) -> PlannedGroup:
    """The group with int8 weights."""
    if want.config.quantization is not None:
        return group
    want = replace(want, config=want.config.model_copy(update={"quantization": "int8"}))
    made = group.layout
    held = stage_memory(want, capacity_of(want.config, want.raw), made.tensor_parallel, made.pipeline_parallel)
    return replace(group, places=tuple(replace(place, memory=held[place.worker.stage]) for place in group.places))


def target(wanted: Mapping[str, Wanted], named: str | None, vcpus: int, memory_bytes: int) -> Instance:
    """The instance to plan for: the named one, else the one the deployments name, else a machine of these CPUs and this memory.

    Raises ConfigError for an unknown name, or where the deployments name several.
    """
    names = sorted({want.config.instance for want in wanted.values() if want.config.instance})
    if named is None and len(names) > 1:
        raise ConfigError(f"the applications name different instances ({', '.join(names)}); say which one with --instance {names[0]}")
    if named or names:
        return instances.instance(named or names[0])
    ranks = sum(w.config.tensor_parallel * w.config.pipeline_parallel * w.replicas for w in wanted.values())
    return instances.machine(ranks, vcpus, memory_bytes)


def read_raw(config: Deployment, resolve: Callable[[str], Path] = Path) -> dict[str, Any]:
    """config.json of a deployment's model: `model.config` of the file, else the one in the model directory. Raises CheckpointError."""
    if config.model.config is not None:
        return config.model.config
    path = resolve(config.model.source) / "config.json"
    try:
        return read_json(path)
    except CheckpointError as problem:
        raise CheckpointError(f"{problem}; write the model's config.json inline as model.config to plan without the checkpoint") from None


def read_draft(config: Deployment, raw: Mapping[str, Any], resolve: Callable[[str], Path] = Path) -> dict[str, Any] | Heads | None:
    """config.json of a draft model that a deployment names, or the heads; None where it names neither. `raw`: config.json of the model.
    Raises CheckpointError."""
    said = config.speculative_config
    if said is None or said.model is None:
        return None
    folder = resolve(said.model)
    try:
        draft: dict[str, Any] = read_json(folder / "config.json")
        if not said.by_heads:
            return draft
        return heads.read(said.method, draft, heads.shapes(folder, config.model.allow_pickle), models.architecture(dict(raw)))
    except CheckpointError as wrong:
        raise CheckpointError(f"speculative_config.model {folder}: {wrong.message}", param="speculative_config.model") from None


def _lay(name: str, want: Wanted, instance: Instance) -> _Laid:
    config = want.config
    try:
        if want.ranks_per_process > 1:
            check_chip(config)
        made = layout(
            config.tensor_parallel,
            config.pipeline_parallel,
            config.nodes,
            ranks_per_process=want.ranks_per_process,
            instance=instance if instance.name != instances.MACHINE else None,
            cpus_per_worker=config.serving.num_cpus or 1.0,
        )
        c = capacity_of(config, want.raw)
        layers = -(-models.architecture(dict(want.raw)).layers // config.pipeline_parallel)
        graphs = graphs_of(config, c)
        return _Laid(made, check_memory(want, made, c, instance), graphs, layers)
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"{name}: {error.message}", param=error.param) from None


def _place_all(
    wanted: Mapping[str, Wanted], laid: Mapping[str, _Laid], instance: Instance, count: int, left: frozenset[int]
) -> tuple[_Nodes, tuple[str, int] | None]:
    """The nodes after placing, and the (name, replica) that found no room. Largest first: small groups fit into what large ones leave."""
    state = _Nodes([set(left) for _ in range(count)], [])
    for name in sorted(laid, key=lambda n: (-laid[n].layout.nodes, -laid[n].node_cores, n)):
        for replica in range(wanted[name].replicas):
            spots = _spots(laid[name].layout, state.free, instance)
            if spots is None:
                return state, (name, replica)
            state.placed.append((name, replica, spots))
    return state, None


def _stages(made: Layout, node: int) -> list[int]:
    """The stages of one of the group's nodes."""
    return sorted({worker.stage for worker in made.on_node(node)})


def _spots(made: Layout, free: list[set[int]], instance: Instance) -> Spots | None:
    """Take a group's cores out of `free`: on the nodes with the least free cores that still hold its share, in node order."""
    chosen: list[tuple[int, list[int]]] = []
    for node in sorted(range(len(free)), key=lambda n: (len(free[n]), n)):
        starts = _starts(free[node], made.local_tp, len(_stages(made, 0)), instance)
        if starts is not None and len(chosen) < made.nodes:
            chosen.append((node, starts))
    if len(chosen) < made.nodes:
        return None
    spots = {}
    for share, (node, starts) in enumerate(sorted(chosen)):
        for stage, start in zip(_stages(made, share), starts, strict=True):
            spots[stage, share] = (node, start)
            free[node] -= set(range(start, start + made.local_tp))
    return spots


def _starts(free: set[int], size: int, count: int, instance: Instance) -> list[int] | None:
    left, starts = set(free), []
    for _ in range(count):
        start = packing.choose(left, size, instance.cores, instance.kept)
        if start is None:
            return None
        left -= set(range(start, start + size))
        starts.append(start)
    return starts


def _group(name: str, replica: int, one: _Laid, spots: Spots, instance: Instance, index: int, host: Host, tag: str) -> PlannedGroup:
    made = one.layout
    ports = FIRST_PORT + index * (made.pipeline_parallel + 1)
    addresses = tuple(address(spots[_stages(made, share)[0], share][0]) for share in range(made.nodes))
    endpoints = Endpoints(addresses, tuple(range(ports, ports + made.pipeline_parallel)), ports + made.pipeline_parallel)
    places = []
    for worker in made.workers:
        node, start = spots[worker.stage, worker.node]
        cores = tuple(range(start + worker.offset, start + worker.offset + len(worker.ranks)))
        variables = environment(made, worker, instance, cores, endpoints, host, tag) if instance.name != instances.MACHINE else {}
        places.append(PlannedWorker(worker, node, cores, one.memory[worker.stage], variables))
    return PlannedGroup(name, replica, made, one.graphs, one.layers, tuple(places))


def address(node: int) -> str:
    """A stand-in for a node's IP (the block kept for benchmarks, RFC 2544)."""
    return f"198.18.{node // 250}.{node % 250 + 1}"


def _refusal(
    short: tuple[str, int], state: _Nodes, wanted: Mapping[str, Wanted], laid: Mapping[str, _Laid], instance: Instance, count: int,
    within: frozenset[int],
) -> str:  # fmt: skip
    name, replica = short
    made = laid[name].layout
    total = sum(laid[n].node_cores * laid[n].layout.nodes * want.replicas for n, want in wanted.items())
    share = f"{laid[name].node_cores} cores" + (f" on each of {made.nodes} nodes" if made.nodes > 1 else "")
    left = "; ".join(f"node {i}: {packing.compact(cores)}" for i, cores in enumerate(state.free))
    fits = [f"--nodes {n}" for n in range(count + 1, MOST_NODES + 1) if _place_all(wanted, laid, instance, n, within)[1] is None][:1]
    smaller = _smaller(wanted[name], made, state.free, instance)
    if smaller:
        fits.append(f"tensor_parallel: {smaller} for {name}")
    if replica:
        fits.append(f"num_replicas: {replica} for {name}")
    return (
        f"{name}: replica {replica} wants {share}, left are {left} of {count} x {instance.name}; all applications together want {total} "
        f"cores of {count * len(within)}" + ("; write " + ", or ".join(fits) if fits else "")
    )


def _smaller(want: Wanted, made: Layout, free: Sequence[set[int]], instance: Instance) -> int | None:
    """The largest smaller degree whose cores are free on one node and hold the model."""
    if made.nodes > 1 or made.pipeline_parallel > 1:
        return None
    for degree in sorted((d for d in instance.degrees if d < made.tensor_parallel), reverse=True):
        held = stage_memory(want, capacity_of(want.config, want.raw), degree, 1)
        if held[0].total <= instance.core_memory_bytes and any(packing.runs(cores, degree, instance.cores) for cores in free):
            return degree
    return None
