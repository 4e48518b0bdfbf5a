"""Re-sharding: whatever way both sides are cut, each head of each layer of each position arrives where it belongs, and padding is zero."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from msgspec.structs import fields, replace

from rayneuron.errors import ConfigError
from rayneuron.models.shard import CONVERT, REPLICATE, SHARD, head_plan, sequence_shards, stage_layers
from rayneuron.transfer.layout import KvLayout, differences, reads, zeros

LAYERS, HEADS, DIM, STALE = 5, 8, 2, -7


def cut(kv_heads: int, ranks: int, strategy: str | None = None, stages: int = 1, block: int = 4, shards: int = 1) -> KvLayout:
    plan = head_plan(HEADS, kv_heads, ranks, strategy, shards)
    columns = -(-block // shards)
    return KvLayout(
        model="m",
        dtype="float32",
        kv_dtype="float32",
        quantization="",
        block=block,
        unit=2 * columns * DIM * 4,
        head_dim=DIM,
        kv_heads=kv_heads,
        layers=LAYERS,
        rope="r",
        limit=64,
        shards=shards,
        format="rows",
        numerics="n",
        stages=tuple((r.start, r.stop) for r in (stage_layers(LAYERS, s, stages) for s in range(stages))),
        heads=tuple(plan.kv_of(rank) for rank in range(ranks)),
    )


@lru_cache(4096)
def filled(one: KvLayout, rank: int, stage: int, blocks: int) -> np.ndarray:
    """[layers, blocks, heads, columns] of codes that say layer, source head and position, as `rank` of `stage` would hold them."""
    first, end = one.stages[stage]
    columns = -(-one.block // one.shards)
    out = np.zeros((end - first, blocks, len(one.heads[rank]), columns), np.int64)
    for layer in range(first, end):
        for block in range(blocks):
            for at, source in enumerate(one.heads[rank]):
                for column in range(columns):
                    offset = column * one.shards + rank % one.shards
                    if source >= 0 and offset < one.block:
                        out[layer - first, block, at, column] = 1 + layer * 10_000 + source * 1_000 + block * one.block + offset
    return out


def pulled(mine: KvLayout, theirs: KvLayout, blocks: int = 2) -> None:
    """Every worker of `mine` reads what `reads` says, and then holds what it would have computed."""
    assert differences(mine, theirs) == []
    ranks = len(theirs.heads)
    there = [filled(theirs, worker % ranks, worker // ranks, blocks) for worker in range(theirs.workers)]
    for stage, (first, end) in enumerate(mine.stages):
        for rank, held in enumerate(mine.heads):
            wanted = filled(mine, rank, stage, blocks)
            got, times = np.full_like(wanted, STALE), np.zeros((end - first, len(held)), int)
            for read in reads(mine, stage, rank, theirs):
                mine_layers = slice(read.here, read.here + read.count)
                source = there[read.worker][read.there : read.there + read.count]
                for run in read.runs:
                    here = slice(run.here, run.here + run.count)
                    got[mine_layers, :, here] = source[:, :, run.there : run.there + run.count]
                    times[mine_layers, here] += 1
                for a, b in read.copies:
                    got[mine_layers, :, b] = got[mine_layers, :, a]
            got[:, :, zeros(mine, rank)] = 0
            assert (got == wanted).all(), (mine.heads, theirs.heads, stage, rank)
            distinct = {source for source in held if source >= 0}
            assert times.max(initial=0) <= 1 and times.sum() == len(distinct) * (end - first), "each source once"


def ways(kv_heads: int, ranks: int) -> list[KvLayout]:
    """Every way to cut these heads that the model's own rules allow."""
    made = []
    for strategy in (None, SHARD, REPLICATE, CONVERT):
        for stages in (1, 2):
            try:
                made.append(cut(kv_heads, ranks, strategy, stages))
            except ConfigError:
                continue
    return made


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_degree_to_every_degree(kv_heads: int) -> None:
    layouts = [one for ranks in (1, 2, 3, 4, 6, 8) for one in ways(kv_heads, ranks)]
    assert len(layouts) >= 20
    for mine in layouts:
        for theirs in layouts:
            pulled(mine, theirs)
    assert any(-1 in held for one in layouts for held in one.heads), "no case pads"
    assert any(len(set(held)) < len(held) for one in layouts for held in one.heads) or kv_heads == HEADS, "no case holds a head twice"


@pytest.mark.parametrize("block", [1, 3, 16])
def test_blocks_of_any_size(block: int) -> None:
    for ranks in (1, 2, 8):
        pulled(cut(2, 4, block=block), cut(2, ranks, stages=2, block=block))


@pytest.mark.parametrize(("kv_heads", "ranks"), [(1, 2), (2, 4), (2, 8)])
@pytest.mark.parametrize("block", [4, 6])
def test_positions_shared_by_turns_are_read_from_the_same_turn(kv_heads: int, ranks: int, block: int) -> None:
    shards = sequence_shards(HEADS, kv_heads, ranks)
    mine = cut(kv_heads, ranks, block=block, shards=shards)
    pulled(mine, cut(kv_heads, ranks, stages=2, block=block, shards=shards))
    assert any("shards" in line for line in differences(mine, cut(kv_heads, ranks, block=block)))


def test_copies_share_the_work() -> None:
    """Two ranks that hold the same head read it from different ranks that have it."""
    mine = theirs = cut(2, 8)
    assert len({reads(mine, 0, rank, theirs)[0].worker for rank in range(8)}) == 8


def test_heads_side_by_side_are_one_run() -> None:
    (read,) = reads(cut(8, 1), 0, 0, cut(8, 1))
    assert [(run.there, run.here, run.count) for run in read.runs] == [(0, 0, 8)]
    halves = reads(cut(8, 1), 0, 0, cut(8, 2))
    assert [(run.there, run.here, run.count) for read in halves for run in read.runs] == [(0, 0, 4), (0, 4, 4)]


OTHER = {
    "version": 99, "model": "other", "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "quantization": "int8", "block": 8, "unit": 1,
    "head_dim": 4, "kv_heads": 4, "layers": 4, "rope": "other", "limit": 63, "shards": 2, "format": "panels",
    "stages": ((0, 2), (3, 5)), "heads": ((0, 1), (2, 3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(KvLayout)])
def test_each_field_alone_is_refused_by_name_with_both_values(name: str) -> None:
    mine = cut(8, 2)
    if name == "numerics":
        assert differences(mine, replace(mine, numerics="other")) == [], "that rounds differently, and is not wrong"
        return
    found = differences(mine, replace(mine, **{name: OTHER[name]}))
    assert any(line.startswith(f"{name}: ") for line in found), found
    if name not in ("stages", "heads"):
        line = next(line for line in found if line.startswith(f"{name}: "))
        assert f"{getattr(mine, name)} here" in line and f"{OTHER[name]} there" in line


def test_a_longer_limit_there_is_no_difference() -> None:
    assert differences(cut(8, 2), replace(cut(8, 2), limit=65)) == []
