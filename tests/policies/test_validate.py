"""What an engine refuses before it runs: whatever could not be packed, and what leaves no token to choose."""

from __future__ import annotations

import math
import typing
from typing import Any

import numpy as np
import pytest

from rayneuron.errors import RequestError
from rayneuron.policies.admission import validate
from rayneuron.types import MIN_TEMPERATURE, Request, SamplingParams

VOCAB, EOS = 12, frozenset({7})
PACKED = {"top_k": np.int32, "temperature": np.float32, "top_p": np.float32, "min_p": np.float32}
NUMBERS = [n for n, kind in typing.get_type_hints(SamplingParams).items() if kind in (int, float, int | None)]
EDGES = (
    0, 1, -1, 5e-324, 1e-50, 1e38, 1e39, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan, 0.5, 2, -2,
    *(sign * 2**bits + step for bits in (15, 31, 32, 63, 64, 1400) for sign in (1, -1) for step in (-1, 0, 1)),
)  # fmt: skip


def check(**params: Any) -> None:
    request = Request(id="a", prompt_ids=[1, 2], params=SamplingParams(**params))
    validate(request, 64, 128, VOCAB, EOS)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_refused_or_fits_what_it_is_packed_into(name: str) -> None:
    """Every field of one number, every edge: RequestError by name, or it survives the narrowing."""
    taken, wide = 0, np.float64 if isinstance(getattr(SamplingParams(), name), float) else np.int64
    for value in EDGES:
        try:
            params = SamplingParams(**{name: value, **({"max_tokens": None} if name == "min_tokens" else {})})
        except RequestError as wrong:
            assert wrong.param == name and len(wrong.message) < 200
            continue
        taken += 1
        packed = PACKED.get(name, wide)(getattr(params, name))
        assert np.isfinite(packed), (name, value)
    assert taken


def test_one_wish_has_one_spelling() -> None:
    params = SamplingParams(
        temperature=1e-9, allowed_token_ids=(5, 3, 5, 3), banned_token_ids=(9, 1, 9), stop_token_ids=(4, 4),
        logit_bias={1: 1e300, 2: -math.inf},
    )  # fmt: skip
    assert (params.temperature, params.allowed_token_ids, params.banned_token_ids) == (MIN_TEMPERATURE, (3, 5), (1, 9))
    assert (params.stop_token_ids, params.logit_bias) == ((4,), {1: 100.0, 2: -100.0})
    with pytest.raises(RequestError, match="nan") as wrong:
        SamplingParams(logit_bias={1: math.nan})
    assert wrong.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": (5,), "banned_token_ids": (5,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (5, 6), "banned_token_ids": (5,), "bad_words_ids": ((6,),)}, "allowed_token_ids"),
        ({"allowed_token_ids": (7,), "min_tokens": 2}, "allowed_token_ids"),
        ({"allowed_token_ids": (7, 3), "min_tokens": 2, "stop_token_ids": (3,)}, "allowed_token_ids"),
        ({"banned_token_ids": tuple(range(12))}, "banned_token_ids"),
        ({"banned_token_ids": (*range(7), *range(8, 12)), "min_tokens": 1}, "banned_token_ids"),
        ({"allowed_token_ids": (5,), "banned_token_ids": (6,)}, None),
        ({"allowed_token_ids": (7,), "min_tokens": 2, "ignore_eos": True}, None),
        ({"allowed_token_ids": (7,)}, None),
        ({"allowed_token_ids": (5,), "bad_words_ids": ((5, 5),)}, None),
        ({"banned_token_ids": tuple(range(11))}, None),
    ],
)
def test_nothing_left_to_choose_is_refused_where_the_request_shows_it(params: dict[str, Any], param: str | None) -> None:
    if param is None:
        check(**params)
        return
    with pytest.raises(RequestError, match="forbid") as wrong:
        check(**params)
    assert wrong.value.param == param
