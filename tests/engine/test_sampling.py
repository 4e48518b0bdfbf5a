"""The sampler against transformers' warpers (distribution, by chi-square) and against arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rayneuron.engine.sampling import greedy, sample, uniforms

VOCAB = 50
LOGITS = torch.from_numpy(np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32))

CASES = [
    dict(temperature=1.0),
    dict(temperature=0.5),
    dict(temperature=1.7),
    dict(temperature=1.0, top_k=5),
    dict(temperature=0.7, top_k=1),
    dict(temperature=1.0, top_p=0.6),
    dict(temperature=1.3, top_p=0.95),
    dict(temperature=1.0, min_p=0.1),
    dict(temperature=0.8, top_k=12, top_p=0.7),
    dict(temperature=1.2, top_k=20, top_p=0.9, min_p=0.05),
]


def reference(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None].clone())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.softmax(-1)[0]


def draw(rows: int, uniform: np.ndarray, candidates=256, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    full = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype)  # noqa: E731
    return sample(
        LOGITS.expand(rows, VOCAB),
        full(temperature),
        full(top_k, torch.int32),
        full(top_p),
        full(min_p),
        torch.from_numpy(uniform),
        candidates,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_transformers(case):
    n = 20_000
    expected = reference(**case).double().numpy()
    ids, complete = draw(n, uniforms(range(n), [7] * n), **case)
    assert complete.all()
    counts = np.bincount(ids.numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    likely = expected * n >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely] * n, expected[~likely].sum() * n)
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(observed) > 1:
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_uniform_numbers_are_uniform_over_seeds_and_positions():
    for seeds, counters in ((range(50_000), [3] * 50_000), ([11] * 50_000, range(50_000)), ([-1, 2**63 - 1] * 25_000, range(50_000))):
        u = uniforms(list(seeds), list(counters))
        assert 0 <= u.min() and u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-4


def test_neighbouring_seeds_and_positions_are_independent():
    u = uniforms(list(range(20_000)), [5] * 20_000)
    v = uniforms(list(range(20_000)), [6] * 20_000)
    w = uniforms(list(range(1, 20_001)), [5] * 20_000)
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.03 and abs(np.corrcoef(u, w)[0, 1]) < 0.03


def test_a_row_draws_the_same_whatever_its_neighbours_ask():
    alone, _ = draw(1, np.float32([0.37]), top_p=0.8)
    logits = torch.stack([LOGITS.flip(0), LOGITS, LOGITS * 3])
    ids, _ = sample(
        logits,
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([0, 0, 3], dtype=torch.int32),
        torch.tensor([1.0, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.2]),
        torch.tensor([0.9, 0.37, 0.1]),
    )
    assert ids[1] == alone[0]
    assert ids[0] == LOGITS.flip(0).argmax()


def test_a_nucleus_beyond_the_candidates_is_reported():
    ids, complete = draw(1, np.float32([0.5]), candidates=4, top_p=0.99)
    assert not complete[0]
    for case in (dict(top_k=3), dict(top_p=0.1), dict(min_p=0.9), dict()):
        assert draw(1, np.float32([0.5]), candidates=4, **case)[1][0], case
    assert not draw(1, np.float32([0.5]), candidates=4, top_k=5)[1][0]


def test_the_ends_of_the_unit_interval_stay_inside_the_kept_set():
    last = float(np.float32(1 - 2**-24))
    for u in (0.0, last):
        for case in CASES:
            ids, _ = draw(1, np.float32([u]), **case)
            assert reference(**case)[ids[0]] > 0


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((1, 10), float("-inf"))
    logits[0, 4] = 1.0
    one = torch.ones(1)
    for u in (0.0, 0.5, 1 - 2**-24):
        ids, _ = sample(logits, one, torch.zeros(1, dtype=torch.int32), one, one * 0, torch.tensor([u]))
        assert ids[0] == 4
    assert greedy(torch.tensor([[1.0, 3.0, 3.0]]))[0] == 1
