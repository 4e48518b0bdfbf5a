"""A request that comes with what another engine has generated of it goes on as if it had never moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayneuron import LLM, SamplingParams, StructuredOutputs
from rayneuron.errors import RequestError
from rayneuron.types import Request, TokenDelta
from tests.engine.test_fuzz import build, collect, drain
from tests.engine.test_prefix_cache import words

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "seeded": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 2**63 - 1},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "ngrams": {"temperature": 0.0, "no_repeat_ngram_size": 2},
    "min_tokens": {"temperature": 0.0, "min_tokens": 20, "ignore_eos": False, "logit_bias": {7: 60.0, 11: 60.0}},
    "constrained": {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="[a-f]{20,70}( [x-z]{3,9}){9}")},
    "scores": {"temperature": 1.0, "logprobs": 2},
}
WAYS = [{"dtype": "fp32"}, {"dtype": "bf16"}, {"dtype": "bf16", "quantization": "int8"}, {"dtype": "fp32", "compile": {"async_mode": True}}]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def engines(request: pytest.FixtureRequest, tiny: Path) -> Iterator[tuple[LLM, LLM]]:
    """The engine that a request begins in, and the one it goes on in."""
    words = {**request.param, "max_model_len": 256, "max_num_seqs": 4, "threads": 1, "prefill_chunk_tokens": 32}
    with LLM(tiny, **words) as one, LLM(tiny, **words) as other:
        yield one, other


def ask(name: str, output: list[int] | None = None, **params: Any) -> Request:
    said = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})
    return Request(id=name, prompt_ids=words(45), params=said, seed=2**63 - 1, output_ids=output or [])


def told(llm: LLM, request: Request) -> list[TokenDelta]:
    return list(llm.tokens([request]))


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_as_the_run_that_was_not_cut(engines: tuple[LLM, LLM], kind: str) -> None:
    whole = told(engines[0], ask("whole", **KINDS[kind]))
    ids = [t for d in whole for t in d.token_ids]
    for cut in sorted({1, 2, 15, 16, len(ids) - 1}):
        rest = told(engines[1], ask(f"rest {cut}", ids[:cut], **KINDS[kind]))
        assert [t for d in rest for t in d.token_ids] == ids[cut:], cut
        assert (rest[-1].finish_reason, rest[-1].eos) == (whole[-1].finish_reason, whole[-1].eos)
        if kind == "scores":
            assert [d.logprobs for d in rest] == [d.logprobs for d in whole[cut:]]


def test_a_stop_behind_the_cut_ends_it(engines: tuple[LLM, LLM]) -> None:
    """Counted from the prompt, not from the cut: a stop token before min_tokens is none."""
    ids = [t for d in told(engines[0], ask("whole", temperature=0.0)) for t in d.token_ids]
    stop = next(token for place, token in enumerate(ids) if place > 6 and token not in ids[:place])
    place = ids.index(stop)
    whole = told(engines[0], ask("stopped", temperature=0.0, stop_token_ids=(stop,)))
    rest = told(engines[1], ask("rest", ids[:3], temperature=0.0, stop_token_ids=(stop,)))
    assert [t for d in whole for t in d.token_ids] == ids[: place + 1]
    assert [t for d in rest for t in d.token_ids] == ids[3 : place + 1] and rest[-1].stop_token == stop == whole[-1].stop_token


def test_its_times_are_those_of_this_attempt(engines: tuple[LLM, LLM]) -> None:
    ids = [t for d in told(engines[0], ask("whole", temperature=0.0)) for t in d.token_ids]
    last = told(engines[1], ask("rest", ids[:5], temperature=0.0))[-1].stamps
    assert last is not None and last.arrived < last.scheduled < last.first_token < last.finished
    assert last.prefill_done == last.first_token


def test_another_choice_goes_on_by_the_seed_of_its_own(tiny: Path) -> None:
    engine = build(tiny, rows=4)
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, n=3)
    whole = drain(engine, [Request(id="a", prompt_ids=words(30), params=params, seed=5)])
    alone = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    for index in range(3):
        ids = list(whole["a", index][0])
        rest = drain(engine, [Request(id="b", prompt_ids=words(30), params=alone, seed=5 + index, output_ids=ids[:4])])
        assert list(rest["b", 0][0]) == ids[4:]


def test_it_is_preempted_like_any_other_and_what_is_cached_is_of_the_prompt(tiny: Path) -> None:
    def make(name: str, output: list[int]) -> Request:
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        return Request(id=name, prompt_ids=words(40), params=params, output_ids=output)

    engine = build(tiny, rows=3, kv_tokens=96, block=16, cached=True)
    ids = list(drain(engine, [make("whole", [])])["whole", 0][0])
    greedy = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    others = [Request(id=f"o{i}", prompt_ids=words(20, i + 1), params=greedy, priority=-1) for i in range(2)]
    engine.add(make("rest", ids[:30]))
    out: dict[Any, list[TokenDelta]] = {}
    collect(out, engine.step())
    for other in others:
        engine.add(other)
    while engine.has_work:
        collect(out, engine.step())
        engine.check_ledger()
    deltas = out["rest", 0]
    assert [t for d in deltas for t in d.token_ids] == ids[30:]
    assert deltas[-1].preemptions > 0 and 0 < max(d.cached_tokens for d in deltas) <= 40


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output_ids": [1] * 24}, "leaves none of 24"),
        ({"output_ids": [512]}, "outside the vocabulary"),
        ({"params": SamplingParams(n=2, max_tokens=24), "output_ids": [1]}, "one choice"),
        ({"params": SamplingParams(prompt_logprobs=0, max_tokens=24), "output_ids": [1]}, "prompt_logprobs"),
    ],
)
def test_what_could_not_go_on_is_refused(tiny: Path, changed: dict[str, Any], message: str) -> None:
    fields = {"id": "x", "prompt_ids": words(5), "params": SamplingParams(max_tokens=24), **changed}
    with pytest.raises(RequestError, match=message) as refused:
        build(tiny, rows=1).validate(Request(**fields))
    assert refused.value.param == "output_ids"
