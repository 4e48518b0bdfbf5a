"""The clock and the traces against somebody else's simulator: Dynamo 1.2.1's own replay of Mooncake's conversation trace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayneuron.sim.clock import Clock
from rayneuron.sim.traces import read
from rayneuron.sim.workload import Arrival
from tests.sim.mixed import MixedCall, MixedEngine

TRACE = Path(os.environ.get("RAYNEURON_TRACES", ""), "mooncake_conversation_trace.jsonl")


def replay(arrivals: list[Arrival], engines: int, kv: bool) -> tuple[float, float, float]:
    """Milliseconds, on average: of first tokens, of those after them, of answers."""
    clock, ended = Clock(), list[MixedCall]()
    fleet = [MixedEngine(clock, ended.append) for _ in range(engines)]

    def arrive(arrival: Arrival) -> None:
        call = MixedCall(arrival, tuple(number for number, _ in arrival.parts[:-1]))
        chosen = min(fleet, key=lambda engine: engine.load(call)) if kv else fleet[arrival.number % engines]
        chosen.submit(call)

    for arrival in arrivals:
        clock.at(arrival.at_s, arrive, arrival)
    clock.run()
    assert len(ended) == len(arrivals) and not any(engine.users or engine.own for engine in fleet)
    first = sum(call.first_s - call.arrival.at_s for call in ended) / len(ended)
    whole = sum(call.last_s - call.arrival.at_s for call in ended) / len(ended)
    later = sum(call.last_s - call.first_s for call in ended) / sum(call.arrival.output - 1 for call in ended)
    return 1e3 * first, 1e3 * later, 1e3 * whole


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.is_file(), reason="RAYNEURON_TRACES: a folder with mooncake_conversation_trace.jsonl (kvcache-ai/Mooncake)")
@pytest.mark.parametrize(
    ("engines", "kv", "said", "within"),
    [
        (8, False, (326.0, 7.575, 2913.7), (0.02, 0.02, 0.02)),
        (32, False, (243.6, 6.432, 2440.9), (0.02, 0.02, 0.02)),
        (8, True, (281.6, 7.252, 2759.0), (0.05, 0.03, 0.03)),
        (32, True, (182.6, 6.445, 2384.4), (0.08, 0.03, 0.03)),
    ],
)
def test_means_are_those_of_the_public_replay(engines: int, kv: bool, said: tuple[float, ...], within: tuple[float, ...]) -> None:
    found = replay(list(read(TRACE)), engines, kv)
    for ours, theirs, share in zip(found, said, within, strict=True):
        assert ours == pytest.approx(theirs, rel=share), (found, said)


def test_a_prompt_alone_takes_what_it_takes_there() -> None:
    """256 tokens and 2 more: the two points that the polynomials were recognised by."""
    first, later, _ = replay([Arrival(0, 0.0, 256, 2, parts=((1, 258),))], 1, False)
    assert first == pytest.approx(26.18, abs=0.02) and later == pytest.approx(5.77, abs=0.02)
