"""Where a prompt is computed: every term of the choice moves it the way it should, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayneuron.policies.pools import Queue, Rates, choose

HERE = Queue("", queued=0, uncached=1000)
PEER = Queue("p", queued=0, uncached=1000)
RATES = Rates(token_s=0.001, there_token_s=0.001, asking_s=0.002, tail_s=0.01)


def where(here: Queue = HERE, *peers: Queue, rates: Rates | None = RATES, local: int | None = None) -> str:
    return choose(here, peers, rates, local).peer


def test_nobody_there_or_nobody_busy_stays_here() -> None:
    assert where() == "" and choose(HERE, [], RATES).why == "nobody"
    assert where(HERE, PEER) == "", "asking and copying cost something, and here is free"


@pytest.mark.parametrize(
    ("here", "peer", "rates", "wanted"),
    [
        (replace(HERE, queued=100), PEER, RATES, "p"),  # others' prompts are before it
        (replace(HERE, running=8), PEER, RATES, "p"),  # eight streams would wait for it
        (replace(HERE, running=8, uncached=10), replace(PEER, uncached=1000), RATES, ""),  # the second turn of a conversation
        (replace(HERE, running=8), replace(PEER, queued=1000), RATES, ""),  # there others are before it
        (replace(HERE, running=8), replace(PEER, queued=1000), replace(RATES, there_token_s=0.0001), "p"),  # but there it is fast
        (replace(HERE, running=8), PEER, replace(RATES, asking_s=1.0), ""),
        (replace(HERE, running=8), PEER, replace(RATES, tail_s=1.0), ""),
        (replace(HERE, running=8), PEER, replace(RATES, harm=0.0), ""),
        (replace(HERE, queued=12), PEER, RATES, ""),  # a tie stays
    ],
)
def test_each_term(here: Queue, peer: Queue, rates: Rates, wanted: str) -> None:
    assert where(here, peer, rates=rates) == wanted


def test_the_least_of_several_and_its_terms_are_told() -> None:
    chosen = choose(replace(HERE, running=8), [replace(PEER, queued=50), Queue("q", 20, 1000), Queue("r", 20, 1010)], RATES)
    assert (chosen.peer, chosen.why) == ("q", "faster")
    assert chosen.terms[""] == {"queue": 0.0, "prefill": 1.0, "harm": pytest.approx(0.8)}
    assert chosen.terms["q"] == {"queue": 0.02, "prefill": 1.0, "asking": 0.002, "tail": 0.01}


@pytest.mark.parametrize("rates", [RATES, None])
def test_what_was_written_holds(rates: Rates | None) -> None:
    assert where(replace(HERE, uncached=32, running=50), PEER, rates=rates, local=32) == ""
    assert where(replace(HERE, uncached=33), replace(PEER, queued=9), Queue("q", 3, 33), rates=rates, local=32) == "q"
    assert where(replace(HERE, uncached=1), PEER, rates=rates, local=0) == "p"


def test_without_a_measurement_only_the_shortest_stay() -> None:
    assert where(replace(HERE, uncached=64), PEER, rates=None) == ""
    assert where(replace(HERE, uncached=65), PEER, rates=None) == "p"
