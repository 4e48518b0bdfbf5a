"""Head plans and cuts: every degree equals one rank, or is refused with the nearest that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from rayneuron import models
from rayneuron.errors import ConfigError
from rayneuron.models import hub, shard
from tests.drawn import examples
from tests.models import cases
from tests.models.cases import Runner

DEGREES = (1, 2, 3, 4, 6, 8, 16, 24, 32)


def test_example_of_nxd() -> None:
    """56 query and 8 KV heads on 32 ranks: 64 queries, each group of 7 padded by one, every KV head on 4 ranks."""
    plan = shard.head_plan(56, 8, 32)
    assert plan.strategy == shard.REPLICATE and len(plan.q) == 64 and plan.kv == tuple(k for k in range(8) for _ in range(4))
    assert plan.q[:8] == (0, 1, 2, 3, 4, 5, 6, -1) and plan.q[-1] == -1


@given(st.integers(1, 12), st.sampled_from([1, 2, 3, 4, 5, 6, 8]), st.sampled_from(DEGREES))
@examples(300)
def test_plans_hold_every_head_once_beside_its_own_keys(kv_heads: int, group: int, ranks: int) -> None:
    heads = kv_heads * group
    if ranks > heads:
        with pytest.raises(ConfigError, match=f"{heads} attention heads; write tensor_parallel: {heads} or less"):
            shard.head_plan(heads, kv_heads, ranks)
        return
    plan = shard.head_plan(heads, kv_heads, ranks)
    assert sorted(h for h in plan.q if h >= 0) == list(range(heads))
    assert len(plan.q) % ranks == len(plan.kv) % ranks == 0
    for rank in range(ranks):
        q, kv = plan.q_of(rank), plan.kv_of(rank)
        for i, head in enumerate(q):
            assert head < 0 or kv[i * len(kv) // len(q)] == head // group


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (12, 4), (12, 3), (8, 1), (6, 2)])
def test_every_degree_equals_one_rank(heads: int, kv_heads: int, tmp_path: Path) -> None:
    """The grid of BR-40: degrees below, equal to, above, and not dividing the KV heads."""
    config = tf.LlamaConfig(
        **{
            **cases.SMALL,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 8,
            "hidden_size": 96,
            "intermediate_size": 50,
        }
    )
    saved = cases.save(config, tmp_path, tokens=12)
    for ranks in DEGREES:
        if ranks > heads:
            with pytest.raises(ConfigError, match=f"write tensor_parallel: {heads} or less"):
                models.check(hub.read_config(tmp_path), tp=ranks, max_model_len=64)
            continue
        for got in cases.on_ranks(ranks, lambda comm: Runner.open(tmp_path, comm).chunk(saved.ids, 0, 12, 16, 32)):
            assert (got - saved.logits).abs().max() < 1e-4, ranks


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("strategy", [None, "CONVERT_TO_MHA", "replicated-heads"])
def test_strategies_and_fused_qkv(strategy: str | None, fused: bool, tmp_path: Path) -> None:
    saved = cases.save(cases.CONFIGS["llama_biased"](), tmp_path, tokens=12)
    arch = models.check(hub.read_config(tmp_path), tp=4, max_model_len=64, group_query_attention=strategy)

    def work(comm):
        runner = Runner.open(tmp_path, comm, arch=arch, fused=fused)
        assert ("qkv.w" in runner.weights["layers"][0]) == fused
        return runner.chunk(saved.ids, 0, 12, 16, 32)

    assert (cases.on_ranks(4, work)[3] - saved.logits).abs().max() < 1e-4


def test_replicated_heads_are_identical(tmp_path: Path) -> None:
    cases.save(cases.CONFIGS["llama"](), tmp_path, tokens=4)
    keys = cases.on_ranks(4, lambda comm: Runner.open(tmp_path, comm, fused=False).weights["layers"][0]["k.w"])
    assert torch.equal(keys[0], keys[1]) and torch.equal(keys[2], keys[3]) and not torch.equal(keys[0], keys[2])


@pytest.mark.parametrize("name", ["shard-over-batch", "all-gather-heads"])
def test_strategies_that_mean_nothing_here_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*write 'replicated-heads'"):
        shard.head_plan(8, 2, 2, name)


def test_shard_over_heads_needs_divisible_kv_heads() -> None:
    with pytest.raises(ConfigError, match="needs key/value heads"):
        shard.head_plan(8, 2, 4, "shard-over-heads")


@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([0, 1]))
@examples(100)
def test_parts_join_to_the_whole_and_zeros(size: int, ranks: int, dim: int) -> None:
    t = torch.arange(1, size * 3 + 1).view(size, 3).movedim(0, dim)
    joined = torch.cat([shard.take_part(t, r, ranks, dim) for r in range(ranks)], dim).movedim(dim, 0)
    assert torch.equal(joined[:size], t.movedim(dim, 0)) and not joined[size:].any() and len(joined) % ranks == 0


def test_stages_cover_all_layers_in_order() -> None:
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            parts = [shard.stage_layers(layers, s, stages) for s in range(stages)]
            assert [i for p in parts for i in p] == list(range(layers)) and max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("name", ["llama", "llama_tied", "opt_350m", "bloom", "gemma2"])
def test_stages_of_a_pipeline_equal_the_whole(name: str, tmp_path: Path) -> None:
    """The first stage hands its residual to the last; head and embedding live on different stages."""
    from rayneuron.models import decoder, ops
    from rayneuron.models.collectives import Solo

    saved = cases.save(cases.CONFIGS[name](), tmp_path, tokens=12)
    first, last = (Runner.open(tmp_path, Solo(), stage=s, stages=2) for s in (0, 1))
    assert (
        len(first.weights["layers"]) == len(last.weights["layers"]) == 1
        and "head.w" not in first.weights["top"]
        and "embed.w" not in last.weights["top"]
    )
    positions, rows = torch.arange(12, dtype=torch.int32).expand(2, 12), torch.tensor([2, 0], dtype=torch.int32)
    args = (saved.ids, first.places(positions, rows, 32))
    with torch.no_grad():
        x = decoder.forward(first.arch, ops.PLAIN, Solo(), first.weights, first.kv, *args)
        x = decoder.forward(last.arch, ops.PLAIN, Solo(), last.weights, last.kv, *args, hidden=x)
        got = decoder.logits(last.arch, ops.PLAIN, Solo(), last.weights, x)
    assert (got - saved.logits).abs().max() < 1e-4
