"""How many drafts pay, and what is drafted by looking the text up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.config_features import SpeculativeConfig
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.buckets import capacity
from rayneuron.engine.sequence import Plan, Sequence, Work
from rayneuron.engine.speculation.costs import VERIFY_MS
from rayneuron.engine.speculation.drafting import NONE, Speculation, speculation
from rayneuron.engine.speculation.lookup import CANDIDATES, LONGEST, Echo, Prediction
from rayneuron.engine.speculation.pace import CHAINED, LOOK_MS, LOOK_SHARE, MOST_OWN, PROBE, SURE, TRIALS, Candidate, Pace, Record
from rayneuron.models.kv import KvSpace
from rayneuron.types import Profile, Request, SamplingParams

MEASURED = ((1, 6.3), (8, 8.3), (16, 11.2), (36, 20.0), (144, 80.0))  # ms by tokens: two cores, SmolLM2
DECODE = ((1, 128, 6.3), (4, 128, 7.1), (16, 128, 11.2), (1, 4096, 12.0), (4, 4096, 20.0), (16, 4096, 60.0))


def measured(tokens=MEASURED) -> Profile:
    sizes = {"batch": (1, 4, 16), "lengths": (128, 4096), "context": (32,), "prefix": (), "chunk": 32}
    return Profile(**sizes, decode=DECODE, prefill=(), tokens=tokens)


def pace(tokens=MEASURED, most: int = 144) -> Pace:
    return Pace(measured(tokens), most)


def warm(one: Pace, *counts: int) -> Pace:
    """Once it knows what steps of so many rows take without drafts: what the profile says."""
    for count in counts:
        one.took(count, 100, 0, one.costs.plain(count, 100))
    return one


def steady(one: Pace, *counts: int) -> Pace:
    """The same, and no step tells it otherwise: what those of a test take hangs on the machine."""
    warm(one, *counts).took = lambda *_: None  # type: ignore[method-assign]
    return one


def planned(one: Pace, candidates: list[Candidate]) -> list[int]:
    """A step's drafts as they are asked for: of rows that may pay alone."""
    assert one.begins(len(candidates), 100)
    for each in candidates:
        each.drafts *= one.hope(each.record) >= one.bar
    return one.choose(candidates, 100) if any(each.drafts for each in candidates) else [0] * len(candidates)


def rows(count: int, own: float | None, kind: int = 4, drafts: int = 8, read: bool = False) -> list[Candidate]:
    return [Candidate(Record(kind, own), drafts, read) for _ in range(count)]


@pytest.mark.parametrize(
    ("count", "own", "length", "chosen"),
    [
        (1, 1.0, 100, 8),  # one row that quotes: all there are
        (1, 0.02, 100, 4),  # half of what the kind promises still pays for one row
        (16, 0.02, 100, 0),  # and for sixteen none does
        (16, 0.02, 4096, 2),  # where reading the context takes most of a step, more tokens cost little
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
    candidates = [*rows(lucky, 1.0), *rows(others, 0.0, kind=2)]
    assert Pace(Profile(**sizes, **known), 144, whole=True).choose(candidates, 100) == [chosen] * len(candidates)
    one = warm(Pace(Profile(**sizes, **known), 144, whole=True), 1, 16)
    assert one.begins(1, 100) and one.bar == 0.0
    idle = [planned(one, rows(16, 0.0)) for _ in range(16 * PROBE)]
    assert {sum(tried) for tried in idle} == {0, 128} and sum(map(any, idle)) <= 4, "tried once in a while, and then all of it"


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
    count, rate = len(candidates), lambda c, place: ((0.6, 0.7, *[0.8] * 6)[place] + 1 - (1 - c.record.own) * 0.8**place) / 2
    tokens, read = float(count), 0.0
    for n, c in zip(chosen, candidates, strict=True):
        worth = 1.0
        for place in range(n):
            worth *= rate(c, place)
            tokens += worth
        read += 0.15 * n * c.read
    added = one.costs.ms[count + sum(chosen)] - one.costs.ms[count] + read
    plain = one.costs.plain(count, length)
    assert tokens / (plain + added + VERIFY_MS) > count / plain
    alike = [(c.record.own, n) for n, c in zip(chosen, candidates, strict=True) if c.drafts == 8 and not c.read]
    assert all(a[1] <= b[1] for a, b in zip(sorted(alike), sorted(alike)[1:], strict=False))


def test_what_was_not_tried_is_heard_of_all_the_same():
    """Sixteen rows of a text in which nothing comes true are left alone; where it begins to repeat itself the first steps tell."""
    one, records = warm(pace(), 16), [Record(4) for _ in range(16)]

    def step(came: bool) -> list[int]:
        for record in records:
            one.heard(record, record.kind, came)
            record.kind = min(record.kind + 1, LONGEST) if came else 4
        return planned(one, [Candidate(record, 8) for record in records])

    bad = [step(False) for _ in range(1000)]
    assert not any(map(any, bad[100:])), "there is nothing to be learnt by trying"
    good = [step(True) for _ in range(40)]
    assert min(good[11]) >= 1 and records[0].own > 0.9
    rates = [(16 + n) / (11.2 + one.costs.added(16, n)) for n in (sum(good[-1]), *range(16, 129, 16))]
    assert rates[0] >= 0.97 * max(rates), "which is as fast as any number of them"


def test_heads_that_are_never_right_are_tried_once_in_a_while():
    """They have nothing to read first, so as often as what is looked up; and once they are right, they are heard again."""
    sizes = {"batch": (1, 16), "lengths": (128,), "context": (32,), "prefix": (), "chunk": 32}
    known = {"decode": ((1, 128, 6.3), (16, 128, 11.2)), "tokens": MEASURED, "prefill": (), "passes": ((1, 0.5), (16, 0.9))}
    one, record = warm(Pace(Profile(**sizes, **known), 144), 1), Record(CHAINED)

    def step(came: bool) -> int:
        assert one.begins(1, 100)
        (chosen,) = one.choose([Candidate(record, 8, behind=0)], 100)
        if chosen:
            one.learn(record, chosen, chosen if came else 0)
        return chosen

    bad = [step(False) for _ in range(400)]
    assert 200 // PROBE - 1 <= sum(n > 0 for n in bad[200:]) <= 200 // PROBE + 1
    good = [step(True) for _ in range(200)]
    assert min(good[-20:]) >= 4


def chosen(one: Pace, own: float | None = None, kind: int = CHAINED) -> int:
    """Drafts of one row that a draft model makes, which has read the text."""
    return one.choose([Candidate(Record(kind, own), 8, behind=0)], 100)[0]


def priced(pass_ms: float) -> Pace:
    sizes = {"batch": (1, 16), "lengths": (128,), "context": (32,), "prefix": (), "chunk": 32}
    known = {"decode": ((1, 128, 6.3), (16, 128, 11.2)), "tokens": MEASURED, "prefill": (), "passes": ((1, pass_ms), (16, 2 * pass_ms))}
    return warm(Pace(Profile(**sizes, **known), 144), 1)


def test_what_a_draft_model_gives_is_seen_by_trying():
    """What it costs seems a little too much before anything is known of it: it is tried all the same, and judged by what becomes of it."""
    for came in (True, False):
        one, tries = priced(5.0), 0
        while n := chosen(one):
            one.learn(Record(CHAINED), n, n if came else 0)
            tries += 1
            if tries == 3 * TRIALS:
                break
        assert tries == 3 * TRIALS if came else 3 < tries < TRIALS
    one = priced(5.0)
    one._trials = 0
    assert chosen(one) == 0, "as it had been from the first"
    assert chosen(priced(7.0)) == 0, "what cannot pay is not tried"


def test_a_draft_model_that_stops_where_it_is_not_sure_may_plan_deeper():
    """As a deep plan seldom makes all its passes: where every second one stops, three are as dear as less than two."""
    one = priced(3.0)
    for kind in (CHAINED, SURE):
        record = Record(kind)
        for _ in range(200):
            one.learn(record, 8, 2)
    assert record.own is None and chosen(one, kind=SURE) > chosen(one, kind=CHAINED) >= 1


STAIRS = ((1, 6.3), (16, 8.4), (17, 9.9), (32, 10.7), (144, 30.0))  # as products of sixteen rows at once take


def test_where_the_first_draft_is_dear_and_the_next_are_not_it_takes_many_or_none():
    few = [*rows(2, 0.5), *rows(14, 0.5, drafts=0)]
    assert sum(pace(STAIRS).choose(few, 100)) == 0
    many = sum(pace(STAIRS).choose(rows(16, 0.1), 100))
    assert 16 <= many <= 20, "as many as its products have room for, and hardly more"


def drive(one: Pace, truth, steps: int, slow: float = 1.0) -> list[int]:
    """Steps of four rows, each of whose drafts come true with a probability that pays by the profile; `truth`: ms that so many add."""
    tried = []
    for _ in range(steps):
        count = sum(planned(one, rows(4, 0.7)))
        one.took(4, 100, count, slow * (7.1 + truth(count)))
        tried.append(count)
    return tried


def test_what_drafts_really_take_is_learnt():
    """Where steps with drafts take longer than the profile says, fewer are tried, in the end none; a machine that is slow for all is not
    taken for that; and when they cost what is said again, it comes to know by its tries."""
    one = warm(pace(), 4)
    said = lambda count: VERIFY_MS * (count > 0) + one.costs.ms[4 + count] - one.costs.ms[4]  # noqa: E731
    assert min(drive(one, said, 50)) > 0
    one.took(4, 100, 0, 3 * 7.1)  # nobody sees that a step is slow before one has none
    assert min(drive(one, said, 20, slow=3.0)) > 0
    one = warm(pace(), 4)
    assert sum(n > 0 for n in drive(one, lambda count: 8 * said(count), 400)) < 60
    assert drive(one, said, 4000)[-1] > 0


def test_a_profile_that_knows_nothing_is_corrected_by_what_steps_take():
    """As one that was measured beside others: what one draft adds and what many add are learnt apart, as is what steps take without."""
    one = pace(((1, 30.0), (8, 31.0), (16, 70.0), (144, 71.0)))
    truth = lambda count: (count > 0) * 0.5 + 0.4 * count  # noqa: E731
    for turn in range(1000):
        count = (0, 1, 4, 12, 32)[turn % 5]
        one.took(4, 100, count, 10.0 + truth(count))
    assert one.costs.plain(4, 100) == pytest.approx(10.0, rel=0.05)
    for count in (1, 4, 12, 32):
        assert one.costs.added(4, count) == pytest.approx(truth(count), rel=0.2), count


def test_more_drafts_than_were_ever_tried_add_what_the_profile_says():
    """Where the first sixteen are far dearer than it says, the next may still be what it says: who took all for dearer would never see."""
    one = warm(pace(), 16)
    said = [one.costs.added(16, n) for n in (16, 32, 64)]
    for _ in range(200):
        one.took(16, 100, 16, 11.2 + 3 * said[0])
    seen = [one.costs.added(16, n) for n in (16, 32, 64)]
    assert seen[0] == pytest.approx(3 * said[0], rel=0.01)
    assert [b - seen[0] for b in seen[1:]] == pytest.approx([b - said[0] for b in said[1:]], rel=0.05)
    assert one.costs.added(16, 4) == pytest.approx(3 * (VERIFY_MS + one.costs.ms[20] - one.costs.ms[16]), rel=0.01), "but fewer are as dear"


def test_what_a_text_tells_counts_at_once_and_is_never_certain():
    """Its first id tells as much as was thought before; and who has always come true may end as any other."""
    one, record = pace(), Record(4)
    one.heard(record, 4, True)
    assert record.own == 0.75
    one.heard(record, 5, False)
    assert record.own == 0.5
    for _ in range(200):
        one.heard(record, LONGEST, True)
    record.kind = LONGEST
    assert record.own > 0.99 and one.hope(record) == pytest.approx((1 + MOST_OWN) / 2, abs=0.01)


def test_where_nobody_knows_what_a_step_takes_it_is_seen_first():
    one = pace()
    assert not one.begins(16, 100)
    assert warm(one, 16).begins(16, 100) and one.begins(14, 100) and not one.begins(8, 100)


@given(st.lists(st.integers(0, 3), min_size=0, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_an_echo_is_what_followed_the_longest_match(ids, least, further, count):
    """As found by trying every place; and what it goes on with stands behind ids that are the text's last ones, and it tells what comes."""
    most = least + further
    grown, before, next_id = Echo(least, most), 0, -1
    for end in range(1, len(ids) + 1):
        told = grown.heard(ids[:end])
        assert not before or (len(told) == 1 and told[0][1] == (next_id == ids[end - 1])), "each id is heard of once"
        before = grown.looks(ids[:end])
        if before:
            next_id = grown.propose(ids[:end], 1)[0]
            agreeing = [p for p in range(1, end) if ids[p] == next_id and ids[max(0, p - before) : p] == ids[:end][-min(p, before) :]]
            assert any(p >= min(before, LONGEST) for p in agreeing) and before >= least
    places = [p for p in range(least, len(ids)) if ids[p - least : p] == ids[len(ids) - least :]][::-1][:CANDIDATES]
    best, longest = None, 0
    for place in places:
        length = least
        while length < min(most, place) and ids[place - length - 1] == ids[len(ids) - length - 1]:
            length += 1
        if length > longest:
            best, longest = place, length
    wanted, fresh = list(ids), Echo(least, most)
    assert fresh.looks(ids) == longest
    if best is not None:
        for i in range(count):
            wanted.append(wanted[best + i])
        assert fresh.propose(ids, count) == tuple(wanted[len(ids) :])


def test_looking_in_vain_costs_little():
    """The more rows a step has and the less it takes, the seldomer each is looked at."""
    one = warm(pace(), 1, 4, 16)
    seen = []
    for count in (1, 4, 16):
        assert one.begins(count, 100)
        seen.append(one.patience)
        assert count * LOOK_MS / one.patience <= 1.5 * LOOK_SHARE * one.costs.plain(count, 100)
    assert seen[0] == 1 and seen == sorted(seen) and seen[2] > 2


def test_rows_are_looked_at_together():
    """What each of sixteen rows has pays only beside what the others have, so nobody is looked at alone; what is tried now and then is
    looked for in all of them."""
    one = warm(pace(), 16)
    looked = []
    for _ in range(2 * PROBE):
        assert one.begins(16, 100)
        looked.append(one.looks)
        one.rest()
    assert looked[:6] == [True, True, False, True, False, False], "seldomer each time"
    seldom = [at for at, looks in enumerate(looked[: PROBE - 1]) if looks]
    assert one.patience > 2 and max(b - a for a, b in zip(seldom, seldom[1:], strict=False)) == one.patience
    assert all(looked[PROBE * n - 1] for n in (1, 2)) and sum(looked) <= 2 * PROBE // one.patience + 5
    assert one.begins(16, 100)
    assert one.choose([Candidate(Record(4, 0.95), 8), *rows(15, 0.95, drafts=0)], 100) == [0] * 16
    assert min(one.choose(rows(16, 0.95), 100)) >= 1


@pytest.mark.parametrize("adaptive", [True, False])
def test_another_most_for_steps_of_so_many_rows(adaptive):
    """vLLM's num_speculative_tokens_per_batch_size: what it does not name has num_speculative_tokens."""
    said = {"num_speculative_tokens": 6, "num_speculative_tokens_per_batch_size": [[2, 3, 2], [4, 16, 0]], "adaptive": adaptive}
    made = speculation(SpeculativeConfig(**said), measured(), capacity(rows=16, length=64, chunk=16, smallest=16))
    params, blocks = SamplingParams(max_tokens=64, temperature=0), Blocks(KvSpace(64, 64, 16, 64))
    tried = {}
    for count in (1, 2, 3, 4, 16, 5):
        asked = [Request(id=str(i), prompt_ids=[1, 2, 3] * 8, params=params) for i in range(count)]
        rows = [Sequence(each, 0, [*each.prompt_ids], seed=0, max_tokens=64, order=i, prompt_len=24) for i, each in enumerate(asked)]
        works = [Work(row, len(row.ids) - 1, 1, True, 0) for row in rows]
        for _ in range(8):
            made.took(Plan("decode", works), 1.0)
        plan = made.draft(Plan("decode", works), blocks)
        tried[count] = max(work.wanted for work in plan.works)
    most = {1: 6, 2: 2, 3: 2, 4: 0, 16: 0, 5: 0}
    assert all(tried[n] <= most[n] for n in most) and tried[1] > 0 and (adaptive or tried == most), tried


def test_who_comes_later_is_looked_at_with_the_others():
    looked: list[int] = []
    made = Speculation(8, lambda sequence, most: (looked.append(sequence.order) or (), 0), warm(pace(), 8, 16))
    params, blocks = SamplingParams(max_tokens=64), Blocks(KvSpace(16, 64, 16, 64))
    asked = [Request(id=str(i), prompt_ids=[1], params=params) for i in range(16)]
    rows = [Sequence(each, 0, [1], seed=0, max_tokens=64, order=i, prompt_len=1) for i, each in enumerate(asked)]
    counts = []
    for step in range(12):
        looked.clear()
        works = [Work(row, len(row.ids) - 1, 1, True, 0) for row in rows[: 16 if step else 8]]
        assert made.draft(Plan("decode", works), blocks).paused == NONE
        counts.append(len(looked))
        for work in works:
            work.sequence.ids.append(step)
    assert counts[0] == 8 and set(counts[1:]) == {0, 16} and 2 <= counts.count(16) <= 4, counts


def test_drafts_that_come_true_make_the_next_likelier():
    """A row that begins to quote tries many at once: who has seen four come expects the fifth more than the first."""
    one = warm(pace(), 1)
    first = planned(one, rows(1, None, kind=4))[0]
    record = Record(4)
    for kind in range(4, 8):
        one.heard(record, kind, True)
    record.kind = 8
    worth = [one._survival(record, 1.0, place) for place in range(8)]
    assert worth == sorted(worth) and first >= 4
    assert planned(one, [Candidate(record, 8)]) == [8]


def test_a_long_text_is_looked_at_in_part():
    """Its first 2,048 ids and its last 8,192, however long it is."""
    rng = random.Random(1)
    ids = [rng.randrange(50_000) for _ in range(30_000)]
    for place, found in ((100, True), (2_000, True), (12_000, False), (29_000, True)):
        text = [*ids, *ids[place : place + 5]]
        one = Echo(3, 4)
        assert bool(one.looks(text)) == found
        assert not found or one.propose(text, 3) == tuple(ids[place + 5 : place + 8])


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
