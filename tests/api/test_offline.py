"""The offline `LLM` and every endpoint make the same request of the same words: every field of SamplingParams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayneuron import LLM
from rayneuron.api import neuron_server, openai
from rayneuron.api.call import Context
from rayneuron.errors import RequestError
from rayneuron.types import Request, SamplingParams

DERIVED = {"bad_words_ids": "bad_words"}  # what no client writes, and the field it comes from
OWN_WORDS = {"beams"}  # clients say it in other words: tests/api/test_beams.py
ONLY_COMPLETIONS = {"n", "logprobs", "prompt_logprobs", "logprob_token_ids"}  # /generate has no place for them in its reply
# Values for every field, as JSON carries them. A new field of the struct needs a line here, and a mapping in both.
VALUES: dict[str, list[Any]] = {
    "n": [1, 3],
    "max_tokens": [1, 7],
    "min_tokens": [0, 4],
    "temperature": [0, 1e-9, 0.5, 1, 2],
    "top_k": [-1, 0, 5, 2**31 - 1],
    "top_p": [1e-9, 0.5, 1],
    "min_p": [0, 0.3, 1],
    "typical_p": [1e-9, 0.5, 1],
    "logprob_token_ids": [[], [9, 5, 9]],
    "seed": [0, -(2**63), 2**63 - 1],
    "presence_penalty": [-2, 0.5],
    "frequency_penalty": [-2, 0.5],
    "repetition_penalty": [1e-9, 1.3],
    "no_repeat_ngram_size": [0, 3, 64],
    "logit_bias": [{}, {"5": 1.5}, {"5": 1e300, "6": -101, "7": 100}],
    "allowed_token_ids": [[5], [9, 5, 9]],
    "banned_token_ids": [[], [9, 5, 9]],
    "bad_words": [[], ["a"], [" a"], ["zebra crossing"], ["the", "the", " the"], ["水"]],
    "stop": [[], "x", ["x", "yz"]],
    "stop_token_ids": [[], [9, 5, 9]],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "logprobs": [0, 20],
    "prompt_logprobs": [0, 20],
    "skip_special_tokens": [True, False],
    "spaces_between_special_tokens": [True, False],
    "structured_outputs": [{"choice": ["a", "b"]}, {"json": {"type": "object"}, "disable_any_whitespace": True}],
}
WRONG: dict[str, list[Any]] = {
    "top_k": [2**31, 10**400], "no_repeat_ngram_size": [65, 10**400], "n": [0, 129, 10**400], "max_tokens": [-1, 600, 10**400],
    "min_tokens": [-1, 10**400], "temperature": [2.1, -1], "top_p": [0, 1.1], "seed": [2**63, 10**400], "allowed_token_ids": [[], [512]],
    "banned_token_ids": [[-1]], "logit_bias": [{"512": 1}], "logprobs": [21, -1], "prompt_logprobs": [21], "stop": [[""]],
    "bad_words": [[""]], "repetition_penalty": [0], "presence_penalty": [3], "min_p": [2], "typical_p": [0, 1.1], "stop_token_ids": [[512]],
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, dtype="fp32", max_model_len=512, max_num_seqs=2, threads=1) as made:
        yield made


def served(llm: LLM, endpoint: str, body: dict[str, Any]) -> Request:
    context = Context(models=("tiny",), text=llm.text, max_model_len=512, vocab_size=llm.engine.vocab)
    words: dict[str, Any] = {"request_id": "r", "created": 1}
    if endpoint == "chat":
        if "logprobs" in body:
            body = body | {"logprobs": True, "top_logprobs": body["logprobs"]}
        body = {**body, "chat_template": "{{ messages[0].content }}", "messages": [{"role": "user", "content": "one two"}]}
        request = openai.parse_chat(openai.decode(msgspec.json.encode(body)), context, **words).requests[0]
    else:
        verb = openai.parse_completions if endpoint == "completions" else neuron_server.parse
        request = verb(openai.decode(msgspec.json.encode({"prompt": "one two"} | body)), context, **words).requests[0]
    llm.engine.validate(request)
    return request


@pytest.mark.parametrize("name", [name for name in SamplingParams.__struct_fields__ if name not in OWN_WORDS])
@pytest.mark.parametrize("endpoint", ["completions", "chat", "generate"])
def test_the_same_words_are_the_same_request(llm: LLM, endpoint: str, name: str) -> None:
    if name in DERIVED:
        assert DERIVED[name] in VALUES and any(getattr(llm._request("x", SamplingParams(bad_words=("a",)))[0].params, name))
        return
    if endpoint == "generate" and name in ONLY_COMPLETIONS:
        return
    made = set()
    for value in VALUES[name]:
        words = {"max_tokens": 5, "temperature": 1.0, name: value, **({"logprobs": 0} if name == "logprob_token_ids" else {})}
        offline = llm._request("one two", llm_params(words))[0]
        assert offline.params == served(llm, endpoint, words).params, value
        made.add(str(getattr(offline.params, name)))
    assert made - {str(getattr(SamplingParams(), name))}, "no value of the list changes anything"


@pytest.mark.parametrize("name", WRONG)
def test_what_one_refuses_the_other_refuses_by_the_same_name(llm: LLM, name: str) -> None:
    for value in WRONG[name]:
        named = []
        for ask in (lambda w: llm._request("one two", llm_params(w)), lambda w: served(llm, "completions", w)):
            with pytest.raises(RequestError) as wrong:
                ask({"max_tokens": 5, "temperature": 1.0, name: value})
            named.append(wrong.value.param)
        assert named == [name, name], (value, named)


def llm_params(words: dict[str, Any]) -> SamplingParams:
    from rayneuron.llm import _params

    return _params(words)
