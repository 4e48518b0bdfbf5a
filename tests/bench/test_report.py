"""Percentiles, rates and tables against numpy and hand arithmetic."""

from __future__ import annotations

import json
import math

import numpy
import pytest
import report
from hypothesis import given
from hypothesis import strategies as st
from rates import decode_rate, prefill_rate


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert report.percentile(values, share) == pytest.approx(float(numpy.percentile(values, share * 100)), rel=1e-9, abs=1e-6)


def test_percentile_of_nothing_is_nan() -> None:
    assert math.isnan(report.percentile([], 0.5))


def test_ratio_is_taken_within_rounds() -> None:
    # A round in which the machine was half as fast changes both sides; the ratio stays 2.
    assert report.median_ratio([20, 10, 20, 22], [10, 5, 10, 10]) == 2.0


def test_bar_both_ways() -> None:
    assert report.bar("x", 0.79, 0.8) == ("x", 0.79, ">= 0.8", "MISSED")
    assert report.bar("x", 0.80, 0.8)[3] == "met"
    assert report.bar("x", 0.80, 0.8, at_least=False)[2:] == ("<= 0.8", "met")
    assert report.bar("x", float("nan"), 0.8, at_least=False)[3] == "MISSED"


def test_table() -> None:
    assert report.table(["a", "figure"], [["one", 1234.5], ["two", 0.126]]) == "\n".join(
        ["| a   | figure |", "|-----|--------|", "| one | 1,234  |", "| two | 0.13   |"]
    )


def test_save(tmp_path) -> None:
    path = report.save("engine", {"rates": {"decode 1": [1.5]}}, tmp_path / "deep" / "x.json")
    document = json.loads(path.read_text())
    assert document["rates"] == {"decode 1": [1.5]} and document["written"].endswith("Z")


def test_decode_rate_of_lock_step() -> None:
    # Two rows: first tokens at 1.0 s, then 3 more each, one step every 0.25 s: 6 tokens in 0.75 s.
    steps = [(1.0, [1, 1]), (1.25, [2, 2]), (1.5, [3, 3]), (1.75, [4, 4])]
    assert decode_rate(steps) == 8.0


def test_decode_rate_counts_the_full_batch_only() -> None:
    # Row 0 decodes alone until row 1 has its first token at 2.0 s, and row 1 decodes alone after row 0 has all 4 at 2.5 s.
    steps = [(1.0, [1, 0]), (1.5, [2, 0]), (2.0, [2, 1]), (2.25, [3, 2]), (2.5, [4, 3]), (3.5, [4, 4])]
    assert decode_rate(steps) == pytest.approx(4 / 0.5)


def test_decode_rate_of_a_batch_that_never_was_full() -> None:
    with pytest.raises(ValueError, match="more new tokens"):
        decode_rate([(1.0, [1, 0]), (2.0, [2, 0]), (3.0, [2, 2])])


def test_prefill_rate() -> None:
    assert prefill_rate(512, [(0.25, [1])]) == 2048.0
