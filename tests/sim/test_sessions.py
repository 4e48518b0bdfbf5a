"""Sessions in a closed loop, where each turn waits for the answer before: what choosing by prefixes is worth to them, and what it costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from random import Random

import pytest

from rayneuron.sim.fleet import Simulation
from rayneuron.sim.parts import FleetCall
from rayneuron.sim.setup import Route, Setup
from rayneuron.sim.workload import Arrival
from rayneuron.types import Profile
from tests.policies.profiles import engine

CAPACITY = C = engine(rows=16, length=2048, chunk=512)
SLOW = Profile(  # a small CPU: 500 tokens of prompts a second, 14 ms and more a decode step, chunks of 32 tokens while others decode
    batch=C.batch, lengths=C.lengths, context=C.context, prefix=C.prefix, chunk=C.chunk, chunk_ms=60.0, padded=False, tokens=((1, 15.0),),
    decode=tuple((b, n, 14 + 0.5 * b + 0.5 * b * n / 1024) for b in C.batch for n in C.lengths),
    prefill=tuple((1, t, n, 1.92 * t) for t in C.context for n in C.lengths),
)  # fmt: skip


@dataclass(frozen=True)
class Talks:
    """`sessions` of so many turns, which begin with the same `shared` tokens within `spread_s`; each turn adds `new` and is answered with
    `output`, which nobody says again."""

    sessions: int
    turns: int
    shared: int
    spread_s: float = 0.0
    new: int = 60
    output: int = 16


class Conversation(Simulation):
    """Plays them: a turn comes when the one before has been answered and thought about."""

    def __init__(self, setup: Setup, talks: Talks, seed: int) -> None:
        super().__init__(setup, iter(()), seed)
        self.talks, self._draw = talks, Random(seed)
        self.first_s: dict[tuple[int, int], float] = {}  # by session and turn
        self._said: dict[int, tuple[int, int]] = {}
        for session in range(talks.sessions):
            self.clock.at(self._draw.random() * talks.spread_s, self._say, session, 0)

    def _say(self, session: int, turn: int) -> None:
        talks, block, number = self.talks, self.setup.capacity.block, len(self._said)
        head, prompt = talks.shared // block * block, talks.shared + talks.new * (turn + 1)
        parts = ((1, head), (2 + session, prompt + talks.output - head))
        own = talks.output + block  # of its answer no block is named
        arrival = Arrival(number, self.clock.now_s, prompt, talks.output, talks.output, parts=parts, own=own)
        self._said[number] = session, turn
        self.report.arrived += 1
        self._offer(FleetCall(arrival, self._gateways[0], *self.setup.hashes(arrival)))

    def _done(self, call: FleetCall) -> None:
        session, turn = self._said[call.arrival.number]
        self.first_s[session, turn] = call.first_s - call.arrival.at_s
        super()._done(call)
        if turn + 1 < self.talks.turns:
            self.clock.at(self.clock.now_s + self._draw.uniform(0.3, 0.7), self._say, session, turn + 1)


def play(talks: Talks, route: Route, nodes: int, seeds: int = 6) -> tuple[float, float, float]:
    """Mean seconds to the first token of first turns and of later ones; the share of prompt tokens that were there."""
    first, later, there, asked = [], [], 0, 0
    for seed in range(seeds):
        fleet = Conversation(Setup(CAPACITY, SLOW, nodes, route=route, exact=True, hop_s=0.003), talks, seed)
        report = fleet.run()
        assert report.finished == talks.sessions * talks.turns and not any(fleet.open.values())
        first += [s for (_, turn), s in fleet.first_s.items() if not turn]
        later += [s for (_, turn), s in fleet.first_s.items() if turn]
        there, asked = there + report.cached_tokens, asked + report.prompt_tokens
    return statistics.fmean(first), statistics.fmean(later or [0.0]), there / asked


def test_sessions_that_begin_at_once_wait_for_their_beginning_no_longer_than_it_takes_and_then_less() -> None:
    """Two replicas compute it, as both will need it; the others come in as soon as it is there, one behind another."""
    talks = Talks(sessions=8, turns=6, shared=1000)
    (first, later, found), (turned_first, turned, _) = play(talks, "kv", 2), play(talks, "turns", 2)
    assert first <= turned_first and later <= 0.9 * turned
    alone, _, _ = play(Talks(sessions=2, turns=1, shared=1000), "kv", 2, 1)
    rest, _, _ = play(Talks(sessions=1, turns=1, shared=0, new=100), "kv", 1, 1)  # 60 of its own, and 40 of a block that is not all shared
    between = 1.7  # times as long, in chunks between the decode steps of those before
    assert first <= alone + between * statistics.fmean(rest * i for i in range(4)), "somebody waited for what was there"
    best = 1 - (1000 + 8 * 6 * 60) / sum(8 * (1060 + 60 * turn) for turn in range(6))
    assert found >= 0.9 * best, "of one cache that forgets nothing"


@pytest.mark.parametrize(("nodes", "sessions"), [(2, 24), (4, 40)])
def test_sessions_that_come_and_go_find_what_they_said_and_wait_for_nobody(nodes: int, sessions: int) -> None:
    """Where those of one replica are more for a while, some move. With a price of 5 on what is computed twice the forty wait for theirs, as
    long as where replicas take turns."""
    talks = Talks(sessions, 8, 512, spread_s=30.0)
    (first, later, found), (turned_first, turned, less) = play(talks, "kv", nodes, 3), play(talks, "turns", nodes, 3)
    assert first <= 0.9 * turned_first and later <= 0.85 * turned and found > less
