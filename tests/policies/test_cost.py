"""Predicted milliseconds: the graphs they are read off are those the engine chooses, and a step run one by one takes as long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rayneuron.devices.base import LIKELIEST
from rayneuron.engine.buckets import capacity, decode_shape, prefill_shape
from rayneuron.policies.chunks import fit
from rayneuron.policies.cost import Costs, expected
from tests.policies.profiles import engine, profile


@given(st.data())
def test_every_size_is_the_one_the_engine_chooses(data) -> None:
    length = data.draw(st.integers(64, 4096))
    prefix = data.draw(st.sampled_from([(), (128, 512), (512, 1024, 2048)]))
    chunk = data.draw(st.integers(16, 700))
    c = capacity(rows=data.draw(st.integers(1, 24)), length=length, chunk=chunk, block=32, prefix=[p for p in prefix if p <= length])
    p = profile(c)
    costs = Costs(p)
    count = data.draw(st.integers(1, c.chunk))
    done = data.draw(st.integers(0, length - count))
    shape = prefill_shape(c, [count], done + count, LIKELIEST)
    assert costs.prefill_size(count, done) == (shape.tokens, shape.length)
    rows, longest = data.draw(st.integers(1, c.rows)), data.draw(st.integers(1, length))
    shape = decode_shape(c, rows, longest, LIKELIEST)
    assert costs.decode_ms(rows, longest) == next(ms for b, n, ms in p.decode if (b, n) == (shape.rows, shape.length))


def test_without_padding_a_step_takes_what_its_true_tokens_do() -> None:
    c = engine()
    padded, costs = Costs(profile(c)), Costs(replace(profile(c), padded=False))
    assert costs.step_ms(88, 300) == pytest.approx(4 + 8.8 + 2 * 388 / 1024)
    assert padded.step_ms(88, 300) == pytest.approx(4 + 12.8 + 1)
    assert costs.decode_ms(3, 100) == pytest.approx(5 + 1.5 + 3 * 128 / 1024)
    assert padded.decode_ms(3, 100) == padded.decode_ms(4, 100) > costs.decode_ms(3, 100)


def test_a_prompt_takes_the_time_of_its_chunks() -> None:
    c = engine()
    costs = Costs(profile(c))
    assert costs.prefill_ms(600, 0) == pytest.approx((4 + 25.6 + 0.5) + (4 + 25.6 + 1) + (4 + 12.8 + 2))
    assert costs.prefill_ms(88, 512) == pytest.approx(4 + 12.8 + 2)  # the same third chunk, its bucket of 128
    assert costs.prefill_ms(600, 0, 3, 100) == pytest.approx(costs.prefill_ms(600, 0) + 2 * costs.decode_ms(3, 100))


def test_chunks_are_cut_as_the_scheduler_cuts_them() -> None:
    p = profile(engine(), chunk_ms=15.0)
    chunks = fit(p)
    assert chunks is not None and chunks.most(0) == 64
    assert Costs(p).prefill(200, 0, True)[1] == 4 and Costs(p).prefill(200, 0, False)[1] == 1


PROMPTS = st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900), st.booleans()), min_size=1, max_size=8)


@given(PROMPTS, st.sampled_from([0.0, 12.0, 30.0]))
def test_what_is_remembered_of_prompts_is_what_their_steps_take_one_by_one(asked: list[tuple[int, int, bool]], chunk_ms: float) -> None:
    p = profile(engine(length=2048), chunk_ms=chunk_ms)
    costs, chunks = Costs(p), fit(p)
    for new, cached, decoding in asked:
        done, ms, steps = cached, 0.0, 0
        while done < cached + new:
            count = min(cached + new - done, chunks.most(done) if decoding and chunks is not None else p.chunk)
            ms, done, steps = ms + costs._grid.at(*costs.prefill_size(count, done)), done + count, steps + 1
        assert costs.prefill(new, cached, decoding) == (pytest.approx(ms), steps)


@given(st.integers(0, 7), st.integers(1, 900), st.integers(1, 800), st.integers(1, 200))
def test_what_a_sequence_adds_is_what_its_steps_add(rows: int, longest: int, prompt: int, output: int) -> None:
    costs = Costs(profile(engine(length=1024)))
    output = min(output, 1024 - prompt)
    each = [
        (rows + 1) * costs.decode_ms(rows + 1, max(longest, prompt + i)) - rows * costs.decode_ms(rows, longest) if rows else
        costs.decode_ms(1, max(longest, prompt + i)) for i in range(1, output + 1)
    ]  # fmt: skip
    assert costs.added_ms(rows, longest, prompt, output) == pytest.approx(sum(each))


def test_crossing_a_bucket_has_its_price() -> None:
    costs = Costs(profile(engine(rows=8)))
    fourth, fifth = costs.added_ms(3, 100, 50, 10), costs.added_ms(4, 100, 50, 10)
    assert fifth - fourth > 4 * 10 * 0.5 * 4  # five rows run in the graph of eight, and all five wait for it
    assert costs.added_ms(3, 100, 500, 10) > 1.2 * fourth  # one long row among short ones


def test_what_is_before_a_prompt_alternates_with_decode_steps() -> None:
    costs = Costs(profile(engine()))
    alone = costs.backlog_ms([(300, 0), (100, 64)], 0, 0)
    assert alone == pytest.approx(costs.prefill_ms(300, 0) + costs.prefill_ms(100, 64))
    assert costs.backlog_ms([(300, 0), (100, 64)], 2, 90) == pytest.approx(alone + 3 * costs.decode_ms(2, 90))


def test_outputs_are_expected_as_they_were_of_late() -> None:
    assert expected(0.0, None) == 128 and expected(0.0, 10) == 10 and expected(40.0, 100) == 40 and expected(40.0, 8) == 8
