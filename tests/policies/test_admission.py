"""The admission decision as a table, and over random calls: what is let in never exceeds the limits, and nobody is shut out by one call."""

from __future__ import annotations

import random

import pytest

from rayneuron.config import Limits
from rayneuron.errors import Busy, RequestError
from rayneuron.policies.admission import SCORES, Call, Load, decide, measure, room
from rayneuron.types import Request, SamplingParams

LIMITS = Limits(max_waiting=10, max_waiting_tokens=100, retry_after_s=2.5)


@pytest.mark.parametrize(
    ("load", "call", "outcome"),
    [
        (Load(4, 64), Call(), None),
        (Load(4, 64), Call(1, 9), None),  # four slots and half of ten places
        (Load(4, 64), Call(1, 10), "n"),
        (Load(4, 64), Call(5, 10), "prompt"),
        (Load(4, 64, sequences=13), Call(), None),
        (Load(4, 64, sequences=14), Call(), "busy"),
        (Load(4, 64, sequences=10), Call(1, 5), "busy"),
        (Load(4, 64, waiting_tokens=90), Call(tokens=10), None),
        (Load(4, 64, waiting_tokens=90), Call(tokens=11), "busy"),
        (Load(4, 64, waiting_tokens=100), Call(), "busy"),  # the door asks with the least call there is
        (Load(4, 64), Call(tokens=1000), None),  # one long prompt has to come in some time
        (Load(4, 64), Call(2, 2, tokens=101), "prompt"),
        (Load(4, 64), Call(scores=SCORES), None),
        (Load(4, 64), Call(scores=SCORES + 1), "logprobs"),
        (Load(4, 10_000), Call(scores=210_000), None),  # one prompt of the whole length with all alternatives
        (Load(4, 10_000), Call(scores=210_001), "logprobs"),
    ],
)
def test_the_table(load: Load, call: Call, outcome: str | None) -> None:
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
        inside: list[Call] = []
        for _ in range(60):
            if inside and draw.random() < 0.3:
                inside.pop(draw.randrange(len(inside)))
            prompts = draw.randrange(1, 4)
            call = Call(prompts, prompts * draw.randrange(1, 12), draw.randrange(40))
            load = Load(slots, 64, sum(c.sequences for c in inside), sum(c.tokens for c in inside))
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
    assert measure(requests) == Call(prompts=2, sequences=6, tokens=11, scores=11 * 2 + 2 * 3 * 7 * 5)
    assert measure([Request(id="a", prompt_ids=[1], params=SamplingParams(max_tokens=0))]) == Call(1, 1, 1, 0)


def test_room() -> None:
    assert [room(p, a, 10) for p, a in ((3, None), (3, 7), (10, 0), (9, 1))] == [7, 7, 0, 1]
    for prompt, asked, param in ((11, None, "prompt"), (10, None, "prompt"), (10, 1, "prompt"), (11, 0, "prompt"), (3, 8, "max_tokens")):
        with pytest.raises(RequestError, match="at most 10") as wrong:
            room(prompt, asked, 10)
        assert wrong.value.param == param
