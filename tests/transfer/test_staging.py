"""Copies of blocks on their way: what is lent is copied out before it is told, what has come is copied in before it is said to have."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from rayneuron.engine.remote import Absent, Arrived, First, Lent, Loan, Prefill
from rayneuron.errors import NotReady
from rayneuron.transfer.staging import AT_ONCE, StagedLends, StagedPrefills
from rayneuron.types import Request, SamplingParams


class Places:
    """Host memory, as a set of blocks that take some of it."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.into_calls: list[list[int]] = []

    def out(self, blocks: Any) -> None:
        self.held |= set(blocks)

    def into(self, blocks: Any) -> None:
        self.into_calls.append(list(blocks))

    def drop(self, blocks: Any) -> None:
        self.held -= set(blocks)


class LendingEngine:
    def __init__(self) -> None:
        self.loans: dict[bytes, Loan] = {}
        self.calls: list[tuple[str, Any]] = []

    def submit(self, request: Request, loan: Loan | None = None) -> None:
        if request.id == "refused":
            raise NotReady("draining")
        if loan is not None:
            self.loans[loan.ticket] = loan

    def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))

    def unpin(self, ticket: bytes) -> None:
        self.calls.append(("unpin", ticket))

    def news(self, epoch: int, number: int) -> None:
        self.calls.append(("news", (epoch, number)))


def request(name: str) -> Request:
    return Request(id=name, prompt_ids=[1], params=SamplingParams())


@pytest.mark.parametrize("seed", range(100))
def test_what_is_told_has_been_copied_and_is_kept_until_the_last_ticket_is_over(seed: int) -> None:
    """Tickets that share leading blocks, told of in steps and ended in any order, some before all was told."""
    rng, engine, places = random.Random(seed), LendingEngine(), Places()
    between: list[Any] = []  # done before the engine's next step
    lends = StagedLends(engine, places, between.append)
    told: Counter[bytes] = Counter()
    chains: dict[bytes, tuple[int, ...]] = {}

    def heard(news: Lent) -> None:
        assert set(news.blocks) <= places.held
        told[news.ticket] += 1

    for number in range(6):
        ticket, own = bytes([number]), range(10, 10 + rng.randrange(1, 5))
        chains[ticket] = (*range(rng.randrange(4)), *(100 * number + i for i in own))
        lends.submit(request(str(number)), Loan(ticket, heard))
    alive = dict.fromkeys(chains, 0)
    while alive:
        ticket = rng.choice(sorted(alive))
        if alive[ticket] < len(chains[ticket]) and rng.random() < 0.7:
            alive[ticket] = rng.randint(alive[ticket] + 1, len(chains[ticket]))
            engine.loans[ticket].told(Lent(ticket, alive[ticket], chains[ticket][: alive[ticket]]))
            before = told[ticket]
            while between:
                between.pop(0)()
            assert told[ticket] == before + 1
        elif rng.random() < 0.5:
            before, late = told[ticket], rng.random() < 0.5
            if late:
                engine.loans[ticket].told(Lent(ticket, 99, chains[ticket]))
            lends.unpin(ticket)
            del alive[ticket]
            if not late:
                engine.loans[ticket].told(Lent(ticket, 99, chains[ticket]))  # the engine has not heard of it yet
            between.pop()()
            assert told[ticket] == before
        assert places.held == {block for one, count in alive.items() for block in chains[one][:count]}
    assert not places.held and not lends._tickets


def test_the_rest_is_the_engines() -> None:
    def ended(work: Any) -> None:
        raise NotReady("the engine is closed")

    engine = LendingEngine()
    lends = StagedLends(engine, Places(), ended)
    with pytest.raises(NotReady):
        lends.submit(request("refused"), Loan(b"t", lambda news: None))
    assert not lends._lent
    lends.submit(request("own"))
    lends.abort("own")
    lends.news(3, 4)
    assert engine.calls == [("abort", "own"), ("news", (3, 4))]
    lends.submit(request("lent"), Loan(b"t", lambda news: pytest.fail("told")))
    engine.loans[b"t"].told(Lent(b"t", 1, (5,)))


class Others:
    """`Prefills` as a script."""

    def __init__(self) -> None:
        self.out: list[First | Arrived | Absent] = []
        self.woken, self.refuses = 0, False
        self.calls: list[tuple[str, str]] = []
        self.wake = self.woke

    def woke(self) -> None:
        self.woken += 1

    def ask(self, prefill: Prefill) -> bool:
        return not self.refuses

    def kept(self, why: str) -> None:
        self.calls.append(("kept", why))

    def cancel(self, key: str) -> None:
        self.calls.append(("cancel", key))

    def take(self) -> list[First | Arrived | Absent]:
        taken, self.out = self.out, []
        return taken

    def close(self) -> None:
        self.calls.append(("close", ""))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(key: str, known: int, blocks: range) -> Prefill:
    return Prefill(key, request(key), known, tuple(blocks))


def test_what_has_come_is_copied_in_before_it_is_said() -> None:
    """A part a step while others decode; first tokens and failures wait for nothing; known blocks are not touched."""
    others, places, clock = Others(), Places(), Clock()
    prefills = StagedPrefills(others, places, block=8, clock=clock)
    assert prefills.ask(asked("a", 16, range(2 + 2 * AT_ONCE + 1))) and prefills.ask(asked("b", 0, range(200, 202)))
    others.refuses = True
    assert not prefills.ask(asked("c", 0, range(300, 301)))
    places.held = {*range(2, 2 + 2 * AT_ONCE + 1), 200, 201}

    def copied(blocks: Any) -> None:
        places.into_calls.append(list(blocks))
        clock.now += 1.0  # more than its share of the second between two steps

    places.into = copied  # type: ignore[method-assign]
    others.out = [First("b", []), Arrived("a"), Absent("b", "gone")]
    said = []
    for _ in range(3):
        clock.now += 1.0
        said.append(prefills.take())
    assert said == [[First("b", []), Absent("b", "gone")], [], [Arrived("a")]] and others.woken == 2
    assert [len(blocks) for blocks in places.into_calls] == [AT_ONCE, AT_ONCE, 1] and places.into_calls[0][0] == 2
    assert not places.held and prefills.take() == []
    prefills.kept("cached"), prefills.cancel("a"), prefills.close()
    assert others.calls == [("kept", "cached"), ("cancel", "a"), ("close", "")]


def test_where_nobody_waits_all_of_it_is_copied_at_once() -> None:
    others, places, clock = Others(), Places(), Clock()
    prefills = StagedPrefills(others, places, block=8, clock=clock)
    prefills.ask(asked("a", 0, range(100)))
    clock.now += 1.0
    others.out = [Arrived("a")]
    assert prefills.take() == [Arrived("a")] and sum(map(len, places.into_calls)) == 100 and not others.woken
