"""Which models are awake: packing with those in the way against every way there is, and a host driven by random demand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rayneuron.policies import packing
from rayneuron.policies.packing import Blocker
from rayneuron.policies.scaling import decide, replicas, wanted_seats
from rayneuron.policies.seats import COMING, HostNode, ScalingLimits, Seat, Wish
from tests.drawn import examples

LIMITS = ScalingLimits()
INF2 = (1, 2, 4, 8, 12, 24)


def node(free: set[int] | None = None, total: int = 24) -> HostNode:
    return HostNode("n", total, frozenset(range(total) if free is None else free), tuple(s for s in INF2 if s <= total))


def ready(key: str, first: int, size: int, **more: float) -> Seat:
    return Seat(key, "n", first, size, "ready", age_s=more.pop("age_s", 1000.0), quiet_s=more.pop("quiet_s", 1000.0), **more)


# packing.clear


def every_way(free: set[int], held: list[Blocker], size: int, total: int) -> float:
    """The least cost over all runs, all choices of who moves, and all places they may move to."""
    best = math.inf
    ours = free | {core for one in held for core in range(one.first, one.first + one.size)}
    for start in range(0, total - size + 1, size):
        run = set(range(start, start + size))
        if not run <= ours:
            continue
        touched = [one for one in held if run & set(range(one.first, one.first + one.size))]
        places = [[None, *packing.runs(free - run, one.size, total)] for one in touched]
        for chosen in itertools.product(*places):
            cores = [set(range(to, to + one.size)) for one, to in zip(touched, chosen, strict=True) if to is not None]
            if sum(map(len, cores)) == len(set().union(*cores)):
                cost = sum(one.away if to is None else one.elsewhere for one, to in zip(touched, chosen, strict=True))
                best = min(best, cost)
    return best


@st.composite
def machines(draw: st.DrawFn) -> tuple[set[int], list[Blocker], int]:
    """Eight cores: some runs held, some cores foreign."""
    free, held = set(range(8)), []
    for key in range(draw(st.integers(0, 5))):
        size = draw(st.sampled_from((1, 2, 4)))
        spots = packing.runs(free, size, 8)
        if spots:
            first = draw(st.sampled_from(spots))
            free -= set(range(first, first + size))
            costs = st.sampled_from((0.0, 1.0, 2.5, 7.0, math.inf))
            held.append(Blocker(str(key), first, size, draw(costs), draw(costs)))
    free -= draw(st.sets(st.integers(0, 7), max_size=3))
    return free, held, draw(st.sampled_from((1, 2, 4, 8)))


@given(machines())
@examples(400)
def test_room_is_made_at_the_least_cost_there_is(case: tuple[set[int], list[Blocker], int]) -> None:
    free, held, size = case
    made = packing.clear(free, held, size, 8, (1, 2, 4, 8))
    best = every_way(free, held, size, 8)
    assert (made.cost if made is not None else math.inf) == best
    if made is None:
        return
    run = set(range(made.start, made.start + size))
    touched = {one.key for one in held if run & set(range(one.first, one.first + one.size))}
    assert made.start % size == 0 and touched == {*made.away, *(key for key, _ in made.moved)}
    targets = [set(range(to, to + one.size)) for one in held for key, to in made.moved if key == one.key]
    assert all(target <= free - run for target in targets) and sum(map(len, targets)) == len(set().union(*targets))


def test_of_equal_costs_the_run_is_taken_that_leaves_the_larger_runs() -> None:
    held = [Blocker(str(first), first, 4, 1.0) for first in range(0, 24, 4)]
    made = packing.clear(set(), held[1:], 4, 24, INF2)
    assert made is not None and made.start == 4, "0-3 is foreign: 12-23 stays whole"
    free = set(range(8, 16))
    made = packing.clear(free, [Blocker("a", 0, 8, 5.0, 2.0), Blocker("b", 16, 8, 5.0, 2.0)], 12, 24, INF2)
    assert made is None or made.cost <= 5.0


# decide: hand-worked


def test_a_request_wakes_its_model_and_idleness_puts_it_to_sleep() -> None:
    asleep = Wish("m", 8, waiting=1)
    made = decide([node()], [asleep], LIMITS)
    assert [(b.model, b.first, b.size) for b in made.bring] == [("m", 0, 8)] and made.eta_s == {"m": 60.0}
    awake = replace(asleep, waiting=0, seats=(ready("m.0", 0, 8, quiet_s=301.0),), quiet_s=301.0)
    made = decide([node(set(range(8, 24)))], [awake], LIMITS)
    assert [(d.key, d.why) for d in made.dismiss] == [("m.0", "idle")]
    assert not decide([node()], [replace(awake, quiet_s=299.0)], LIMITS).dismiss
    assert not decide([node()], [replace(awake, min=1)], LIMITS).dismiss
    assert not decide([node()], [replace(awake, pinned=True)], LIMITS).dismiss
    young = replace(awake, seats=(ready("m.0", 0, 8, age_s=30.0),))
    assert not decide([node()], [young], LIMITS).dismiss


def test_who_makes_room() -> None:
    seats = [Wish(f"m{i}", 8, (ready(f"m{i}.0", 8 * i, 8),), rate=rate, quiet_s=100.0) for i, rate in enumerate((0.1, 0.0001, 0.1))]
    wants = Wish("x", 8, waiting=1, oldest_s=1.0)
    made = decide([node(set())], [*seats, wants], LIMITS)
    assert [d.key for d in made.dismiss] == ["m1.0"] and [(b.model, b.first) for b in made.bring] == [("x", 8)]
    pinned = [replace(w, pinned=True) for w in seats]
    made = decide([node(set())], [*pinned, wants], LIMITS)
    assert not made.dismiss and not made.bring and made.eta_s["x"] == math.inf and "no run of 8 cores" in made.reason["x"]
    young = [replace(w, seats=(replace(w.seats[0], age_s=20.0),)) for w in seats]
    made = decide([node(set())], [*young, wants], LIMITS)
    assert not made.dismiss and made.eta_s["x"] == 40.0 + 60.0, "the youngest may go in 40 s"
    hot = [replace(w, rate=1.0) for w in seats]
    assert not decide([node(set())], [*hot, wants], LIMITS).dismiss, "what is in use stays, until somebody has waited long enough"
    assert not decide([node(set())], [*hot, replace(wants, oldest_s=209.0)], LIMITS).dismiss, "1.5 times 3 missed starts of a minute"
    assert decide([node(set())], [*hot, replace(wants, oldest_s=211.0)], LIMITS).dismiss
    assert decide([node(set())], [*hot, replace(wants, priority=1)], LIMITS).dismiss
    above = [replace(w, priority=1, seats=(replace(w.seats[0], busy_s=1.0),)) for w in hot]
    assert not decide([node(set())], [*above, replace(wants, oldest_s=1e9)], LIMITS).dismiss


def test_a_seat_in_the_middle_is_moved_for_a_large_one() -> None:
    """A TP 8 on 8-15 kills both runs of 12; where it fits elsewhere it goes on there, and only then leaves."""
    middle = Wish("small", 8, (ready("small.0", 8, 8),), rate=1.0, quiet_s=1.0)
    large = Wish("large", 12, waiting=1, oldest_s=100.0)
    made = decide([node(set(range(24)) - set(range(8, 16)))], [middle, large], LIMITS)
    assert not made.dismiss and [(b.model, b.first, b.instead) for b in made.bring] == [("small", 16, "small.0"), ("large", 0, None)]
    idle = replace(middle, rate=0.0, quiet_s=100.0)
    made = decide([node(set(range(24)) - set(range(8, 16)))], [idle, replace(large, waiting=0)], LIMITS)
    assert [(b.model, b.instead) for b in made.bring] == [("small", "small.0")], "in the background, where nobody waits"
    assert not decide([node(set(range(24)) - set(range(8, 16)))], [idle, replace(large, waiting=0)], LIMITS, since_move_s=5.0).bring


def test_how_many_replicas() -> None:
    assert [wanted_seats(Wish("m", 2, max=4, waiting=1, backlog_s=b), LIMITS) for b in (0.0, 2.0, 2.1, 100.0)] == [1, 1, 2, 4]
    assert replicas([500, 1500], [0.1, 0.2], 1000, 1, 8) == 2 and replicas([0, 0], [0.1, 0.95], 1000, 1, 8) == 3
    assert replicas([], [], 1000, 2, 8) == 2 and replicas([9e9], [0.1], 1000, 1, 3) == 3


# decide: every state of a small host, and a host that lives


SIZES = (2, 4, 8, 12)


def check(wishes: list[Wish], made: object, nodes: list[HostNode], limits: ScalingLimits = LIMITS) -> None:
    """What must hold of any decision."""
    by_key = {s.key: (w, s) for w in wishes for s in w.seats}
    stay = {s.key: set(s.cores) for w in wishes for s in w.seats if s.state in (*COMING, "ready")}
    for gone in made.dismiss:
        owner, seat = by_key[gone.key]
        assert seat.state in ("ready", "moving")
        stay.pop(gone.key, None)
        if gone.why.startswith("room"):
            assert not owner.pinned and seat.age_s >= limits.min_life_s and len(owner.standing) > owner.least
    for bring in made.bring:
        stay.pop(bring.instead or "", None)
    taken = [*stay.values(), *(set(range(b.first, b.first + b.size)) for b in made.bring)]
    assert sum(map(len, taken)) == len(set().union(*taken)), "never two on one core"
    given = {n.name: set(n.free) | {c for w in wishes for s in w.seats if s.node == n.name for c in s.cores} for n in nodes}
    for bring in made.bring:
        assert bring.first % bring.size == 0 and set(range(bring.first, bring.first + bring.size)) <= given[bring.node], "one run, ours"


def test_every_state_of_four_models_on_24_cores() -> None:
    """Each of four models asleep, wanted, awake at any of its places, young or old, busy or idle, pinned or not."""
    places = [[(None, waiting) for waiting in (0, 1)] + [(first, 0) for first in range(0, 25 - size, size)] for size in SIZES]
    seen = 0
    for chosen in itertools.product(*places):
        cores = [set(range(first, first + size)) for size, (first, _) in zip(SIZES, chosen, strict=True) if first is not None]
        free = set(range(24)).difference(*cores)
        if len(free) + sum(map(len, cores)) != 24:
            continue
        for kind in range(4):
            seen += 1
            wishes = [
                Wish(
                    f"m{size}", size, () if first is None else (ready(f"m{size}.0", first, size, age_s=1000.0 if kind != 1 else 5.0,
                    quiet_s=0.0 if kind == 2 else 1000.0, busy_s=3.0 if kind == 2 else 0.0),),
                    waiting=waiting, oldest_s=1000.0, quiet_s=5.0, pinned=kind == 3 and size == 4, rate=0.01,
                )
                for size, (first, waiting) in zip(SIZES, chosen, strict=True)
            ]  # fmt: skip
            made = decide([node(free)], wishes, LIMITS)
            check(wishes, made, [node(free)])
            if kind == 0:  # all old, idle and nobody's: whoever waits may come, save where another has come before
                for wish in wishes:
                    assert not wish.waiting or made.bring or sum(w.waiting for w in wishes) > 1
    assert seen == 3472
