"""Host-side processors against transformers' and against arithmetic."""

from __future__ import annotations

import random
import sys

import pytest
import torch
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from rayneuron.engine.logits import edit, listed, logprobs
from rayneuron.engine.sequence import Sequence
from rayneuron.errors import RequestError
from rayneuron.types import Request, SamplingParams

ROW = torch.randn(40, generator=torch.Generator().manual_seed(1))


def make(ids, prompt_len, stop_ids=(), **params) -> Sequence:
    request = Request(id="a", prompt_ids=ids[:prompt_len], params=SamplingParams(max_tokens=99, **params))
    return Sequence(request, 0, list(ids), 0, 99, 0, prompt_len=prompt_len, stop_ids=frozenset(stop_ids))


def test_repetition_penalty_is_transformers():
    ids = [3, 5, 3, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), ROW[None].clone())[0]
    assert torch.equal(edit(ROW, make(ids, 2, repetition_penalty=1.7)), expected)


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e39, 1.7e308])
def test_no_penalty_makes_what_is_no_number(penalty):
    row = torch.tensor([3.0, -2.0, 0.0, 1e30, -1e30])
    edited = edit(row, make([0, 1, 2, 3, 4], 5, repetition_penalty=penalty))
    assert torch.isfinite(edited).all() and (edited[2] == 0.0) and (edited.softmax(-1).sum() == 1.0)
    assert (edited[0] > 3.0) == (penalty < 1.0) and (edited[1] > -2.0) == (penalty < 1.0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_repeat_ngram_is_transformers(size):
    ids = [1, 2, 3, 1, 2, 4, 1, 2]
    expected = NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), ROW[None].clone())[0]
    assert torch.equal(edit(ROW, make(ids, 3, no_repeat_ngram_size=size)), expected)
    short = [7]
    expected = NoRepeatNGramLogitsProcessor(size)(torch.tensor([short]), ROW[None].clone())[0]
    assert torch.equal(edit(ROW, make(short, 1, no_repeat_ngram_size=size)), expected)


def test_bad_words_are_transformers():
    phrases = [[8], [4, 2], [1, 4, 6]]
    for ids in ([1, 4], [2, 1], [4], [9, 1, 4]):
        expected = NoBadWordsLogitsProcessor(phrases, eos_token_id=39)(torch.tensor([ids]), ROW[None].clone())[0]
        assert torch.equal(edit(ROW, make(ids, 1, bad_words_ids=tuple(map(tuple, phrases)))), expected), ids


@pytest.mark.parametrize("seed", range(4))
def test_a_growing_text_is_edited_as_from_scratch(seed):
    """Edits remember what they have counted; every step must equal what transformers, or a fresh count, makes of the whole text."""
    draw = random.Random(seed)
    size, phrases = draw.choice([2, 3, 4]), [[1, 2], [3], [2, 2, 1]]
    params = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25, "no_repeat_ngram_size": size}
    growing = make([draw.randrange(8) for _ in range(6)], 6, bad_words_ids=tuple(map(tuple, phrases)), **params)
    for _ in range(40):
        row = edit(ROW, growing)
        ids = torch.tensor([growing.ids])
        expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, ROW[None].clone())[0]
        for token in set(growing.ids[6:]):
            expected[token] -= 0.5 - 0.25 * growing.ids[6:].count(token)
        expected = NoRepeatNGramLogitsProcessor(size)(ids, expected[None])
        expected = NoBadWordsLogitsProcessor(phrases, eos_token_id=39)(ids, expected)[0]
        assert torch.allclose(row, expected, atol=1e-6), growing.ids
        growing.ids.append(draw.randrange(8))


def test_the_cost_of_a_step_does_not_grow_with_what_was_asked(monkeypatch):
    """The largest lists there are: laid out once, then no step makes an array of them or looks at each."""
    vocab = 50_000
    row = torch.zeros(vocab)
    everything = tuple(range(vocab))
    phrases = tuple((1, i // 200 + 2, i % 200 + 5) for i in range(2, 2002)) + tuple((i,) for i in range(100, 1100))
    sequence = make(
        [1] * 20, 3, stop_ids=everything[5:], allowed_token_ids=everything, banned_token_ids=everything[9:], min_tokens=90,
        logit_bias=dict.fromkeys(everything, 1.0), bad_words_ids=phrases, no_repeat_ngram_size=64, repetition_penalty=1.1,
    )  # fmt: skip
    edit(row, sequence)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call", "line")

    sequence.ids.append(2)
    sys.setprofile(count)
    edited = edit(row, sequence)
    sys.setprofile(None)
    assert calls < 400
    assert set(torch.isfinite(edited).nonzero()[:, 0].tolist()) == {0, 1, 2, 3, 4}


def test_no_token_left_is_an_error_not_a_token():
    with pytest.raises(RequestError, match="no token is left"):
        edit(ROW, make([5], 1, allowed_token_ids=(5,), no_repeat_ngram_size=1))
    with pytest.raises(RequestError, match="no token is left"):
        edit(ROW, make([5], 1, banned_token_ids=tuple(range(40))))


def test_presence_and_frequency_count_output_only():
    row = edit(ROW, make([3, 3, 5, 7, 7], 2, presence_penalty=0.5, frequency_penalty=0.25))
    assert row[3] == ROW[3]
    assert torch.isclose(row[5], ROW[5] - 0.75) and torch.isclose(row[7], ROW[7] - 1.0)


def test_bias_allowed_banned_and_minimum_length():
    row = edit(ROW, make([1], 1, logit_bias={4: 2.5, 6: -100.0}))
    assert torch.isclose(row[4], ROW[4] + 2.5) and torch.isclose(row[6], ROW[6] - 100)
    row = edit(ROW, make([1], 1, allowed_token_ids=(2, 9)))
    assert set(torch.isfinite(row).nonzero()[:, 0].tolist()) == {2, 9}
    assert edit(ROW, make([1], 1, banned_token_ids=(7,)))[7] == float("-inf")
    early, late = make([1, 2], 1, stop_ids=(30,), min_tokens=2), make([1, 2, 3], 1, stop_ids=(30,), min_tokens=2)
    assert edit(ROW, early)[30] == float("-inf") and edit(ROW, late)[30] == ROW[30]


def test_edit_leaves_the_row_as_it_was():
    before = ROW.clone()
    edit(ROW, make([1, 2], 1, repetition_penalty=2.0, logit_bias={1: 5.0}, banned_token_ids=(3,)))
    assert torch.equal(ROW, before)


def test_logprobs_and_ranks():
    logp = ROW.double().log_softmax(-1)
    order = ROW.argsort(descending=True).tolist()
    (entry,) = logprobs([ROW], [order[4]], 3)
    assert entry.rank == 5 and abs(entry.logprob - logp[order[4]].item()) < 1e-5
    assert [t for t, _ in entry.top] == order[:3]
    assert logprobs([ROW], [order[0]], 0)[0].top == ()
    told = listed(ROW, entry, (7, 3))
    assert (told.token_id, told.logprob, told.rank) == (order[4], entry.logprob, 5)
    assert [t for t, _ in told.top] == [7, 3] and all(abs(p - logp[t].item()) < 1e-5 for t, p in told.top)
    both = logprobs([ROW, ROW.flip(0)], [5, 6], 2)
    assert [e.token_id for e in both] == [5, 6]
    assert abs(both[1].logprob - ROW.flip(0).double().log_softmax(-1)[6].item()) < 1e-5
