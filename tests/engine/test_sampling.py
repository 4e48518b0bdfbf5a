"""The sampler against transformers' warpers (distribution, by chi-square) and against arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from rayneuron.devices.cpu import draws, library
from rayneuron.engine.logits import describe
from rayneuron.engine.sampling import left, sample, uniforms
from rayneuron.models.choice import likeliest
from tests.devices.cpu.built import here

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


def native(logits: torch.Tensor, *how: torch.Tensor, march: str = "native") -> torch.Tensor:
    """The kernels' draw."""
    found = here(library.library(march))
    return draws.draw(found, None, logits, *how)


def parameters(rows: int, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[torch.Tensor]:
    whole = torch.full((rows,), top_k, dtype=torch.int32)
    return [torch.full((rows,), temperature), whole, torch.full((rows,), top_p), torch.full((rows,), min_p), torch.as_tensor(uniform)]


@pytest.mark.parametrize("how", ["torch", "native", "x86-64-v3"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_transformers(case, how):
    n = 10_000
    expected = reference(**case).double().numpy()
    if how == "torch":
        ids, complete = draw(n, uniforms(range(n), [7] * n), **case)
        assert complete.all()
    else:
        ids = native(LOGITS.expand(n, VOCAB), *parameters(n, uniforms(range(n), [7] * n), **case), march=how)
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
    assert likeliest(torch.tensor([[1.0, 3.0, 3.0]]))[0] == 1


BIG = [
    *CASES,
    dict(temperature=0.0),
    dict(temperature=4.0, top_p=0.99),
    dict(top_p=0.9999),
    dict(temperature=3.0, min_p=1e-4),
    dict(top_k=3000),
    dict(temperature=6.0, top_p=0.5, min_p=1e-3),
    dict(top_p=0.0),
    dict(top_k=9000, top_p=0.7),
    dict(temperature=100.0, top_p=0.9),
]


@pytest.mark.parametrize("march", ["native", "x86-64-v3"])
@pytest.mark.parametrize("case", BIG, ids=str)
@pytest.mark.parametrize("vocab", [1, 17, 300, 8191])
def test_the_kernels_draw_what_torch_draws(case, march, vocab):
    """From the same numbers the same tokens, whatever the size of the nucleus; a row alone as among others. Ties go to the lower id."""
    n = 200
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(0, 3, (n, vocab)).astype(np.float32))
    logits[:, vocab // 2 :: 7] = float("-inf")
    logits[:, 0] = 1.0
    how = parameters(n, uniforms(range(n), [5] * n), **{"temperature": 1.0, **case})
    ids = native(logits, *how, march=march)
    want, _ = sample(logits, *how, candidates=vocab)
    assert (ids == want).float().mean() >= 0.99  # a draw may fall on the border of two tokens
    alone = torch.cat([native(logits[i : i + 1], *(h[i : i + 1] for h in how), march=march) for i in range(0, n, 17)])
    assert torch.equal(alone, ids[::17])
    assert logits[torch.arange(n), ids.long()].isfinite().all()


@pytest.mark.parametrize("march", ["native", "x86-64-v3"])
@pytest.mark.parametrize("vocab", [1, 33, 500, 4099])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.97, 1.0])
def test_the_kernels_take_the_first_largest_that_a_mask_allows(march: str, vocab: int, share: float):
    rng = np.random.default_rng(vocab)
    found = library.library(march)
    assert found is not None
    rows, masks, wanted = [], [], []
    for turn in range(20):
        row = torch.tensor(rng.normal(size=vocab).round(1), dtype=torch.float32)  # equals are many
        row[rng.random(vocab) < 0.2 * (turn % 3)] = float("-inf")
        allowed = rng.random(vocab) < share
        allowed[rng.integers(vocab)] = True
        mask = np.zeros((vocab + 31) // 32 * 4, np.uint8)
        bits = np.packbits(allowed, bitorder="little")
        mask[: len(bits)] = bits
        want = torch.where(torch.from_numpy(allowed), row, float("-inf"))
        rows, masks = [*rows, row], [*masks, mask.view(np.uint32)]
        wanted.append(-1 if want.max() == float("-inf") else int(want.argmax()))
    greedy = (0.0, 0, 1.0, 0.0, 0.0)
    assert [draws.draw_rows(found, [row], [greedy], [mask])[0] for row, mask in zip(rows, masks, strict=True)] == wanted
    assert draws.draw_rows(found, rows, [greedy] * 20, masks) == wanted
    assert draws.draw_rows(found, rows, [greedy] * 20, [None] * 20) == [int(row.argmax()) for row in rows]


def test_the_kernels_reach_both_ends_of_what_is_kept():
    """As uniform runs over [0, 1) the drawn tokens are exactly those torch keeps, likeliest first."""
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 1, 5000).astype(np.float32))
    n = 20_000
    uniform = (np.arange(n) / n).astype(np.float32)
    for case in (dict(top_p=0.6), dict(temperature=2.0, top_p=0.9), dict(min_p=0.02), dict(top_p=0.8, min_p=0.05)):
        ids = native(logits.expand(n, -1), *parameters(n, uniform, **case))
        scores = logits[ids.long()]
        assert (scores.diff() <= 0).all(), "descending"
        kept = TemperatureLogitsWarper(case.get("temperature", 1.0))(None, logits[None].clone())
        if "top_p" in case:
            kept = TopPLogitsWarper(case["top_p"])(None, kept)
        if "min_p" in case:
            kept = MinPLogitsWarper(case["min_p"])(None, kept)
        allowed = set(kept[0].isfinite().nonzero()[:, 0].tolist())
        assert set(ids.tolist()) - allowed == set()
        assert len(set(ids.tolist())) > 0.9 * len(allowed)


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.99), st.sampled_from([{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 20}]))
@settings(max_examples=60, deadline=None)
def test_typical_ids_are_transformers(seed, mass, others):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, 80).astype(np.float32))
    scores = TemperatureLogitsWarper(0.7)(None, logits[None].double())
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        scores = warper(others[name])(None, scores) if name in others else scores
    wanted = TypicalLogitsWarper(mass)(None, scores)[0]
    row = left(logits, (0.7, others.get("top_k", 0), others.get("top_p", 1.0), others.get("min_p", 0.0), 0.0), mass)
    assert torch.allclose(row.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("march", ["native", "x86-64-v3"])
@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (50, 5), (50, 50), (5000, 0), (5000, 7), (5000, 400)])
def test_the_kernels_describe_what_torch_describes(march, vocab, count):
    found = here(library.library(march))
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 3, (9, vocab)).astype(np.float32))
    logits[:, -3:] = logits[:, :1]  # equals
    tokens = torch.arange(9) * 5 % vocab
    own, rank, ids, values = draws.describe(found, logits.unbind(), tokens.tolist(), count)
    want_own, want_rank, _, want_values = describe(logits, tokens, count)
    assert torch.allclose(own, want_own, atol=1e-5) and torch.equal(rank.long(), want_rank)
    assert torch.allclose(values, want_values, atol=1e-5)
    assert torch.allclose(logits.double().log_softmax(-1).gather(1, ids.long()), values, atol=1e-5)
    assert all(len(set(row)) == count for row in ids.tolist())
