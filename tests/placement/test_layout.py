"""Layouts: golden tables for the shapes that matter, laws for all shapes, refusals that say what to write."""

from __future__ import annotations

import itertools

import pytest

from rayneuron.config import parse
from rayneuron.errors import ConfigError
from rayneuron.placement.instances import INSTANCES, declared, instance
from rayneuron.placement.layout import group_layout, layout, partition, rank_threads

SPMD = 1024  # one process drives all its node's ranks


def places(*arguments: int, **options: object) -> list[tuple[int, int, str]]:
    """(stage, node, ranks) of each worker."""
    return [(w.stage, w.node, f"{w.ranks[0]}-{w.ranks[-1]}") for w in layout(*arguments, **options).workers]  # type: ignore[arg-type]


GOLDEN = [
    # tp, pp, nodes, ranks a process, instance -> (stage, node, ranks) of each worker, CPUs and cores of each bundle, strategy
    ((32, 1, 1, SPMD, "trn1.32xlarge"), [(0, 0, "0-31")], [(1, 32)], "STRICT_PACK"),
    ((64, 1, 2, SPMD, "trn1.32xlarge"), [(0, 0, "0-31"), (0, 1, "32-63")], [(1, 32), (1, 32)], "STRICT_SPREAD"),
    ((32, 2, 2, SPMD, "trn1.32xlarge"), [(0, 0, "0-31"), (1, 1, "0-31")], [(1, 32), (1, 32)], "STRICT_SPREAD"),
    (
        (64, 2, 4, SPMD, "trn1n.32xlarge"),
        [(0, 0, "0-31"), (0, 1, "32-63"), (1, 2, "0-31"), (1, 3, "32-63")],
        [(1, 32)] * 4,
        "STRICT_SPREAD",
    ),
    ((8, 3, 1, SPMD, "inf2.48xlarge"), [(0, 0, "0-7"), (1, 0, "0-7"), (2, 0, "0-7")], [(3, 24)], "STRICT_PACK"),
    (
        (8, 4, 2, SPMD, "inf2.48xlarge"),
        [(0, 0, "0-7"), (1, 0, "0-7"), (2, 1, "0-7"), (3, 1, "0-7")],
        [(2, 16), (2, 16)],
        "STRICT_SPREAD",
    ),
    ((2, 1, 1, 1, None), [(0, 0, "0-0"), (0, 0, "1-1")], [(2, None)], "STRICT_PACK"),
    (
        (2, 2, 2, 1, "inf2.xlarge"),
        [(0, 0, "0-0"), (0, 0, "1-1"), (1, 1, "0-0"), (1, 1, "1-1")],
        [(2, 2), (2, 2)],
        "STRICT_SPREAD",
    ),
    ((1, 1, 1, 1, None), [(0, 0, "0-0")], [(1, None)], "STRICT_PACK"),
]


@pytest.mark.parametrize(("shape", "workers", "bundles", "strategy"), GOLDEN, ids=lambda value: str(value)[:40])
def test_golden_layouts(shape: tuple, workers: list, bundles: list, strategy: str) -> None:  # type: ignore[type-arg]
    tp, pp, nodes, together, kind = shape
    made = layout(tp, pp, nodes, ranks_per_process=together, instance=instance(kind) if kind else None)
    assert [(w.stage, w.node, f"{w.ranks[0]}-{w.ranks[-1]}") for w in made.workers] == workers
    assert [(b["CPU"], b.get("neuron_cores")) for b in made.bundles] == bundles
    assert made.strategy == strategy
    assert [w.index for w in made.workers] == list(range(len(workers)))


def test_four_ranks_on_two_nodes_are_in_node_order() -> None:  # BR-19
    made = layout(4, 1, 2, ranks_per_process=1, instance=declared(2, vcpus=2))
    assert [(w.node, w.ranks, w.offset, w.leads) for w in made.workers] == [
        (0, (0,), 0, True), (0, (1,), 1, False), (1, (2,), 0, True), (1, (3,), 1, False),
    ]  # fmt: skip
    assert made.bundles == ({"CPU": 2.0, "neuron_cores": 2}, {"CPU": 2.0, "neuron_cores": 2})


@pytest.mark.parametrize("name", INSTANCES)
def test_laws_hold_for_every_possible_group(name: str) -> None:
    kind = INSTANCES[name]
    seen = 0
    for local, pp, nodes, together in itertools.product(kind.degrees, (1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 8), (1, SPMD)):
        wide = nodes // pp if nodes > pp and nodes % pp == 0 else 1
        try:
            made = layout(local * wide, pp, nodes, ranks_per_process=together, instance=kind, cpus_per_worker=0.5)
        except ConfigError as refused:
            assert "write " in str(refused)
            continue
        seen += 1
        for stage in range(pp):
            ranks = [rank for worker in made.stage(stage) for rank in worker.ranks]
            assert ranks == list(range(local * wide))
            on = [w.node for w in made.stage(stage) for _ in w.ranks]
            assert on == sorted(on) and all(on.count(node) == made.local_tp for node in on)
        for node, bundle in enumerate(made.bundles):
            here = made.on_node(node)
            assert bundle["neuron_cores"] == sum(len(w.ranks) for w in here) <= kind.cores
            assert bundle["CPU"] == 0.5 * len(here) > 0
            by_stage = {w.stage: [v for v in here if v.stage == w.stage] for w in here}
            for workers in by_stage.values():
                assert [w.offset for w in workers] == [sum(len(v.ranks) for v in workers[:i]) for i in range(len(workers))]
                assert sum(w.leads for w in workers) == 1
        assert made.workers[0].node == made.workers[0].stage == 0 and made.workers[0].ranks[0] == 0
        assert [w.node for w in made.workers] == sorted(w.node for w in made.workers)
    assert seen >= 8


REFUSED = [
    # what, why and what to write
    ((64, 1, 1), "trn1.32xlarge", {}, "tensor_parallel 64 is not possible on trn1.32xlarge.*write tensor_parallel: 32"),
    ((24, 1, 1), "trn1.32xlarge", {}, "allowed are 1, 2, 4, 8, 16, 32; write tensor_parallel: 16"),
    ((32, 1, 2), "trn1.32xlarge", {}, "takes 16 of the 32 cores of each trn1.32xlarge.*write tensor_parallel: 64"),
    (
        (48, 1, 2),
        "inf2.48xlarge",
        {},
        "over 2 nodes needs EFA, which inf2.48xlarge has not; write tensor_parallel: 24 and pipeline_parallel",
    ),
    ((4, 1, 2), "trn1.2xlarge", {}, "needs EFA, which trn1.2xlarge has not"),
    ((8, 4, 1), "inf2.48xlarge", {}, "4 stages of 8 cores want 32 cores of one node.*write pipeline_parallel: 3, or nodes: 2"),
    ((3, 1, 2), None, {}, "does not divide equally over 2 nodes; write nodes: 1"),
    ((2, 3, 2), None, {}, "does not divide equally over 2 nodes; write nodes: 1"),
    ((4, 2, 3), None, {}, "does not divide equally over 3 nodes; write nodes: 2"),
    ((12, 1, 1), "inf2.48xlarge", {"ranks_per_process": 8}, "cannot be shared equally by processes of 8"),
]


@pytest.mark.parametrize(("shape", "kind", "options", "says"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusals_say_what_to_write(shape: tuple, kind: str | None, options: dict, says: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=says) as refused:
        layout(*shape, instance=instance(kind) if kind else None, **{"ranks_per_process": SPMD, **options})
    assert "write" in str(refused.value)


def test_stages_over_several_nodes_each() -> None:
    made = layout(64, 2, 4, ranks_per_process=SPMD, instance=instance("trn1.32xlarge"))
    assert (made.nodes_per_stage, made.local_tp, [made.place(w) for w in made.workers]) == (2, 32, [0, 1, 2, 3])


def test_what_is_a_group() -> None:
    """Several processes, or cores that are counted; not one process that drives several uncounted cores."""
    assert layout(2).grouped and layout(1, 2).grouped and layout(1, instance=instance("cores:1")).grouped
    assert layout(2, ranks_per_process=SPMD, instance=instance("inf2.xlarge")).grouped
    assert not layout(2, ranks_per_process=SPMD).grouped and not layout().grouped


@pytest.mark.parametrize(
    ("said", "cpus", "threads"),
    [
        ({}, 8, 8),
        ({"tensor_parallel": 4}, 8, 2),
        ({"tensor_parallel": 4, "nodes": 2}, 8, 4),
        ({"tensor_parallel": 16}, 8, 1),
        ({"tensor_parallel": 4, "serving": {"num_cpus": 3.5}}, 8, 3),
        ({"tensor_parallel": 4, "serving": {"num_cpus": 0.5}}, 8, 2),
        ({"tensor_parallel": 4, "threads": 5, "serving": {"num_cpus": 3}}, 8, 5),
    ],
)
def test_cpu_threads_of_a_rank(said: dict, cpus: int, threads: int) -> None:  # type: ignore[type-arg]
    config = parse({"model": {"path": "m"}, **said})
    assert rank_threads(config, group_layout(config, 1), cpus) == threads


def test_doubtful_degrees_are_noted() -> None:
    assert "2.23" in layout(4, ranks_per_process=SPMD, instance=instance("trn1.32xlarge")).notes[0]


def test_partition() -> None:
    sizes = [len(part) for part in partition(30, 4)]
    assert sizes == [8, 8, 7, 7]
    assert partition(80, 2) == (range(40), range(40, 80))
    for layers, stages in itertools.product(range(1, 40), range(1, 9)):
        if stages > layers:
            with pytest.raises(ConfigError, match=f"leaves a stage without any of the {layers} layers; write pipeline_parallel: {layers}$"):
                partition(layers, stages)
            continue
        parts = partition(layers, stages)
        assert [i for part in parts for i in part] == list(range(layers))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_dtype": "f8e5m2"}, "the SDK makes float8 states of e4m3 alone .*; write f8e4m3, or leave it out"),
        ({"shard_over_sequence": True, "nodes": 2, "tensor_parallel": 4}, "over 2 nodes; leave it out, or write pipeline_parallel: 2"),
        ({"kv_dtype": "f8e4m3"}, None),
        ({"shard_over_sequence": True, "nodes": 2, "tensor_parallel": 4, "pipeline_parallel": 2}, None),
    ],
)
def test_what_the_chip_is_not_known_to_do(options: dict, says: str | None) -> None:  # type: ignore[type-arg]
    """Of devices that drive many ranks from one process; the CPU does all of it."""
    config = parse({"model": {"path": "x"}, "device": "neuron", **options})
    assert group_layout(config, 1).tensor_parallel
    if says is None:
        assert group_layout(config, 1024).nodes == config.nodes
        return
    with pytest.raises(ConfigError, match=says):
        group_layout(config, 1024)
