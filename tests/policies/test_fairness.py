"""Shares of accounts: the bound of their difference, tiers, caps, and what is predicted to go first."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.policies.fairness import AccountShare, Fairness, Waiter
from tests.drawn import examples


def take(queue: Fairness) -> int | None:
    key = queue.head()
    if key is not None:
        queue.take(key)
    return key


@examples(100)
@given(st.integers(0, 10**6))
def test_those_who_always_have_work_get_their_weights(seed: int) -> None:
    random = Random(seed)
    weights = {f"a{i}": random.choice([0.5, 1.0, 2.0, 4.0]) for i in range(random.randint(2, 5))}
    queue = Fairness({name: AccountShare(weight) for name, weight in weights.items()}, AccountShare())
    costs = {}
    for key in range(400):
        name = random.choice(list(weights))
        costs[key] = name, random.uniform(1, 100)
        queue.add(Waiter(key, name, 1, costs[key][1]))
    given_ms = dict.fromkeys(weights, 0.0)
    left = {name: sum(1 for n, _ in costs.values() if n == name) for name in weights}
    while min(left.values()) > 0:
        key = take(queue)
        assert key is not None
        name, ms = costs[key]
        given_ms[name] += ms
        left[name] -= 1
        shares = [given_ms[n] / weights[n] for n in weights]
        assert max(shares) - min(shares) <= max(100 / w for w in weights.values()) + 1e-9
    while take(queue) is not None:
        pass
    assert len(queue) == 0


def test_who_was_away_goes_first_with_a_little_and_has_saved_nothing_up_beyond() -> None:
    queue = Fairness({}, AccountShare())
    for key in range(60):
        queue.add(Waiter(key, "busy", 1, 1000.0))
    for _ in range(25):
        take(queue)
    for key in range(100, 140):
        queue.add(Waiter(key, "new", 1, 1000.0))
    order = [take(queue) for _ in range(40)]
    assert all(key is not None and key >= 100 for key in order[:2])  # two seconds of its share
    assert 20 <= sum(key >= 100 for key in order if key is not None) <= 22


def test_order_within_an_account_and_first() -> None:
    queue = Fairness({}, AccountShare())
    for key in (1, 2, 3):
        queue.add(Waiter(key, "a", 1, 1.0))
    queue.add(Waiter(4, "a", 1, 1.0), first=True)
    queue.drop(2)
    assert [take(queue) for _ in range(4)] == [4, 1, 3, None]


def test_tiers_are_strict_and_what_is_done_again_goes_first_of_its_tier_uncharged() -> None:
    queue = Fairness({"vip": AccountShare(tier=0), "batch": AccountShare(tier=1)}, AccountShare())
    for key in (1, 2):
        queue.add(Waiter(key, "batch", 1, 1.0))
    queue.add(Waiter(3, "batch", 1, 1e6, again=True))
    queue.add(Waiter(4, "vip", 1, 1.0))
    assert [take(queue) for _ in range(4)] == [4, 3, 1, 2]


def test_caps() -> None:
    queue = Fairness({"a": AccountShare(max_running=1, max_waiting=2, max_waiting_tokens=100)}, AccountShare())
    assert queue.full("a", 1000) is None  # one that is too large for every limit is another's business
    queue.add(Waiter(1, "a", 90, 1.0))
    assert "100" in (queue.full("a", 11) or "") and queue.full("a", 10) is None
    queue.add(Waiter(2, "a", 10, 1.0))
    assert "2 requests" in (queue.full("a", 0) or "")
    queue.add(Waiter(3, "b", 1, 1e9))
    assert [take(queue), take(queue), take(queue)] == [1, 3, None]
    queue.ended("a")
    assert take(queue) == 2


def test_what_it_took_more_is_charged_later() -> None:
    queue = Fairness({}, AccountShare())
    for key in range(20):
        queue.add(Waiter(key, "ab"[key % 2], 1, 10.0))
    assert take(queue) == 0
    queue.ended("a", more_ms=40.0)
    assert [take(queue) for _ in range(6)] == [1, 3, 5, 7, 9, 2]


@examples(50)
@given(st.integers(0, 10**6))
def test_what_goes_before_a_request_is_told_when_it_comes(seed: int) -> None:
    """Within one request of each account, of what really goes before it."""
    random = Random(seed)
    names = {f"a{i}": random.choice([1.0, 3.0]) for i in range(4)}
    queue = Fairness({name: AccountShare(weight, tier=int(name == "a3")) for name, weight in names.items()}, AccountShare())
    costs: dict[int, float] = {}
    for key in range(100):
        costs[key] = random.uniform(1, 20)
        queue.add(Waiter(key, random.choice(list(names)), 1, costs[key]))
    for _ in range(random.randint(0, 30)):
        take(queue)
    predicted = queue.ahead_ms("a0", 5.0)
    queue.add(Waiter(1000, "a0", 1, 5.0))
    before = 0.0
    while (key := take(queue)) != 1000:
        assert key is not None
        before += costs[key]
    assert predicted == pytest.approx(before, abs=20.0 * 2 * len(names))
