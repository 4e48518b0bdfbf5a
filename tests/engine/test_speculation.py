"""Speculation changes no token: whatever is proposed, a request's ids, logprobs and end are those of its run alone without drafts."""

from __future__ import annotations

import random
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rayneuron import devices, models
from rayneuron.engine.buckets import capacity
from rayneuron.engine.engine import Engine
from rayneuron.engine.runner import Runner
from rayneuron.engine.speculation.drafting import Speculation, look_up
from rayneuron.errors import RequestError
from rayneuron.models import hub, weights
from rayneuron.types import Request, SamplingParams
from tests.engine.test_fuzz import EDGES, LENGTH, collect, drive

VOCAB, TRIES = 512, 4
ROOMS = [{"block": block, "kv_tokens": tokens} for block, tokens in ((16, 96), (16, 144), (16, None), (32, 96), (32, None))]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def build(path, rows: int, propose=None, tries: int = TRIES, chunk: int = 16, pace=None, **sizes) -> Engine:
    raw = hub.read_config(path)
    arch = models.architecture(raw)
    made = weights.load(arch, models.family(raw), hub.Checkpoint(path), dtype=torch.float32)
    cached = sizes.pop("cached", False)
    c = capacity(
        rows=rows, length=LENGTH, chunk=chunk, smallest=16, smallest_context=4, scores=8, verify=1 + tries if propose else 0, **sizes
    )
    runner = Runner(arch, devices.open("cpu", ahead=devices.Ahead(), dtype=torch.float32, threads=1), c)
    runner.load(made)
    runner.warm(lambda *_: None)
    speculation = Speculation(tries, propose, pace) if propose else None
    return Engine(runner, vocab=arch.vocab, eos_ids=(7, 11), model="tiny" if cached else None, speculation=speculation)


def run(engine: Engine, requests: list[Request]) -> dict:
    for request in requests:
        engine.add(request)
    out: dict = {}
    while engine.has_work:
        collect(out, engine.step())
    return {choice: told(deltas) for choice, deltas in out.items()}


def told(deltas: list) -> tuple:
    """All that a client is told of a choice."""
    assert [d.finish_reason is not None for d in deltas] == [False] * (len(deltas) - 1) + [True], "exactly one last delta"
    last = deltas[-1]
    scored = [entry for d in deltas for entry in d.logprobs or ()]
    assert all(d.logprobs is None or len(d.logprobs) == len(d.token_ids) for d in deltas)
    return tuple(t for d in deltas for t in d.token_ids), scored, (last.finish_reason, last.eos, last.stop_token)


@pytest.fixture(scope="module")
def solo(tiny):
    """What one choice gives alone, without drafts."""
    engine, known = build(tiny, rows=1, chunk=LENGTH), {}

    def given(request: Request, index: int = 0) -> tuple:
        key = (tuple(request.prompt_ids), msgspec.json.encode(request.params), index)
        if key not in known:
            seed = request.params.seed
            params = replace(request.params, n=1, seed=None if seed is None else seed + index)
            known[key] = run(engine, [Request(id="solo", prompt_ids=list(request.prompt_ids), params=params)])["solo", 0]
        return known[key]

    return given


class Script:
    """Knows what will come, and says it: `right` decides of how many drafts; the one behind them, and all after it, is wrong."""

    def __init__(self, solo, right) -> None:
        self._solo, self._right = solo, right

    def __call__(self, sequence, most: int) -> tuple[tuple[int, ...], int]:
        coming = self._solo(sequence.request, sequence.index)[0][sequence.generated :][:most]
        coming += (12,) * (most - len(coming))
        right = min(self._right(), most)
        return coming[:right] + tuple((t + 1) % VOCAB for t in coming[right:]), 1


PROPOSERS = {
    "ngram": lambda solo, rng: partial(look_up, 1, 3),
    "oracle": lambda solo, rng: Script(solo, lambda: TRIES),
    "liar": lambda solo, rng: Script(solo, lambda: 0),
    "half": lambda solo, rng: Script(solo, lambda: rng.randrange(TRIES + 1)),
}


def draw(rng: random.Random, i: int, solo, families) -> Request:
    """Every way to sample; prompts that repeat themselves and each other, and stops that fall inside of what is drafted."""
    prompt = (rng.choice(families)[: rng.choice(EDGES)] + [rng.randrange(12, VOCAB) for _ in range(rng.choice([0, 1, 9]))])[:64]
    most = min(rng.choice([1, 2, 5, 9, 20, 40]), LENGTH - len(prompt))
    warm = {"temperature": rng.choice([0.7, 1.2]), "seed": rng.randrange(1000), "top_p": rng.choice([1.0, 0.9])}
    params: dict = {"max_tokens": most, "temperature": 0.0} | rng.choice(
        [
            {},
            {**warm, "n": rng.choice([1, 3])},
            {**warm, "repetition_penalty": 1.3, "presence_penalty": 0.5},
            {"frequency_penalty": 0.7, "no_repeat_ngram_size": 2},
            {"bad_words_ids": ((20, 21), (30,)), "min_tokens": min(4, most), "logit_bias": {7: 40.0}},
            {"logprobs": 5, "prompt_logprobs": 1},
            {**warm, "logprobs": 2, "min_p": 0.02},
            {**warm, "banned_token_ids": (50, 51), "top_k": 5, "n": 3},
            {"ignore_eos": True},
        ]
    )
    request = Request(id=f"r{i}", prompt_ids=prompt, params=SamplingParams(**params), priority=rng.choice([0, 0, 0, -1, 2]))
    if rng.random() < 0.3 and len(coming := solo(request)[0]) > 3:
        request.params = SamplingParams(**params, stop_token_ids=(rng.choice(coming[1:]),))
    return request


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_every_choice_is_told_what_it_is_told_alone(tiny, solo, name, seed):
    """With preemption, aborts, chunks, blocks and a prefix cache."""
    rng = random.Random(seed)
    families = [[rng.randrange(12, VOCAB) for _ in range(6)] * 11 for _ in range(3)]
    rows, cached = rng.choice([2, 3, 5]), seed % 2 == 1
    engine = build(tiny, rows, PROPOSERS[name](solo, rng), **rng.choice(ROOMS), chunk=rng.choice([8, 32]), cached=cached)
    drafts = fuzz(engine, rng, solo, families)
    tried, accepted = sum(n for n, _ in drafts), sum(n for _, n in drafts)
    assert tried > 50
    if name == "liar":
        assert accepted == 0
    else:
        assert accepted > (5 if name == "ngram" else 20)


def fuzz(engine: Engine, rng: random.Random, solo, families) -> list[tuple[int, int]]:
    """Thirty requests of all kinds, some aborted; every choice is told what it is told alone. What was tried, and came true, by row."""
    requests = [draw(rng, i, solo, families) for i in range(30)]
    drafts, by_id = [], {r.id: r for r in requests}
    out, aborted = drive(engine, requests, rng, 0.04, after=lambda: drafts.extend(engine.info.drafts))
    for (rid, index), deltas in out.items():
        ids, scored, end = told(deltas)
        wanted, wanted_scored, wanted_end = solo(by_id[rid], index)
        if end[0] == "abort":
            assert rid in aborted and ids == wanted[: len(ids)] and scored == wanted_scored[: len(ids)]
        else:
            assert (ids, scored, end) == (wanted, wanted_scored, wanted_end), by_id[rid]
    assert engine.snapshot().kv_tokens_used == 0 and engine.snapshot().slots_free == engine.capacity.rows
    return drafts


@pytest.mark.parametrize(("right", "steps"), [(4, 6), (2, 9), (0, 24)])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(tiny, solo, right, steps):
    """24 tokens: the prompt's step gives one; a step of four right drafts five. The last tries no more than are left."""
    request = Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY)
    engine = build(tiny, 2, Script(solo, lambda: right))
    assert run(engine, [request])["a", 0] == solo(request)
    assert engine.steps == steps


@pytest.mark.parametrize("most", range(1, 8))
def test_no_draft_lies_beyond_the_last_token(tiny, solo, most):
    """`max_tokens`, and the end of the row, which it may be."""
    request = Request(id="a", prompt_ids=[30] * (LENGTH - most), params=replace(GREEDY, max_tokens=most))
    engine = build(tiny, 1, Script(solo, lambda: TRIES), block=16)
    assert run(engine, [request])["a", 0] == solo(request)
    assert engine.steps == (LENGTH - most + 15) // 16 + (most - 1 + TRIES) // (TRIES + 1)


def test_an_abort_at_every_step_leaves_nothing(tiny, solo):
    request = Request(id="a", prompt_ids=[20, 21, 22, 23], params=GREEDY)
    for stop in range(1, 7):
        engine, out = build(tiny, 2, Script(solo, lambda: 2), block=16), {}
        engine.add(request)
        for _ in range(stop):
            collect(out, engine.step())
        engine.abort("a")
        collect(out, engine.step())
        ids, _, end = told(out["a", 0])
        assert ids == solo(request)[0][: len(ids)] and end[0] == "abort"
        engine.check_ledger()
        assert engine.snapshot().kv_tokens_used == 0


def test_a_choice_that_fails_inside_a_run_is_told_what_it_has(tiny, solo):
    """As without drafts: both tokens that are allowed, and then the error, which says why."""
    params = SamplingParams(max_tokens=8, temperature=1, seed=1, allowed_token_ids=(50, 51), no_repeat_ngram_size=1, ignore_eos=True)
    request = Request(id="a", prompt_ids=[20], params=params)
    ids, _, end = solo(request)
    assert sorted(ids) == [50, 51] and end[0] == "error"
    assert run(build(tiny, 2, Script(solo, lambda: TRIES)), [request])["a", 0] == (ids, [], end)


def test_nobody_makes_room_for_a_draft(tiny, solo):
    """Three rows hold all there is, and what each still needs: drafts are cut to that, and nobody is preempted for them."""
    requests = [Request(id=str(i), prompt_ids=[20 + i] * 28, params=replace(GREEDY, max_tokens=4)) for i in range(3)]
    engine = build(tiny, 3, Script(solo, lambda: TRIES), kv_tokens=96, block=16)
    assert {k[0]: v for k, v in run(engine, requests).items()} == {r.id: solo(r) for r in requests}
    assert engine.scheduler.preemptions == 0


def test_a_prediction_comes_in_few_steps_and_is_counted(tiny, solo):
    """What the client sent is the answer but for one token: there the place is lost, and found again."""
    request = Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY)
    wanted, _, _ = solo(request)
    predicted = [*wanted[:10], (wanted[10] + 1) % VOCAB, *wanted[11:]]
    engine, out = build(tiny, 2, partial(look_up, 2, 4)), {}
    engine.add(Request(id="a", prompt_ids=[20, 21, 22], params=GREEDY, prediction=predicted))
    while engine.has_work:
        collect(out, engine.step())
    assert told(out["a", 0])[0] == wanted
    accepted, refused = max(d.predicted for d in out["a", 0])
    assert accepted >= 12 and refused <= 3 * TRIES and engine.steps < 14


def test_a_prediction_outside_the_vocabulary_is_refused(tiny):
    with pytest.raises(RequestError, match="token id 512 is outside the vocabulary") as refused:
        build(tiny, 1).add(Request(id="a", prompt_ids=[20], params=GREEDY, prediction=[512]))
    assert refused.value.param == "prediction"


@pytest.mark.slow
def test_what_is_drawn_with_drafts_is_distributed_as_the_model_says(tiny):
    """Chi-square of second tokens against the softmax behind the first, with drafts that are right for the likeliest."""
    prompt = [20, 21, 22, 23]
    params = SamplingParams(max_tokens=3, temperature=1.0, top_k=4, ignore_eos=True)
    plain, drafting = build(tiny, 8), build(tiny, 8, lambda sequence, most: ((plain_likely[sequence.ids[-1]],) * most, 1))
    plain_likely: dict[int, int] = {}
    probabilities: dict[int, dict[int, float]] = {}
    for token in range(VOCAB):
        one = Request(id="p", prompt_ids=[*prompt, token], params=SamplingParams(max_tokens=1, temperature=0, logprobs=4, ignore_eos=True))
        plain.add(one)
        (delta,) = [d for _ in range(3) if plain.has_work for d in plain.step()]
        top = dict(delta.logprobs[0].top)
        total = sum(np.exp(v) for v in top.values())
        probabilities[token] = {t: float(np.exp(v) / total) for t, v in top.items()}
        plain_likely[token] = delta.token_ids[0]
    counts: dict[int, dict[int, int]] = {}
    for batch in range(150):
        requests = [Request(id=str(i), prompt_ids=prompt, params=replace(params, n=8, seed=1000 * (8 * batch + i))) for i in range(16)]
        for ids, _, _ in run(drafting, requests).values():
            line = counts.setdefault(ids[0], {})
            line[ids[1]] = line.get(ids[1], 0) + 1
    off, free = 0.0, 0
    for first, line in counts.items():
        n = sum(line.values())
        for token, p in probabilities[first].items():
            off += (line.get(token, 0) - n * p) ** 2 / (n * p)
        assert set(line) <= set(probabilities[first])
        free += len(probabilities[first]) - 1
    assert sum(map(sum, (line.values() for line in counts.values()))) == 150 * 16 * 8
    assert off < free + 4 * (2 * free) ** 0.5, (off, free)
