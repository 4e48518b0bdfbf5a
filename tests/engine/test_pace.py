"""How many drafts pay, and what is drafted by looking the text up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.engine.speculation.lookup import CANDIDATES, Echo, Prediction
from rayneuron.engine.speculation.pace import CHAINED, PROBE, VERIFY_MS, Candidate, Pace, Record
from rayneuron.types import Profile

MEASURED = ((1, 6.3), (8, 8.3), (16, 11.2), (36, 20.0), (144, 80.0))  # ms by tokens: two cores, SmolLM2
DECODE = ((1, 128, 6.3), (4, 128, 7.1), (16, 128, 11.2), (1, 4096, 12.0), (4, 4096, 20.0), (16, 4096, 60.0))


def pace(tokens=MEASURED, most: int = 144) -> Pace:
    sizes = {"batch": (1, 4, 16), "lengths": (128, 4096), "context": (32,), "prefix": (), "chunk": 32}
    return Pace(Profile(**sizes, decode=DECODE, prefill=(), tokens=tokens), most)


def rows(count: int, own: float | None, kind: int = 4, drafts: int = 8, read: bool = False) -> list[Candidate]:
    return [Candidate(Record(kind, own), drafts, read) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "own", "length", "chosen"),
    [
        (1, 1.0, 100, 8),  # one row that quotes: all there are
        (1, 0.02, 100, 4),  # half of what the kind promises still pays for one row
        (16, 0.02, 100, 0),  # and for sixteen none does
        (16, 0.02, 4096, 1),  # where reading the context takes most of a step, more tokens cost little
    ],
)
def test_drafts_by_rows_and_luck(count, own, length, chosen):
    made = pace().choose(rows(count, own), length)
    assert max(made) == chosen or (chosen == 4 and 1 <= made[0] < 8), made


@pytest.mark.parametrize("count", [1, 16])
def test_all_drafts_of_all_rows_are_the_most_it_knows_the_cost_of(count):
    cheap = tuple((n, 6.3) for n, _ in MEASURED)
    assert pace(cheap, most=9 * count).choose(rows(count, 1.0), 100) == [8] * count


@pytest.mark.parametrize(
    ("lucky", "others", "chosen"),
    [
        (1, 0, 8),  # 6 tokens of 8 ms, instead of one of 6.3
        (16, 0, 8),
        (1, 15, 0),  # of the graph of 16 rows: 21 tokens in 20 ms, instead of 16 in 11
        (8, 8, 8),  # and who has no luck goes along, since that costs nothing
        (5, 0, 8),  # five rows run in the graph of sixteen
    ],
)
def test_where_one_draft_costs_what_all_do(lucky, others, chosen):
    """As in a compiled graph: all drafts there are, or none."""
    sizes = {"batch": (1, 16), "lengths": (128,), "context": (32,), "prefix": (), "chunk": 32}
    known = {"decode": ((1, 128, 6.3), (16, 128, 11.2)), "verify": ((1, 8.0), (16, 20.0)), "tokens": MEASURED, "prefill": ()}
    candidates = [*rows(lucky, 1.0), *rows(others, 0.0)]
    assert Pace(Profile(**sizes, **known), 144, whole=True).choose(candidates, 100) == [chosen] * len(candidates)
    one = Pace(Profile(**sizes, **known), 144, whole=True)
    assert one.looks(1, 100) < one.hope(Record(4, 0.0))
    idle = [sum(one.choose(rows(16, 0.0), 100)) for _ in range(8 * PROBE)]
    assert set(idle) == {0, 128} and sum(map(bool, idle)) <= 10, "what does not pay is tried once in a while, and then all of it"


@pytest.mark.parametrize(("count", "own", "chosen"), [(1, 1.0, 8), (16, 1.0, 8), (16, 0.0, 0)])
def test_where_drafts_are_made_in_the_one_graph_all_are_or_none(count, own, chosen):
    """What a pass took by itself, were it known, says nothing: it is part of the graph that verifies."""
    sizes = {"batch": (1, 16), "lengths": (128,), "context": (32,), "prefix": (), "chunk": 32}
    known = {"decode": ((1, 128, 6.3), (16, 128, 11.2)), "verify": ((1, 8.0), (16, 20.0)), "tokens": MEASURED, "prefill": ()}
    one = Pace(Profile(**sizes, **known, passes=((1, 50.0), (16, 90.0))), 144, whole=True)
    assert one.choose([Candidate(Record(CHAINED, own), 8, False, 0) for _ in range(count)], 100) == [chosen] * count


ROWS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), st.booleans()), min_size=1, max_size=16)


@given(ROWS, st.sampled_from([1, 128, 900, 4096]))
def test_by_its_own_reckoning_it_is_never_worse_than_without(given_rows, length):
    """And in a row with no luck there are no more drafts than in one with more."""
    one = pace()
    candidates = [Candidate(Record(4, own), drafts, read) for own, drafts, read in given_rows]
    chosen = one.choose(candidates, length)
    assert all(0 <= n <= c.drafts for n, c in zip(chosen, candidates, strict=True))
    if not sum(chosen):
        return
    count, rate = len(candidates), lambda c, place: ((0.7 if place else 0.6) + c.record.own) / 2
    tokens, read = float(count), 0.0
    for n, c in zip(chosen, candidates, strict=True):
        worth = 1.0
        for place in range(n):
            worth *= rate(c, place)
            tokens += worth
        read += 0.15 * n * c.read
    added = one._ms[count + sum(chosen)] - one._ms[count] + read
    plain = one._decode.at(count, length)
    assert tokens / (plain + added + VERIFY_MS) > count / plain
    alike = [(c.record.own, n) for n, c in zip(chosen, candidates, strict=True) if c.drafts == 8 and not c.read]
    assert all(a[1] <= b[1] for a, b in zip(sorted(alike), sorted(alike)[1:], strict=False))


def test_a_text_that_begins_to_repeat_itself_is_found_out():
    """Sixteen rows whose drafts never came true are left alone but for one try in 32 steps; when they do, it soon tries all."""
    one, record = pace(), Record(4)
    others = [Record(4, 0.0) for _ in range(15)]

    def step(came: bool) -> int:
        drafts = 8 if one.hope(record) > one.looks(16, 100) else 0
        chosen = one.choose([Candidate(record, drafts), *(Candidate(r, 0) for r in others)], 100)[0]
        if chosen:
            one.learn(record, chosen, chosen if came else 0)
        return chosen

    bad = [step(False) for _ in range(400)]
    assert sum(n > 0 for n in bad[200:]) <= 200 // PROBE + 1 and max(bad[200:]) <= 1
    good = [step(True) for _ in range(80)]
    assert good[-1] == 8


def test_heads_that_are_never_right_are_tried_once_in_a_while():
    """They have nothing to read first, so as often as what is looked up; and once they are right, they are heard again."""
    sizes = {"batch": (1, 16), "lengths": (128,), "context": (32,), "prefix": (), "chunk": 32}
    one = Pace(Profile(**sizes, decode=((1, 128, 6.3), (16, 128, 11.2)), prefill=(), tokens=MEASURED, passes=((1, 0.5), (16, 0.9))), 144)
    record = Record(CHAINED)

    def step(came: bool) -> int:
        (chosen,) = one.choose([Candidate(record, 8, behind=0)], 100)
        if chosen:
            one.learn(record, chosen, chosen if came else 0)
        return chosen

    bad = [step(False) for _ in range(400)]
    assert 200 // PROBE - 1 <= sum(n > 0 for n in bad[200:]) <= 200 // PROBE + 1
    good = [step(True) for _ in range(200)]
    assert min(good[-20:]) >= 4


STAIRS = ((1, 6.3), (16, 8.4), (17, 9.9), (32, 10.7), (144, 30.0))  # as products of sixteen rows at once take


def test_where_the_first_draft_is_dear_and_the_next_are_not_it_takes_many_or_none():
    few = [*rows(2, 0.5), *rows(14, 0.5, drafts=0)]
    assert sum(pace(STAIRS).choose(few, 100)) == 0
    many = sum(pace(STAIRS).choose(rows(16, 0.1), 100))
    assert 16 <= many <= 20, "as many as its products have room for, and hardly more"


def test_what_drafts_really_take_is_learnt_and_forgotten():
    """Where steps with drafts take longer than the profile says, fewer are tried, in the end none; a machine that is slow for all is not
    taken for that; and when they cost what is said again, it comes to know by its tries."""
    one = pace()

    def step(dear: float, slow: float = 1.0) -> int:
        candidates = rows(4, 0.3, drafts=8 if one.looks(4, 100) < 0.45 else 0)
        tried = sum(one.choose(candidates, 100))
        plain = one._decode.at(4, 100)
        one.took(4, 100, tried > 0, slow * (plain + dear * (one._ms[4 + tried] - one._ms[4])))
        return tried

    assert min(step(1.0) for _ in range(50)) > 0
    assert min(step(1.0, slow=3.0) for _ in range(3)) > 0  # nobody has seen yet that a step without is as slow
    assert sum(step(5.0) > 0 for _ in range(400)) < 100
    assert [step(1.0, slow=3.0) for _ in range(1000)][-1] > 0


def test_looking_in_vain_costs_little():
    """Sixteen rows that find nothing are looked at in every third step at most, four in every second, one in all."""
    for count, most in ((16, 100), (4, 180), (1, 300)):
        one, looks = pace(), 0
        for _ in range(300):
            looks += one.looks(count, 100) < 1.0
            assert not any(one.choose(rows(count, None, drafts=0), 100))
        assert looks <= most + 300 // PROBE + 4, (count, looks)


@given(st.lists(st.integers(0, 3), min_size=0, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_an_echo_is_what_followed_the_longest_match(ids, least, further, count):
    """As found by trying every place; and whether it has seen the text grow or not makes no difference."""
    most = least + further
    grown = Echo(least, most)
    for end in range(0, len(ids), 3):
        grown.propose(ids[:end], count)
    places = [p for p in range(least, len(ids)) if ids[p - least : p] == ids[len(ids) - least :]][::-1][:CANDIDATES]
    best, longest = None, 0
    for place in places:
        length = least
        while length < min(most, place) and ids[place - length - 1] == ids[len(ids) - length - 1]:
            length += 1
        if length > longest:
            best, longest = place, length
    wanted = list(ids)
    if best is not None:
        for i in range(count):
            wanted.append(wanted[best + i])
    made = (tuple(wanted[len(ids) :]), longest)
    assert grown.propose(ids, count) == Echo(least, most).propose(ids, count) == made


def test_a_long_text_is_looked_at_in_part():
    """Its first 2,048 ids and its last 8,192, however long it is."""
    rng = random.Random(1)
    ids = [rng.randrange(50_000) for _ in range(30_000)]
    for place, found in ((100, True), (2_000, True), (12_000, False), (29_000, True)):
        text = [*ids, *ids[place : place + 5]]
        assert Echo(3, 4).propose(text, 3)[0] == (tuple(ids[place + 5 : place + 8]) if found else ())


def test_a_prediction_is_followed_left_and_found_again():
    predicted = list(range(100, 140))
    text, one = [1, 2, 3, 100, 101], Prediction(predicted, 2, 4)
    assert one.propose(text, 3, 4) == (102, 103, 104, 105)
    text += [102, 7]  # something else
    assert one.propose(text, 3, 4) == ()
    text += [120, 121]  # further on
    assert one.propose(text, 3, 4) == (122, 123, 124, 125)
    text += list(range(122, 140))
    assert one.propose(text, 3, 4) == ()
