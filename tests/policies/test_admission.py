"""The admission decision as a table, and over random calls: what is let in never exceeds the limits, and nobody is shut out by one call."""

from __future__ import annotations

import random

import pytest

from rayneuron.config import Limits
from rayneuron.errors import Busy, RequestError
from rayneuron.policies.admission import SCORES, Demand, Occupancy, decide, measure, room
from rayneuron.types import Request, SamplingParams

LIMITS = Limits(max_waiting=10, max_waiting_tokens=100, retry_after_s=2.5)


@pytest.mark.parametrize(
    ("load", "call", "outcome"),
    [
        (Occupancy(4, 64), Demand(), None),
        (Occupancy(4, 64), Demand(1, 9), None),  # four slots and half of ten places
        (Occupancy(4, 64), Demand(1, 10), "n"),
        (Occupancy(4, 64), Demand(5, 10), "prompt"),
        (Occupancy(4, 64, sequences=13), Demand(), None),
        (Occupancy(4, 64, sequences=14), Demand(), "busy"),
        (Occupancy(4, 64, sequences=10), Demand(1, 5), "busy"),
        (Occupancy(4, 64, waiting_tokens=90), Demand(tokens=10), None),
        (Occupancy(4, 64, waiting_tokens=90), Demand(tokens=11), "busy"),
        (Occupancy(4, 64, waiting_tokens=100), Demand(), "busy"),  # the door asks with the least call there is
        (Occupancy(4, 64), Demand(tokens=1000), None),  # one long prompt has to come in some time
        (Occupancy(4, 64), Demand(2, 2, tokens=101), "prompt"),
        (Occupancy(4, 64), Demand(scores=SCORES), None),
        (Occupancy(4, 64), Demand(scores=SCORES + 1), "logprobs"),
        (Occupancy(4, 10_000), Demand(scores=210_000), None),  # one prompt of the whole length with all alternatives
        (Occupancy(4, 10_000), Demand(scores=210_001), "logprobs"),
    ],
)
def test_the_table(load: Occupancy, call: Demand, outcome: str | None) -> None:
    if outcome is None:
        decide(load, call, LIMITS)
        return
    with pytest.raises(Busy if outcome == "busy" else RequestError) as wrong:
        decide(load, call, LIMITS)
    assert wrong.value.retry_after_s == 2.5 if outcome == "busy" else wrong.value.param == outcome


def test_what_is_let_in_stays_within_the_limits() -> None:
    draw = random.Random(3)
    for _ in range(200):
        limits = Limits(max_waiting=draw.randrange(30), max_waiting_tokens=draw.choice([None, 50]))
        slots = draw.randrange(1, 9)
        inside: list[Demand] = []
        for _ in range(60):
            if inside and draw.random() < 0.3:
                inside.pop(draw.randrange(len(inside)))
            prompts = draw.randrange(1, 4)
            call = Demand(prompts, prompts * draw.randrange(1, 12), draw.randrange(40))
            load = Occupancy(slots, 64, sum(c.sequences for c in inside), sum(c.tokens for c in inside))
            try:
                decide(load, call, limits)
            except (Busy, RequestError):
                assert call.sequences > 1 or load.sequences >= slots + limits.max_waiting or limits.max_waiting_tokens, (load, call)
                continue
            inside.append(call)
            assert load.sequences + call.sequences <= slots + limits.max_waiting
            assert call.sequences <= slots + limits.max_waiting / 2
            assert not (limits.max_waiting_tokens and load.waiting_tokens) or load.waiting_tokens + call.tokens <= 50


def test_what_a_call_brings() -> None:
    params = SamplingParams(n=3, max_tokens=7, logprobs=4, prompt_logprobs=1)
    requests = [Request(id=str(i), prompt_ids=[1] * size, params=params) for i, size in enumerate((5, 6))]
    assert measure(requests) == Demand(prompts=2, sequences=6, tokens=11, scores=11 * 2 + 2 * 3 * 7 * 5)
    assert measure([Request(id="a", prompt_ids=[1], params=SamplingParams(max_tokens=0))]) == Demand(1, 1, 1, 0)


def test_room() -> None:
    assert [room(p, a, 10) for p, a in ((3, None), (3, 7), (10, 0), (9, 1))] == [7, 7, 0, 1]
    for prompt, asked, param in ((11, None, "prompt"), (10, None, "prompt"), (10, 1, "prompt"), (11, 0, "prompt"), (3, 8, "max_tokens")):
        with pytest.raises(RequestError, match="at most 10") as wrong:
            room(prompt, asked, 10)
        assert wrong.value.param == param
