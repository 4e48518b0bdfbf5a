"""Beam search: transformers' answers on random checkpoints, every path of a tiny vocabulary, and a ledger at its base line."""

from __future__ import annotations

import itertools
import random

import pytest

from rayneuron.constraints import Beams
from rayneuron.engine.engine import Engine
from rayneuron.errors import RequestError
from rayneuron.types import Request, SamplingParams
from tests.engine.test_fuzz import build

EOS = (7, 11)  # of the engines that `build` makes
PROMPTS = ([5, 9, 2, 40, 3], [1] * 3, [17, 300, 8, 12, 44, 90, 1, 2, 3, 4, 5, 6, 100, 99, 98, 97, 20])


def search(prompt: list[int], name: str = "b", *, n: int = 1, tokens: int = 12, **said) -> Request:
    return Request(id=name, prompt_ids=prompt, params=SamplingParams(n=n, max_tokens=tokens, beams=Beams(**said)))


def run(engine: Engine, *requests: Request) -> dict[str, list[list[int]]]:
    """The choices of each; nothing comes before a search has ended."""
    for request in requests:
        engine.add(request)
    found: dict[str, list[list[int]]] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None and delta.finish_reason in ("stop", "length")
            found.setdefault(delta.request_id, []).append(delta.token_ids)
        engine.check_ledger()
    assert at_rest(engine)
    return found


def at_rest(engine: Engine) -> bool:
    blocks = engine.scheduler.blocks
    blocks.reset()
    return blocks.used == 0 and blocks.free_rows == engine.capacity.rows and not engine.scheduler.forks.pending


def scores(engine: Engine, prompt: list[int], ids: list[int]) -> float:
    """The sum of an output's log-probabilities among the allowed tokens, by an engine that searches nothing."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.add(Request(id="p", prompt_ids=[*prompt, *ids], params=params))
    told: list = []
    while engine.has_work:
        for delta in engine.step():
            told = delta.prompt_logprobs or told
    return sum(entry.logprob for entry in told[len(prompt) :])


@pytest.mark.parametrize("rule", ["vllm", "transformers"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_every_path_of_a_tiny_vocabulary(tiny, rule, penalty):
    """So wide that nothing is lost: the answers are the best of all there are."""
    words, prompt, tokens = (3, 7, 20), [5, 9, 2, 40, 3], 3  # 7 ends
    engine = build(tiny, rows=9, block=16)
    outputs = [
        ids
        for count in range(1, tokens + 1)
        for ids in map(list, itertools.product(words, repeat=count))
        if 7 not in ids[:-1] and (ids[-1] == 7 or count == tokens)
    ]
    length = lambda ids: len(ids) if rule == "transformers" else len(prompt) + len(ids) - (ids[-1] == 7)  # noqa: E731
    best = sorted(outputs, key=lambda ids: -scores(engine, prompt, ids) / length(ids) ** penalty)
    beams = Beams(width=9, length_penalty=penalty, early_stopping="never", rule=rule)
    params = SamplingParams(n=5, max_tokens=tokens, allowed_token_ids=words, logprobs=2, beams=beams)
    assert run(engine, Request(id="b", prompt_ids=prompt, params=params))["b"] == best[:5]


@pytest.mark.parametrize(("ahead", "cached"), [(False, False), (True, True), (True, False)])
def test_beside_others_preempted_and_aborted_they_find_the_same(tiny, ahead, cached):
    """Rows and blocks are at the base line after each storm, and what was not aborted is what it is alone."""
    draw = random.Random(7)
    alone = build(tiny, rows=4, block=16)
    engine = build(tiny, rows=6, block=16, kv_tokens=192, ahead=ahead, cached=cached)
    preempted = 0
    for _ in range(3):
        requests = []
        for i in range(8):
            prompt = PROMPTS[draw.randrange(3)][: draw.randint(1, 17)]
            beams = Beams(width=draw.randint(1, 4), early_stopping=draw.choice([True, False])) if i % 2 else None
            tokens = draw.randint(1, 40)
            n = draw.randint(1, beams.width) if beams is not None else 1
            params = SamplingParams(n=n, max_tokens=tokens, temperature=0.0, logprobs=1 if i % 3 else None, beams=beams)
            requests.append(Request(id=str(i), prompt_ids=prompt, params=params, priority=draw.randint(0, 1)))
        doomed, found = {str(draw.randrange(8))}, {}
        for request in requests:
            engine.add(request)
        steps = draw.randint(0, 20)
        while engine.has_work:
            if not steps:
                for name in doomed:
                    engine.abort(name)
            steps -= 1
            for delta in engine.step():
                assert delta.error is None
                found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            engine.check_ledger()
        assert at_rest(engine)
        preempted += engine.scheduler.preemptions
        for request in requests:
            if request.id not in doomed:
                for choice, ids in enumerate(run(alone, request)[request.id] if request.params.beams else ()):
                    assert found[request.id, choice] == ids
    assert preempted


def test_no_more_than_fits(tiny):
    engine = build(tiny, rows=4, block=16, kv_tokens=144)
    for request, name in ((search(PROMPTS[0], width=5), "beams"), (search(PROMPTS[0], width=4, tokens=70), "max_tokens")):
        with pytest.raises(RequestError) as wrong:
            engine.validate(request)
        assert wrong.value.param == name
    assert len(run(engine, search(PROMPTS[0], width=4, n=4))["b"]) == 4


def test_no_other_pool_is_asked_for_the_prompt_of_a_search(tiny):
    class Elsewhere:
        asked: list = []

        def take(self):
            return ()

        def ask(self, prefill):
            self.asked.append(prefill)
            return False

        def kept(self, why):
            pass

    engine = build(tiny, rows=4, block=16)
    engine.scheduler.prefills = Elsewhere()
    run(engine, search(PROMPTS[2], width=3))
    assert not Elsewhere.asked
    run(engine, Request(id="plain", prompt_ids=PROMPTS[2], params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
    assert Elsewhere.asked
