"""Bucket lists against NxD Inference's published rule, and every reachable step against the inventory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.devices.base import LIKELIEST, LOGITS, SAMPLED, SCORES
from rayneuron.devices.neuron.targets import targets
from rayneuron.engine.buckets import capacity, decode_shape, fours, inventory, pack_prefill, powers, prefill_shape
from rayneuron.errors import CompileError, ConfigError

# NxD Inference: lo == hi -> [hi]; else powers of two up to round(log2 hi), then hi
NXD_TABLE = [
    ((128, 128), [128]),
    ((128, 256), [128, 256]),
    ((128, 513), [128, 256, 513]),
    ((128, 1024), [128, 256, 512, 1024]),
    ((128, 2048), [128, 256, 512, 1024, 2048]),
    ((128, 100), [100]),
    ((1, 16), [1, 2, 4, 8, 16]),
]


@pytest.mark.parametrize(("bounds", "expected"), NXD_TABLE)
def test_powers_follow_nxd(bounds, expected):
    assert powers(*bounds) == expected


@given(st.integers(1, 20), st.integers(20, 900), st.integers(1, 600), st.data())
def test_every_step_finds_a_listed_shape(rows, length, chunk, data):
    c = capacity(rows=rows, length=length, chunk=chunk)
    listed = set(inventory(c))
    count = data.draw(st.integers(1, rows))
    longest = data.draw(st.integers(1, length))
    for want in (LIKELIEST, SAMPLED, LOGITS):
        shape = decode_shape(c, count, longest, want)
        assert shape in listed and shape.rows >= count and shape.length >= longest
    remaining = data.draw(st.lists(st.integers(1, length), min_size=1, max_size=rows))
    counts = pack_prefill(c, remaining, c.chunk)
    assert 1 <= len(counts) <= len(remaining)
    assert all(1 <= n <= m for n, m in zip(counts, remaining, strict=False))
    reach = data.draw(st.integers(max(counts), length))
    shape = prefill_shape(c, counts, reach, LIKELIEST)
    assert shape in listed and shape.rows >= len(counts) and shape.tokens >= max(counts)
    scored = prefill_shape(c, [min(remaining[0], c.scores)], max(reach, min(remaining[0], c.scores)), SCORES)
    assert scored in listed


def test_short_prompts_share_a_step_only_where_that_saves_work():
    c = capacity(rows=16, length=2048, chunk=512)
    assert pack_prefill(c, [128, 128, 128, 128, 128], c.chunk) == [128] * 4  # 4 x 128 padded tokens for 4 x 128 true ones
    assert pack_prefill(c, [512, 10], c.chunk) == [512]
    assert pack_prefill(c, [128, 4], c.chunk) == [128]  # 2 x 128 for 132 wastes more than 128 now and 32 later
    assert pack_prefill(c, [700], c.chunk) == [512]


def test_wrong_lists_are_refused():
    with pytest.raises(ConfigError, match="max_model_len 100"):
        capacity(rows=2, length=100, chunk=50, context=[128])
    with pytest.raises(ConfigError, match="max_num_seqs 2"):
        capacity(rows=2, length=100, chunk=50, batch=[4])
    for block in (4, 8, 48):
        with pytest.raises(ConfigError, match=f"block_size {block} is no power of two from 16; write one, or 100"):
            capacity(rows=2, length=100, chunk=50, block=block)
    assert capacity(rows=2, length=8, chunk=4, block=8).block == 8, "one block a row may have any size"
    c = capacity(rows=2, length=100, chunk=50)
    with pytest.raises(CompileError, match="largest is 2"):
        decode_shape(c, 3, 10, LIKELIEST)


PREFIXED = capacity(rows=4, length=2048, chunk=512, context=[128, 512], prefix=[512, 1024])


def test_graphs_of_prefills_are_prefill_times_prefix():
    """By hand: each T behind 0, 512, 1024 and the maximum, cut at the maximum; one row a prefill."""
    made = {(s.rows, s.tokens, s.length) for s in inventory(PREFIXED) if s.tag == "prefill" and s.want == LIKELIEST}
    assert made == {(1, 128, n) for n in (128, 640, 1152, 2048)} | {(1, 512, n) for n in (512, 1024, 1536, 2048)}
    assert [s for s in inventory(PREFIXED) if s.tag == "decode"] == [
        s for s in inventory(capacity(rows=4, length=2048, chunk=512, context=[128, 512])) if s.tag == "decode"
    ]
    with pytest.raises(ConfigError, match="buckets.prefix goes to 4096, beyond max_model_len 2048"):
        capacity(rows=4, length=2048, chunk=512, prefix=[4096])


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        (100, [(0, 100, 128, 128)]),
        (300, [(0, 300, 512, 512)]),
        (1000, [(0, 512, 512, 512), (512, 488, 512, 1024)]),  # 488 new leave 24 places: the prefix is 488, not 512
        (600, [(0, 512, 512, 512), (512, 88, 128, 640)]),  # 88 new leave 40 places
        (1700, [(0, 512, 512, 512), (512, 512, 512, 1024), (1024, 512, 512, 1536), (1536, 164, 512, 2048)]),
        (1030, [(0, 512, 512, 512), (512, 512, 512, 1024), (1024, 6, 128, 1152)]),
    ],
)
def test_chunks_behind_a_prefix_by_hand(prompt, chunks):
    """(start, count) of each chunk, and T and L of its graph: select_prefix of NxD Inference on paper."""
    from rayneuron.engine.runner import choose
    from rayneuron.engine.scheduler import Scheduler
    from tests.engine.test_scheduler import make

    scheduler = Scheduler(PREFIXED)
    scheduler.add(make(0, prompt, 1))
    seen = []
    while True:
        plan = scheduler.plan()
        (work,) = plan.works
        shape = choose(PREFIXED, plan)
        assert shape in set(inventory(PREFIXED))
        seen.append((work.start, work.count, shape.tokens, shape.length))
        scheduler.launch(plan, overlaps=False)
        if work.last:
            break
    assert seen == chunks


def test_few_graphs_where_each_is_minutes_of_compiling() -> None:
    """8B at 8k on Neuron: one output kind, prefill of one row, decode of one and of all, lengths by fours; still every step finds one."""
    c = capacity(rows=32, length=8192, chunk=512, few=True)
    shapes = inventory(c)
    assert (c.context, c.lengths, c.batch, c.prefill_rows, c.wants) == ((128, 512), (2048, 8192), (1, 32), (1,), (LOGITS,))
    assert len(shapes) == 8 and len(targets(shapes, c.space)) == 11
    for count in (1, 2, 31, 32):
        for length in (1, 2048, 2049, 8192):
            assert decode_shape(c, count, length, LOGITS) in shapes
    for tokens in (1, 128, 129, 512):
        for length in range(tokens, 8193, 511):
            assert prefill_shape(c, [tokens], length, LOGITS) in shapes
    assert capacity(rows=4, length=32768, chunk=2048, few=True).lengths == (2048, 8192, 32768)
    assert capacity(rows=1, length=64, chunk=16, few=True).lengths == (16, 64)
    asked = capacity(rows=4, length=64, chunk=16, few=True, wants=[LOGITS, SCORES])
    assert [s.want for s in inventory(asked)].count(SCORES) == len(asked.lengths)


def test_sizes_are_finer_where_contexts_are_long() -> None:
    """The fewest new tokens over all positions are about as much work as 32 over 4,096; up to there, and on Neuron, nothing is added."""
    usual = capacity(rows=4, length=4096, chunk=512)
    assert usual.context == (32, 64, 128, 256, 512) and usual.lengths == (128, 256, 512, 1024, 2048, 4096)
    c = capacity(rows=4, length=32768, chunk=512)
    assert c.context == (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    assert c.lengths == (128, 256, 512, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
    assert [capacity(rows=1, length=n, chunk=512).context[0] for n in (4097, 8192, 16384, 100_000, 2**20)] == [16, 16, 8, 2, 2]
    assert capacity(rows=4, length=32768, chunk=512, few=True).context == (128, 512)
    said = capacity(rows=4, length=32768, chunk=512, context=[128, 512], lengths=[8192])
    assert said.context == (128, 512) and said.lengths == (8192, 32768), "what is written is taken"
    prefixed = capacity(rows=4, length=32768, chunk=2048, prefix=[512], smallest_context=512)
    assert prefixed.context == (512, 1024, 2048)
    listed = set(inventory(c))
    for tokens in (1, 3, 4, 5, 70, 512):
        for reach in (tokens, 4097, 20_000, 32768):
            assert prefill_shape(c, [tokens], reach, LIKELIEST) in listed


@pytest.mark.parametrize("high", [1, 2, 3, 5, 16, 100, 6000, 8192])
@pytest.mark.parametrize("low", [1, 128, 2048])
def test_sizes_by_fours(low: int, high: int) -> None:
    made = fours(low, high, least=2)
    assert made[-1] == high and made == sorted(set(made)) and (len(made) >= 2 or high < 4)
    assert all(4 * a <= b for a, b in zip(made, made[1:], strict=False)) and all(n & (n - 1) == 0 for n in made[:-1])
    assert all(n >= low for n in made[:-2])
