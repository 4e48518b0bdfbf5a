"""What is learned of a replica's pace: predictions converge, and what is odd does little."""

from __future__ import annotations

import statistics
from math import exp, log
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rayneuron.news import Pressure
from rayneuron.policies.choice import GatewayAsk
from rayneuron.policies.desk import GatewayDesk, Send
from rayneuron.policies.desk_limits import DeskLimits
from rayneuron.policies.learned_pace import MOST_LATE_MS, MOST_OFF, LearnedPace
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=4096, chunk=512)
TIMES = profile(CAPACITY)
IDLE = Pressure(slots_free=8, kv_free=32_768)


class Played:
    """A desk before idle replicas whose steps take `slow` times as long as their profile says, and whose orders are late."""

    def __init__(self, slow: dict[int, float], late_ms: float = 0.0, seed: int = 0, noise: float = 0.0) -> None:
        self.desk, self.random, self.now_s, self.key = GatewayDesk(DeskLimits(admit_ms=1e6), Random(seed)), Random(seed), 0.0, 0
        self.slow, self.late_ms, self.noise = slow, late_ms, noise
        for number in slow:
            self.desk.join(number, f"r{number}", TIMES, 32_768, IDLE, 0.0)

    def end(self, send: Send) -> None:
        self.desk.heard(send.worker, Pressure(send.number, slots_free=8, kv_free=32_768), self.now_s)
        self.desk.ended(send.key, 20, self.now_s)

    def call(self, prompt: int, later_s: float = 1.0, end: bool = True) -> tuple[Send, float]:
        """One call: where it went, and how wrong its prediction was."""
        self.key, self.now_s = self.key + 1, self.now_s + later_s
        self.desk.offer(GatewayAsk(self.key, "", prompt, 20), self.now_s)
        (send,) = self.desk.next(self.now_s)
        own_ms = self.desk.chooser.workers.all[send.worker].costs.prefill(prompt, 0)[0]
        took_ms = (self.slow[send.worker] * own_ms + self.late_ms) * exp(self.random.gauss(0.0, self.noise))
        wrong = self.desk.began(self.key, 0, self.now_s + took_ms / 1e3)
        assert wrong is not None and self.desk.began(self.key, 0, self.now_s + 9.0) is None, "a first token comes once"
        if end:
            self.now_s += took_ms / 1e3
            self.end(send)
        return send, wrong


@settings(deadline=None, max_examples=60)
@given(st.floats(0.3, 3.0), st.floats(0.0, 15.0), st.integers(0, 10**6))
def test_predictions_converge_on_what_comes(slow: float, late_ms: float, seed: int) -> None:
    played = Played({0: slow}, late_ms, seed, noise=0.05)
    wrong = [played.call(played.random.choice([64, 128, 500, 2000]))[1] for _ in range(60)]
    assert statistics.median(wrong[20:]) <= 0.15 and max(wrong[40:]) <= 0.6, (slow, late_ms, wrong)
    assert statistics.median(wrong[10:30]) <= 0.3, "a few requests tell most of it"


def test_replicas_that_are_alike_are_learned_to_be_and_share_the_work() -> None:
    """Learning tells no two apart that are none, and chooses neither."""
    played, went = Played({0: 1.4, 1: 1.4}, 3.0, seed=3, noise=0.1), [0, 0]
    for _ in range(400):
        went[played.call(500)[0].worker] += 1
    workers = played.desk.chooser.workers.all.values()
    takes = [(cost := worker.costs.prefill(500, 0)[0]) + worker.pace.later_ms(cost) for worker in workers]
    assert min(went) > 140 and max(takes) / min(takes) <= 1.2, (went, takes)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 1e4), st.floats(0.01, 1e4), st.floats(-1.0, 1e9)), max_size=60))
def test_whatever_is_observed_both_stay_within_their_bounds(seen: list[tuple[float, float, float]]) -> None:
    pace = LearnedPace(0.0)
    for i, (queue_ms, own_ms, actual_ms) in enumerate(seen):
        pace.learn(queue_ms, own_ms, actual_ms, float(i))
        assert 0.999 / MOST_OFF <= pace.factor <= 1.001 * MOST_OFF and 0.0 <= pace.late_ms <= MOST_LATE_MS
        assert pace._off_var >= -1e-9 and pace._late_var >= -1e-9


def test_one_odd_answer_moves_a_known_pace_little_and_time_forgets() -> None:
    pace = LearnedPace(0.0)
    for i in range(50):
        pace.learn(0.0, 100.0, 200.0, float(i))
    known = pace._off
    assert abs(known - log(2.0)) < 0.15
    pace.learn(0.0, 100.0, 1e6, 50.0)
    assert pace._off - known < 0.12
    pace.fade(50.0 + 24 * 3600.0)
    assert pace.factor == pytest.approx(1.0) and pace.late_ms <= 1e-6


def test_a_prompt_that_was_there_in_part_is_judged_by_what_was_computed() -> None:
    """A session's prompt was thought to be there and was not: the replica is no slower for that."""
    played = Played({0: 1.0})
    for i in range(8):
        played.desk.offer(GatewayAsk(1000 + i, "", 2000, 20, session="s"), played.now_s)
        (send,) = played.desk.next(played.now_s)
        own_ms = played.desk.chooser.workers.all[0].costs.prefill(2000, 0)[0]
        played.desk.began(1000 + i, 0, played.now_s + own_ms / 1e3)
        played.desk.heard(0, Pressure(send.number, slots_free=8, kv_free=32_768), played.now_s + 1)
        played.desk.ended(1000 + i, 20, played.now_s + 1)
        played.now_s += 2.0
    assert send.terms.overlap > 1500 and 0.9 <= played.desk.chooser.workers.all[0].pace.factor <= 1.1


@pytest.mark.parametrize("rows", [0, 4])
def test_who_has_nothing_before_it_is_sent_however_late_or_slow_the_replica_is(rows: int) -> None:
    """Waiting would make neither the way there nor the step under way shorter."""
    desk = GatewayDesk(DeskLimits(admit_ms=1e-3), Random(0))
    desk.join(0, "r0", TIMES, 32_768, IDLE, 0.0)
    worker = desk.chooser.workers.all[0]
    for i in range(40):
        desk.offer(GatewayAsk(i, "", prompt := (20, 1000, 3000)[i % 3], 20), float(i))
        (send,) = desk.next(float(i))
        desk.began(i, 0, i + 2 * worker.costs.prefill(prompt, 0)[0] / 1e3 + 0.06)
        desk.heard(0, Pressure(send.number, slots_free=8, kv_free=32_768), i + 0.9)
        desk.ended(i, 20, i + 0.9)
    assert worker.pace.late_ms > 20 and worker.pace.factor > 1.5
    desk.heard(0, Pressure(seen=worker.orders, rows=rows, slots_free=8 - rows, kv_free=9_000, longest=900), 50.0)
    desk.offer(GatewayAsk(50, "", 300, 20), 50.0)
    assert [send.key for send in desk.next(50.0)] == [50]


def test_what_a_replica_says_of_its_steps_now_is_predicted_by_and_chooses_none() -> None:
    """Its steps take twice as long as when it came, or half, which it says: the next prediction is right, however long the prompt; which
    of two that were alike gets it is chance as before."""
    for slow in (2.0, 0.5):
        grids = {"decode": tuple((rows, length, slow * ms) for rows, length, ms in TIMES.decode)}
        grids |= {"prefill": tuple((rows, tokens, length, slow * ms) for rows, tokens, length, ms in TIMES.prefill)}
        played, went = Played({0: slow, 1: 1.0}, seed=1), [0, 0]
        played.desk.timed(0, replace(TIMES, host_ms=slow * TIMES.host_ms, **grids))
        played.desk.timed(7, TIMES)  # who has gone meanwhile
        for i in range(60):
            send, wrong = played.call((64, 500, 3000)[i % 3])
            went[send.worker] += 1
            assert wrong <= 0.02, (slow, i, wrong)
        assert min(went) >= 15


def test_first_tokens_of_prompts_that_others_compute_teach_nothing() -> None:
    desk = GatewayDesk(DeskLimits(), Random(0))
    desk.join(0, "r0", TIMES, 32_768, IDLE, 0.0, pooled=True)
    desk.offer(GatewayAsk(1, "", 300, 20), 0.0)
    desk.next(0.0)
    assert desk.began(1, 0, 5.0) is not None and desk.chooser.workers.all[0].pace.factor == 1.0
