"""Beam search in bodies: what it becomes, and what is refused by name."""

from __future__ import annotations

import pytest

from rayneuron.api.lmi import INFERENCE
from rayneuron.constraints import Beams
from rayneuron.errors import RequestError
from rayneuron.text.text import Text
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
