"""Who of a group takes what, and what each is told: the layout and the workers' answers as messages. Pure."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayneuron import wire
from rayneuron.config import Deployment
from rayneuron.engine.buckets import Capacity
from rayneuron.group.messages import Begin, Place, Placed
from rayneuron.placement.environment import Endpoints, environment, host_of
from rayneuron.placement.instances import Instance
from rayneuron.placement.layout import Layout, Worker, counted


@dataclass(frozen=True, slots=True)
class Common:
    """What all ranks are told alike."""

    capacity: Capacity
    dtype: str
    threads: int
    model: str
    float8: bool = False


def places(config: Deployment, made: Layout, node_ips: Sequence[str], token: bytes, ledgers: str) -> list[Place]:
    """What each worker takes before the others are told: the first of a stage and node its cores, rank 0 the stage's meeting place."""
    instance = counted(config)
    out = []
    for worker in made.workers:
        first = worker.ranks[0] == 0
        near = len(_near(made, worker))
        before = made.stage(worker.stage - 1) if worker.stage else ()
        ip = node_ips[worker.node]
        out.append(
            Place(
                deployment=config.model.served_name,
                index=worker.index,
                node_ip=ip,
                token=token,
                take=made.local_tp if instance is not None and worker.leads else 0,
                instance=config.instance,
                directory=f"{ledgers}/{ip}",
                wait_s=config.group.cores_s,
                allowed=None if config.serving.seat is None else config.serving.seat.cores,
                share=near if worker.leads and near > 1 else 0,
                gather=made.nodes_per_stage if first and made.nodes_per_stage > 1 else 0,
                listen="" if not before else "unix" if _opposite(before, worker).node == worker.node else "tcp",
            )
        )
    return out


def begins(
    config: Deployment,
    made: Layout,
    placed: Sequence[Placed],
    node_ips: Sequence[str],
    processes: Mapping[int, tuple[int, int]],
    common: Common,
) -> list[Begin]:
    """What each worker is told once all have their places. `processes`: worker -> (pid, start)."""
    instance = counted(config)
    out = []
    for worker in made.workers:
        stage = made.stage(worker.stage)
        first = placed[stage[0].index]
        after = made.stage(worker.stage + 1) if worker.stage + 1 < made.pipeline_parallel else ()
        near = _near(made, worker)
        out.append(
            Begin(
                config=config.model_dump(exclude_unset=True),
                capacity=common.capacity,
                dtype=common.dtype,
                environment=_environment(config, made, worker, instance, placed, node_ips, common) if instance is not None else {},
                threads=common.threads,
                stage=worker.stage,
                stages=made.pipeline_parallel,
                rank=stage.index(worker),
                ranks=len(stage),
                hosts=made.nodes_per_stage,
                segment=placed[near[0].index].segment,
                store=first.store,
                link=placed[_opposite(after, worker).index].link if after else "",
                peers={i: processes[w.index] for i, w in enumerate(near) if w is not worker},
                timeout_s=config.group.start_s,
                step_timeout_s=config.group.step_s,
                model=common.model,
            )
        )
    return out


def longest_step(c: Capacity) -> int:
    """Bytes of the longest message to a worker."""
    rows = max(c.rows, max(c.prefill_rows))
    return wire.MOST_BYTES + (64 + 4 * c.space.width(c.length)) * rows + 16 * max(c.chunk, rows * max(c.verify, 1))


def longest_answer(c: Capacity, vocab: int) -> int:
    """Bytes of the longest message from a worker: the logits of a step."""
    rows = c.rows * max(c.verify, 1)
    return wire.MOST_BYTES + 4 * vocab * max(rows, c.scores) + 64 * rows


def _near(made: Layout, worker: Worker) -> list[Worker]:
    """The workers of a worker's stage on its node, in rank order; the first leads."""
    return [other for other in made.stage(worker.stage) if other.node == worker.node]


def _opposite(stage: Sequence[Worker], worker: Worker) -> Worker:
    """The worker of another stage with the same ranks."""
    return next(other for other in stage if other.ranks == worker.ranks)


def _environment(
    config: Deployment, made: Layout, worker: Worker, instance: Instance, placed: Sequence[Placed], node_ips: Sequence[str], common: Common
) -> Mapping[str, str]:
    leader = next(w for w in made.on_node(worker.node) if w.stage == worker.stage and w.leads)
    run = placed[leader.index].cores
    roots = tuple(placed[made.stage(stage)[0].index].ports[0] for stage in range(made.pipeline_parallel))
    ports = Endpoints(tuple(node_ips), roots, placed[0].ports[1])
    host = host_of(config, common.capacity.length, common.float8, platform.release())
    mine = run[worker.offset : worker.offset + len(worker.ranks)]
    return environment(made, worker, instance, mine, ports, host, config.model.served_name)
