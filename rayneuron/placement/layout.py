"""The layout of one group: tensor_parallel x pipeline_parallel x nodes -> stages, workers, ranks, cores, Ray bundles.

A bundle is a node's share of the group, so ranks can neither straddle nodes unevenly nor interleave: bundle i is node i, wherever it lands.
A stage's ranks are numbered 0 .. tp-1 in node order. Worker 0 is the Serve replica itself, in bundle 0. A device that drives many ranks
from one process (SPMD) has one worker for each node and stage; a device of one rank a process has one for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rayneuron.config import Deployment
from rayneuron.devices.neuron.releases import MOST_CANDIDATES
from rayneuron.errors import ConfigError
from rayneuron.models.shard import stage_layers
from rayneuron.placement.instances import Instance, instance

CORES = "neuron_cores"


@dataclass(frozen=True, slots=True)
class Worker:
    """One process. `ranks` are TP ranks inside its stage; `offset` counts its first core within the stage's run of cores on its node.

    `leads`: takes that run from the node's core ledger, on behalf of the other workers of the same stage and node.
    """

    index: int
    stage: int
    node: int
    ranks: tuple[int, ...]
    offset: int

    @property
    def leads(self) -> bool:
        return self.offset == 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks of one replica run. `bundles` and `strategy` go into the Serve deployment's placement group as they are."""

    tensor_parallel: int
    pipeline_parallel: int
    nodes: int
    workers: tuple[Worker, ...]
    bundles: tuple[Mapping[str, float], ...]
    strategy: Literal["STRICT_PACK", "STRICT_SPREAD"]
    notes: tuple[str, ...] = ()

    @property
    def nodes_per_stage(self) -> int:
        """Nodes that share the TP ranks of one stage."""
        return max(1, self.nodes // self.pipeline_parallel)

    @property
    def local_tp(self) -> int:
        """TP ranks of one stage on one node."""
        return self.tensor_parallel // self.nodes_per_stage

    @property
    def grouped(self) -> bool:
        """Whether a replica is a group, with a placement group of its own: several processes, or cores that are counted."""
        return len(self.workers) > 1 or CORES in self.bundles[0]

    def stage(self, stage: int) -> tuple[Worker, ...]:
        """The workers of one stage in rank order; the first holds rank 0."""
        return tuple(worker for worker in self.workers if worker.stage == stage)

    def on_node(self, node: int) -> tuple[Worker, ...]:
        """The workers of one node, stage by stage."""
        return tuple(worker for worker in self.workers if worker.node == node)

    def place(self, worker: Worker) -> int:
        """Number of the worker's (stage, node) pair, 0 for the first: what NEURON_RANK_ID counts."""
        return worker.stage * self.nodes_per_stage + worker.ranks[0] // self.local_tp


def layout(
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    nodes: int = 1,
    *,
    ranks_per_process: int = 1,
    instance: Instance | None = None,
    cpus_per_worker: float = 1.0,
) -> Layout:
    """Lay out one replica. `instance`: the type of every node, None where cores are not counted (a plain CPU box).

    Without `nodes` everything is on one node. With it, stages go to nodes first; nodes left over split each stage's TP ranks equally.
    Raises ConfigError with what to write instead.
    """
    stages_per_node, nodes_per_stage = _spread(tensor_parallel, pipeline_parallel, nodes)
    local = tensor_parallel // nodes_per_stage
    notes = _check_instance(instance, tensor_parallel, local, stages_per_node, nodes_per_stage) if instance else []
    together = min(local, ranks_per_process)
    if local % together:
        raise ConfigError(f"{local} ranks a node cannot be shared equally by processes of {together}; write tensor_parallel: {together}")
    workers = _workers(tensor_parallel, pipeline_parallel, nodes, local, together)
    return Layout(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        nodes=nodes,
        workers=workers,
        bundles=tuple(_bundle([w for w in workers if w.node == node], cpus_per_worker, instance) for node in range(nodes)),
        strategy="STRICT_SPREAD" if nodes > 1 else "STRICT_PACK",
        notes=tuple(notes),
    )


def partition(layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each stage. Raises ConfigError where a stage would have none."""
    if stages > layers:
        raise ConfigError(
            f"pipeline_parallel {stages} leaves a stage without any of the {layers} layers; write pipeline_parallel: {layers}",
            param="pipeline_parallel",
        )
    return tuple(stage_layers(layers, stage, stages) for stage in range(stages))


def _spread(tensor_parallel: int, pipeline_parallel: int, nodes: int) -> tuple[int, int]:
    """(stages a node, nodes a stage); one of them is 1."""
    if pipeline_parallel % nodes == 0:
        return pipeline_parallel // nodes, 1
    if nodes % pipeline_parallel == 0 and tensor_parallel % (nodes // pipeline_parallel) == 0:
        return 1, nodes // pipeline_parallel
    good = [
        n
        for n in range(1, nodes)
        if pipeline_parallel % n == 0 or (n % pipeline_parallel == 0 and tensor_parallel % (n // pipeline_parallel) == 0)
    ]
    raise ConfigError(
        f"tensor_parallel {tensor_parallel} x pipeline_parallel {pipeline_parallel} does not divide equally over {nodes} nodes; "
        f"write nodes: {good[-1] if good else 1}",
        param="nodes",
    )


def _check_instance(instance: Instance, tensor_parallel: int, local: int, stages_per_node: int, nodes_per_stage: int) -> list[str]:
    if nodes_per_stage == 1:
        notes = [instance.check_degree(tensor_parallel)]
    else:
        notes = [instance.check_degree(local)]
        _check_wide(instance, tensor_parallel, local, nodes_per_stage)
    if stages_per_node * local > instance.cores:
        fits = instance.cores // local
        raise ConfigError(
            f"{stages_per_node} stages of {local} cores want {stages_per_node * local} cores of one node, "
            f"{instance.name} has {instance.cores}; write pipeline_parallel: {fits}, or nodes: {-(-stages_per_node // fits)}",
            param="pipeline_parallel",
        )
    return [note for note in notes if note]


def _check_wide(instance: Instance, tensor_parallel: int, local: int, nodes_per_stage: int) -> None:
    """TP over nodes: whole nodes, of a type with a network for it."""
    if not instance.tp_across_nodes:
        raise ConfigError(
            f"tensor_parallel {tensor_parallel} over {nodes_per_stage} nodes needs EFA, which {instance.name} has not; "
            f"write tensor_parallel: {instance.degrees[-1]} and pipeline_parallel for the further nodes",
            param="tensor_parallel",
        )
    if instance.efa and local != instance.cores:
        raise ConfigError(
            f"tensor_parallel {tensor_parallel} over {nodes_per_stage} nodes takes {local} of the {instance.cores} cores of each "
            f"{instance.name}; over nodes the runtime wants whole ones: write tensor_parallel: {instance.cores * nodes_per_stage}",
            param="tensor_parallel",
        )


def _workers(tensor_parallel: int, pipeline_parallel: int, nodes: int, local: int, together: int) -> tuple[Worker, ...]:
    workers: list[Worker] = []
    shares = tensor_parallel // local  # nodes a stage
    for stage in range(pipeline_parallel):
        for first in range(0, tensor_parallel, together):
            node = (stage * shares + first // local) if shares > 1 else stage * nodes // pipeline_parallel
            workers.append(Worker(len(workers), stage, node, tuple(range(first, first + together)), first % local))
    return tuple(workers)


def _bundle(workers: Sequence[Worker], cpus_per_worker: float, instance: Instance | None) -> Mapping[str, float]:
    bundle: dict[str, float] = {"CPU": cpus_per_worker * len(workers)}
    if instance is not None:
        bundle[CORES] = sum(len(worker.ranks) for worker in workers)
    return bundle


def group_layout(config: Deployment, ranks_per_process: int) -> Layout:
    """The layout of one replica. Raises ConfigError with what to write instead."""
    if ranks_per_process > 1:
        check_chip(config)
    return layout(
        config.tensor_parallel,
        config.pipeline_parallel,
        config.nodes,
        ranks_per_process=ranks_per_process,
        instance=counted(config),
        cpus_per_worker=config.serving.num_cpus or 1.0,
    )


def check_chip(config: Deployment) -> None:
    """Refuse what the SDK does not do, or nobody is known to have run on the chip. Raises ConfigError."""
    if "e5m2" in (config.kv_dtype or ""):
        raise ConfigError(
            "kv_dtype f8e5m2: the SDK makes float8 states of e4m3 alone (NxD's StateInitializer); write f8e4m3, or leave it out",
            param="kv_dtype",
        )
    sampling = config.on_device_sampling
    if sampling.neuron_compat and not 1 <= sampling.global_topk <= MOST_CANDIDATES:
        raise ConfigError(
            f"on_device_sampling.global_topk {sampling.global_topk}: TopK takes at most 16384 there (NCC_EVRF014), and cumulative sums of "
            f"more than {MOST_CANDIDATES} candidates do not compile; write 256", param="on_device_sampling.global_topk",
        )  # fmt: skip
    nodes = config.nodes // config.pipeline_parallel
    if config.shard_over_sequence and nodes > 1:
        raise ConfigError(
            f"shard_over_sequence gathers over all ranks in every layer, here over {nodes} nodes; leave it out, or write "
            f"pipeline_parallel: {config.nodes}, a stage a node",
            param="shard_over_sequence",
        )


def rank_threads(config: Deployment, made: Layout, cpus: int) -> int:
    """CPU threads of one rank: `threads`, else the whole CPUs that Ray reserves for it, else its share of the `cpus` of a node."""
    reserved = int(config.serving.num_cpus or 0)
    return config.threads or reserved or max(1, cpus // max(len(made.on_node(node)) for node in range(made.nodes)))


def counted(config: Deployment) -> Instance | None:
    """The instance whose cores are counted, None on a plain CPU box."""
    return instance(config.instance) if config.instance else None
