"""Beam search in bodies: what it becomes, and what is refused by name."""

from __future__ import annotations

import pytest

from rayneuron.api.lmi import INFERENCE
from rayneuron.constraints import Beams
from rayneuron.errors import RequestError
from rayneuron.text.text import Text
from rayneuron.types import Delta, TokenLogprobs
from tests.api.test_dialects import read
from tests.api.test_fields import parse


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_each_dialect_has_its_rule(byte_level: Text, kind: str) -> None:
    vllm = parse(kind, {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "temperature": 0}, byte_level).requests[0].params
    assert (vllm.n, vllm.beams) == (3, Beams(width=3, length_penalty=0.5, rule="vllm"))
    wider = parse(kind, {"use_beam_search": True, "n": 2, "best_of": 4}, byte_level).requests[0].params
    assert (wider.n, wider.beams) == (2, Beams(width=4, rule="vllm"))
    theirs = parse(kind, {"num_beams": 4, "n": 2, "early_stopping": "never"}, byte_level).requests[0].params
    assert (theirs.n, theirs.beams) == (2, Beams(width=4, early_stopping="never"))
    assert parse(kind, {"num_beams": 1, "use_beam_search": False}, byte_level).requests[0].params.beams is None


def test_lmi_searches_as_transformers(byte_level: Text) -> None:
    call = read(INFERENCE, {"inputs": "x", "parameters": {"num_beams": 3, "length_penalty": 2.0, "details": True}}, byte_level)
    assert call.requests[0].params.beams == Beams(width=3, length_penalty=2.0)


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"use_beam_search": True, "n": 2, "stream": True}, "use_beam_search"),
        ({"num_beams": 2, "stream": True}, "num_beams"),
        ({"num_beams": 2, "n": 3}, "n"),
        ({"num_beams": 2, "stop": "x"}, "stop"),
        ({"num_beams": 2, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"num_beams": 2, "length_penalty": 11}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_what_a_search_cannot_have_is_refused_by_name(byte_level: Text, kind: str, said: dict, name: str) -> None:
    with pytest.raises(RequestError) as wrong:
        parse(kind, said, byte_level)
    assert wrong.value.param == name and name in wrong.value.message


@pytest.mark.parametrize(
    "said", [{"stream": True}, {"temperature": 0}, {"num_beams": 4}, {"n": 5}, {"best_of": 129}, {"best_of": True}, {"n": 2, "best_of": 1}]
)
def test_which_best_cannot_be_had(byte_level: Text, said: dict) -> None:
    with pytest.raises(RequestError) as wrong:
        parse("text", {"best_of": 4} | said, byte_level)
    assert wrong.value.param == "best_of"
    with pytest.raises(RequestError, match="best_of is not supported"):
        parse("chat", {"best_of": 4}, byte_level)


def test_who_fails_is_the_worst_and_the_best_come_first(byte_level: Text) -> None:
    call = parse("text", {"prompt": ["a", "b"], "n": 2, "best_of": 3}, byte_level)
    said = {(0, 0): [-3.0], (0, 1): [-1.0, -1.5], (0, 2): [-0.5, -0.5, -0.5], (1, 0): [], (1, 1): [-2.0], (1, 2): [-2.0]}
    deltas = [
        Delta(call.requests[prompt].id, index, f"{prompt}{index}", [9] * len(told), [TokenLogprobs(9, p, 1, ()) for p in told])
        for (prompt, index), told in said.items()
    ]
    for delta in deltas:
        delta.finish_reason = "error" if not delta.token_ids else "length"
    reply = call.reply(deltas)
    assert [(c["index"], c["text"], c["logprobs"]) for c in reply["choices"]] == [
        *[(0, "02", None), (1, "01", None), (2, "11", None), (3, "12", None)]
    ]
    assert reply["usage"]["completion_tokens"] == 8
