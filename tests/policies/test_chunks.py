"""How many tokens of a prompt fit into the time others wait: worked examples, and every case against a search by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.policies.chunks import SURE, fit, limited
from rayneuron.types import Profile

LENGTHS, CONTEXT = (128, 256, 512, 1024, 2048, 4096), (32, 64, 128, 256, 512)


def cost(tokens: int, length: int) -> float:
    """6 ms for the weights, 0.2 a token, and as much again at 4,096 positions."""
    return 6 + tokens * (0.2 + 0.2 * length / 4096)


def profile(chunk_ms: float, **changed) -> Profile:
    prefill = tuple((1, t, n, cost(t, n)) for t in (32, 128, 512) for n in (512, 4096))
    said = {"batch": (1, 16), "lengths": LENGTHS, "context": CONTEXT, "prefix": (), "chunk": 512, "decode": ((1, 128, 6.0),)}
    return Profile(**{**said, "prefill": prefill, "tokens": (), "chunk_ms": chunk_ms, **changed})


@pytest.mark.parametrize(
    ("chunk_ms", "done", "most"),
    [
        (25.0, 0, 64),  # 6 + 64 x 0.225 = 20.4; 128 would take 34.8
        (24.0, 0, 64),
        (23.9, 0, 32),  # it fits, but may take longer than is known
        (41.0, 0, 128),
        (41.0, 384, 128),  # 512 positions cost as 512
        (41.0, 400, 64),  # 528 positions are in the bucket of 1,024: 128 would take 38.0
        (41.0, 4000, 64),  # 6 + 64 x 0.4 = 31.6; 128 would take 57.2
        (1.0, 0, 32),  # nothing fits: the smallest there is
        (1.0, 4090, 32),
        (1e9, 0, 512),
    ],
)
def test_what_fits(chunk_ms, done, most):
    assert fit(profile(chunk_ms)).most(done) == most


def test_any_time_is_no_limit():
    assert fit(profile(0.0)) is None


@given(st.floats(0.1, 400.0), st.integers(0, 4096))
def test_the_largest_size_that_fits_and_no_smaller_one(chunk_ms, done):
    most = fit(profile(chunk_ms)).most(done)
    attended = {t: max(512, next((n for n in LENGTHS if n >= done + t), 4096)) for t in CONTEXT}  # nothing below 512 was measured
    assert most == max((t for t in CONTEXT if cost(t, attended[t]) <= SURE * chunk_ms + 1e-9), default=32)


def test_a_prefill_step_lasts_as_long_as_four_decode_steps_of_some_rows() -> None:
    known = profile(0.0, batch=(1, 4, 16), decode=((1, 128, 3.0), (16, 128, 9.0)))
    assert limited(known, None).chunk_ms == pytest.approx(4 * (3.0 + 6.0 * 3 / 15))  # of the middle of the sizes
    assert limited(known, 7.5).chunk_ms == 7.5 and limited(known, 0.0).chunk_ms == 0.0
