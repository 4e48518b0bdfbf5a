"""The desk: books that balance under random traces, verdicts, and choices as good as looking at everybody."""

from __future__ import annotations

import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rayneuron.news import KvNews, Pressure, Stored
from rayneuron.policies import choice
from rayneuron.policies.choice import Chooser, GatewayAsk
from rayneuron.policies.cost import LATER, Costs
from rayneuron.policies.desk import Admitted, GatewayDesk, TurnedAway
from rayneuron.policies.desk_limits import DeskLimits
from rayneuron.policies.fairness import AccountShare
from rayneuron.policies.known_worker import KnownWorker
from rayneuron.types import Profile
from tests.drawn import examples
from tests.policies.profiles import engine, profile

CAPACITY = engine(rows=8, length=4096, chunk=512)
TIMES = profile(CAPACITY)
IDLE = Pressure(slots_free=8, kv_free=32_768)


def desk(workers: int = 2, seed: int = 0, **limits: float) -> GatewayDesk:
    made = GatewayDesk(DeskLimits(**limits), Random(seed), {"capped": AccountShare(max_running=1, max_waiting=2)})  # type: ignore[arg-type]
    for number in range(workers):
        made.join(number, f"r{number}", TIMES, 32_768, IDLE, 0.0)
    return made


def ask(key: int, prompt: int = 100, account: str = "", **more: object) -> GatewayAsk:
    return GatewayAsk(key, account, prompt, 50, **more)  # type: ignore[arg-type]


def chain(blocks: int, alike: int, key: int) -> tuple[bytes, ...]:
    """Hashes of a prompt whose first blocks are those of all others."""
    return tuple((i if i < alike else 1000 * key + i).to_bytes(8, "little") for i in range(blocks))


@examples(80)
@given(st.integers(0, 10**6))
def test_no_request_is_lost_or_sent_twice_and_the_books_balance(seed: int) -> None:
    """Against a plain account of who is where: workers come, say how they are, go silent, leave and die; orders come back."""
    random = Random(seed)
    made = desk(3, seed, max_wait_s=1e6)
    workers, born, now, key = {0, 1, 2}, 3, 0.0, 0
    waiting: set[int] = set()
    sent: dict[int, tuple[int, int]] = {}  # key: worker, number
    orders: dict[int, int] = {}
    for _ in range(150):
        now += random.expovariate(20)
        what = random.random()
        if what < 0.35:
            key += 1
            blocks, alike = random.randint(0, 80), random.randint(0, 80)
            hashes = chain(blocks, alike, key)
            more = {"again": random.random() < 0.1, "hashes": hashes, "block": 16}
            verdict = made.offer(ask(key, random.randint(1, 3000), random.choice("abc"), **more), now)
            assert isinstance(verdict, Admitted)
            waiting.add(key)
        elif what < 0.5:
            worker = random.choice(sorted(workers))
            busy = random.random()
            load = Pressure(random.randint(0, orders.get(worker, 0)), 500 * busy, int(8 * busy), 300, 8 - int(8 * busy), 100 * busy, 30_000)
            made.heard(worker, load, now)
        elif what < 0.65 and (waiting or sent):
            gone = random.choice(sorted({*waiting, *sent}))
            made.ended(gone, random.randint(0, 50), now)
            waiting.discard(gone)
            sent.pop(gone, None)
        elif what < 0.72 and sent:
            back = random.choice(sorted(sent))
            made.back(back, now)
            del sent[back]
            waiting.add(back)
        elif what < 0.78:
            worker = random.choice(sorted(workers))
            workers.discard(worker)
            assert made.lost(worker, now) == sorted(k for k, (w, _) in sent.items() if w == worker)
            for k in [k for k, (w, _) in sent.items() if w == worker]:
                del sent[k]  # what is left of it is another call's
            workers.add(born)
            made.join(born, f"r{born}", TIMES, 32_768, IDLE, now)
            born += 1
        elif what < 0.8:
            made.leaving(random.choice(sorted(workers)), now)
        for send in made.next(now):
            assert send.key in waiting and send.worker in workers, "sent twice, or to nobody"
            orders[send.worker] = orders.get(send.worker, 0) + 1
            assert send.number == orders[send.worker]
            waiting.discard(send.key)
            sent[send.key] = send.worker, send.number
        assert made.open["calls"] == len(waiting) + len(sent)
    for worker in workers:
        made.heard(worker, Pressure(orders.get(worker, 0), slots_free=8, kv_free=32_768), now)
    for _ in range(len(waiting) + 1):
        now += 1
        for send in made.next(now):
            waiting.discard(send.key)
            made.heard(send.worker, Pressure(send.number, slots_free=8, kv_free=32_768), now)
            made.ended(send.key, 1, now)
            sent.pop(send.key, None)
    assert not waiting, "a request waits for ever before idle replicas"
    for left in list(sent):
        made.ended(left, 1, now)
    assert made.open == {"calls": 0, "waiting": 0, "bookings": 0} and not made.chooser.coming


def test_who_begins_like_those_before_it_waits_for_the_rest_of_them_alone() -> None:
    """Nobody has the common beginning yet; the first to compute it does so for all, and that is no reason to refuse the others."""

    def starts(alike: int) -> list[float]:
        made, found = desk(1, max_wait_s=1e6), []
        for key in range(8):
            verdict = made.offer(ask(key, 1030, hashes=chain(64, alike, key + 1), block=16), 0.0)
            assert isinstance(verdict, Admitted)
            found.append(verdict.start_s)
        return found

    alone, alike = starts(0), starts(60)
    assert alike[:2] == alone[:2], "the second waits for the first either way"
    whole_s, rest_s = alone[7] - alone[6], alike[7] - alike[6]
    assert 0 < rest_s < 0.7 * whole_s and alike[7] < alone[5]  # decoding is what all have to do


def test_a_request_waits_here_until_some_replica_has_little_to_do() -> None:
    made = desk(2, admit_ms=200.0)
    for worker in (0, 1):
        made.heard(worker, Pressure(backlog_ms=900.0, rows=4, longest=50, slots_free=4, kv_free=9999), 0.0)
    made.offer(ask(1), 0.0)
    assert made.next(0.0) == [] and made.next(0.6) == []
    (send,) = made.next(0.75)  # in 150 ms it would begin: no news was needed for that
    assert send.waited_s == 0.75 and send.number == 1


def test_bookings_are_dropped_by_number_and_nothing_else() -> None:
    made = desk(1)
    for key in (1, 2, 3):
        made.offer(ask(key, 2000), 0.0)
    assert [send.number for send in made.next(0.0)] == [1]  # the others would queue behind it for too long
    assert made.open["bookings"] == 1
    made.heard(0, Pressure(0, slots_free=8, kv_free=32_768), 0.4)  # it has not heard of the order yet
    assert made.open["bookings"] == 1 and made.next(0.4) == []
    made.heard(0, Pressure(1, slots_free=7, rows=1, kv_free=30_000), 0.5)
    assert made.open["bookings"] == 0 and [send.number for send in made.next(0.5)] == [2]


def test_verdicts() -> None:
    made = desk(1, max_wait_s=2.0)
    assert isinstance(GatewayDesk(DeskLimits(), Random(0)).offer(ask(1), 0.0), TurnedAway)
    made.heard(0, Pressure(backlog_ms=1500.0, rows=8, longest=50, slots_free=0, slot_ms=100.0, kv_free=9999), 0.0)
    verdict = made.offer(ask(1), 0.0)
    assert isinstance(verdict, Admitted) and 1.5 <= verdict.start_s <= 1.7
    late = made.offer(ask(2, left_s=1.0), 0.0)
    assert isinstance(late, TurnedAway) and (late.status, late.reason) == (429, "deadline") and 1.5 <= late.retry_s <= 1.9
    for key in range(3, 20):
        verdict = made.offer(ask(key, 1000), 0.0)
        if isinstance(verdict, TurnedAway):
            break
    assert isinstance(verdict, TurnedAway) and verdict.reason == "capacity" and 2.0 < verdict.retry_s < 3.0
    assert isinstance(made.offer(ask(99, again=True), 0.0), Admitted)  # what was begun is never refused
    two = [made.offer(ask(100 + i, 1, "capped"), 0.0) for i in range(3)]
    assert [isinstance(v, Admitted) for v in two][:1] == [False] or isinstance(two[2], TurnedAway)


def test_an_accounts_own_limits() -> None:
    made = desk(1)
    verdicts = [made.offer(ask(key, 10, "capped"), 0.0) for key in range(3)]
    assert isinstance(verdicts[2], TurnedAway) and verdicts[2].reason == "account"
    assert [send.key for send in made.next(0.0)] == [0]  # one at a time
    made.ended(0, 5, 0.1)
    assert [send.key for send in made.next(0.1)] == [1]


def test_who_acknowledges_nothing_is_avoided_and_then_given_up() -> None:
    made = desk(2)
    made.offer(ask(1), 0.0)
    (send,) = made.next(0.0)
    assert made.overdue(0.9) == []
    assert made.overdue(1.1) == []
    for key in range(2, 6):
        made.offer(ask(key), 1.1)
    assert {s.worker for s in made.next(1.1)} == {1 - send.worker}
    assert send.worker in made.overdue(3.1)
    assert made.lost(send.worker, 3.1) == [1] and made.lost(send.worker, 3.2) == []
    made.heard(send.worker, IDLE, 3.3)  # nobody: harmless
    assert made.events(1 - send.worker, KvNews(1, 1, [[Stored(b"", [b"x" * 16])]]))


def test_what_came_back_goes_first_a_little_later() -> None:
    made = desk(1)
    made.offer(ask(1), 0.0)
    made.next(0.0)
    made.back(1, 0.1)
    for key in (2, 3):
        made.offer(ask(key), 0.1)
    assert [send.key for send in made.next(0.11)] == [2, 3]
    assert [send.key for send in made.next(0.16)] == [1]


def test_it_says_when_to_ask_it_again() -> None:
    """As some replica will begin the next, whatever else is heard; never for what only news can change."""
    made = desk(1, admit_ms=100.0)
    assert made.due_s == math.inf
    made.heard(0, Pressure(slots_free=8, kv_free=32_768, backlog_ms=130.0), 0.0)
    made.offer(ask(1), 0.0)
    assert made.next(0.0) == [] and made.due_s == pytest.approx(0.03)
    assert made.next(0.02) == [] and [send.key for send in made.next(made.due_s + 1e-6)] == [1] and made.due_s == math.inf
    made.back(1, 1.0)
    assert made.next(1.0) == [] and made.due_s == pytest.approx(1.05) and len(made.next(1.051)) == 1
    for key in (2, 3):
        made.offer(ask(key, account="capped"), 2.0)
    made.heard(0, Pressure(2, slots_free=8, kv_free=32_768), 2.0)
    assert len(made.next(2.0)) == 1 and made.open["waiting"] == 1 and made.due_s == math.inf, "the other one's end is heard of"


def test_the_header_says_why() -> None:
    made = desk(2)
    hashes = tuple(bytes([i]) * 16 for i in range(16))
    made.events(1, KvNews(1, 1, [[Stored(b"", list(hashes))]]))
    made.offer(GatewayAsk(1, "", 1100, 20, hashes=hashes, block=64), 0.0)
    (send,) = made.next(0.0)
    line = send.terms.line(send.waited_s)
    assert line.startswith("replica=r1; cost=") and "overlap=1024/1100; of=2; second=r0+" in line and line.endswith("why=prefix")
    assert list(made.recent) == [send]


def test_who_is_not_chosen_since_its_first_token_would_be_late_is_told_of_all_the_same() -> None:
    """A busy replica was looked at as well; and one where less is lost, which is said."""
    made = desk(2)
    made.heard(0, Pressure(rows=1, longest=100, slots_free=15, kv_free=32_768), 0.0)
    made.heard(1, Pressure(rows=1, longest=100, slots_free=15, kv_free=32_768, backlog_ms=400.0), 0.0)
    made.offer(ask(1), 0.0)
    (send,) = made.next(0.0)
    assert (send.terms.name, send.terms.of) == ("r0", 2) and send.terms.second is not None and send.terms.second[1] > 300
    worse = GatewayDesk(DeskLimits(), Random(0))
    for number, prompt_ms in ((0, 1.0), (1, 3.0)):  # a first token sooner, and a slow row ever after
        prefill = tuple((rows, tokens, length, prompt_ms) for rows, tokens, length, _ in TIMES.prefill)
        decode = tuple((rows, length, 3.0 - prompt_ms + 0.5 + rows) for rows, length, _ in TIMES.decode)
        worse.join(number, f"r{number}", replace(TIMES, prefill=prefill, decode=decode), 32_768, IDLE, 0.0)
    worse.offer(ask(1), 0.0)
    (send,) = worse.next(0.0)
    assert send.terms.name == "r0" and send.terms.of == 2 and send.terms.second is not None and send.terms.second[1] < 0
    assert f"of=2; second=r1{send.terms.second[1]:.1f}; " in send.terms.line(0.0)


def test_sessions_come_back_to_where_they_were() -> None:
    made = desk(8)
    made.offer(ask(1, 1000, session="s"), 0.0)
    (first,) = made.next(0.0)
    made.heard(first.worker, Pressure(1, slots_free=8, kv_free=32_768), 0.5)
    made.ended(1, 50, 0.5)
    made.offer(ask(2, 1200, session="s"), 1.0)
    (send,) = made.next(1.0)
    assert send.worker == first.worker and send.terms.overlap == 1050 and send.terms.why == "session"
    made.ended(2, 50, 2.0)
    made.offer(ask(3, 1200, session="s"), 1000.0)  # nobody keeps it for so long
    assert made.next(1000.0)[0].terms.overlap == 0


def test_without_news_prompts_alike_go_to_one_replica_and_every_gateway_finds_the_same() -> None:
    chosen = []
    for seed in range(4):
        made = desk(16, seed)
        for key in range(20):
            made.offer(GatewayAsk(key, "", 600, 10, hashes=tuple(bytes([key, i]) * 8 for i in range(8)), block=64), 0.0)
        chosen.append({send.key: send.worker for send in made.next(0.0) if send.terms.why == "ring"})
    for one in chosen[1:]:
        alike = [one[key] == worker for key, worker in chosen[0].items() if key in one]
        assert len(alike) >= 10 and statistics.mean(alike) >= 0.7  # where one had no more to do than most, in either order


def test_goals_pack_and_are_met_where_they_can_be() -> None:
    made = desk(3)
    for worker, rows in ((0, 0), (1, 3), (2, 7)):
        made.heard(worker, Pressure(backlog_ms=40.0 * rows, rows=rows, longest=100, slots_free=8 - rows, kv_free=30_000), 0.0)
    for key, (ttft_ms, worker) in enumerate([(400.0, 2), (200.0, 1), (60.0, 0), (1.0, 0)]):
        made.offer(ask(key, 100, ttft_ms=ttft_ms), 0.0)
        (send,) = made.next(0.0)
        assert send.worker == worker and send.terms.why == "slo", key
        made.ended(key, 0, 0.0)


def fleet(random: Random, workers: int) -> tuple[Chooser, dict[int, KnownWorker]]:
    chooser = Chooser(Random(random.random()))
    kinds: list[Profile] = [profile(CAPACITY, speed=s) for s in ((1.0,) if random.random() < 0.7 else (1.0, 2.0))]
    costs = [Costs(kind) for kind in kinds]
    for number in range(workers):
        rows, mean = random.randint(0, 8), random.choice([0.0, 50.0, 400.0])
        backlog = random.expovariate(1 / mean) if mean else 0.0
        load = Pressure(0, backlog, rows, random.randint(1, 4000) if rows else 0, 8 - rows, random.expovariate(1 / 100), 32_768)
        worker = KnownWorker(number, f"r{number}", random.choice(costs), 32_768, load, 0.0)
        chooser.workers.join(worker)
        chooser.workers.weigh(worker, 0.0)
        chooser.hear(number, KvNews(1, 1, [[Stored(b"", [b"none" + number.to_bytes(12, "little")])]]))
    return chooser, chooser.workers.all


def cost(worker: KnownWorker, asked: GatewayAsk, overlap: int, output: float) -> float:
    """What is promised of the choice, told plainly."""
    new = max(1, asked.prompt - overlap)
    added = LATER * worker.costs.added_ms(worker.rows, worker.load.longest, asked.prompt, output)
    return worker.queue_ms(0.0) + worker.costs.prefill_ms(new, asked.prompt - new, worker.rows, worker.load.longest) + added


@pytest.mark.parametrize("workers", [1, 3, 20, 200, 1000])
def test_looking_at_some_is_as_good_as_looking_at_all(workers: int) -> None:
    random, regrets = Random(workers), []
    for _ in range(2):
        chooser, known = fleet(random, workers)
        prefixes = [[random.randbytes(16) for _ in range(48)] for _ in range(30)]
        overlaps: dict[int, dict[int, int]] = {}
        for i, hashes in enumerate(prefixes):
            for number in random.sample(sorted(known), min(workers, random.choice([1, 2, 20, 300]))):
                overlaps.setdefault(i, {})[number] = depth = random.randint(1, 48)
                chooser.hear(number, KvNews(1, chooser.index._known[number][1] + 1, [[Stored(b"", hashes[:depth])]]))
        for _ in range(40):
            which = random.randrange(40)
            prompt = random.randint(48 * 64, 4000) if which < 30 else random.randint(1, 4000)
            asked = GatewayAsk(1, "", prompt, 60, hashes=tuple(prefixes[which]) if which < 30 else (), block=64)
            terms = chooser.choose(asked, 60.0, 0.0)
            assert terms is not None
            every = {number: cost(worker, asked, overlaps.get(which, {}).get(number, 0) * 64, 60.0) for number, worker in known.items()}
            assert terms.cost == pytest.approx(every[terms.worker])
            if which >= 30:  # nothing is shared: only those come into question where it begins about as soon as anywhere
                first = {n: w.queue_ms(0.0) + w.costs.prefill_ms(prompt, 0, w.rows, w.load.longest) for n, w in known.items()}
                every = {n: ms for n, ms in every.items() if first[n] <= choice._SOON * min(first.values())}
            regrets.append(terms.cost / min(every.values()) - 1)
    assert statistics.mean(regrets) <= 0.01 and max(regrets) < 0.5, (statistics.mean(regrets), max(regrets))


def test_holders_of_a_prefix_are_those_of_each_depth_with_least_to_do() -> None:
    """Against sorting all of them: who has more of it comes in only where it has less to do than those who have even more."""
    random = Random(5)
    for _ in range(60):
        chooser, known = fleet(random, random.choice([1, 5, 60]))
        for number in random.sample(sorted(known), len(known) // 4):
            known[number].accepting = False
            chooser.workers.weigh(known[number], 0.0)
        hashes = [random.randbytes(16) for _ in range(8)]
        depths = {number: random.choice([0, 0, 2, 3, 8]) for number in known}
        for number, depth in depths.items():
            chooser.hear(number, KvNews(1, chooser.index._known[number][1] + 1, [[Stored(b"", hashes[:depth])]]))
        each, lowest, expected = random.choice([1, 2]), 999, []
        for depth in sorted({*depths.values()} - {0}, reverse=True):
            levels = [w.level for n, w in known.items() if depths[n] == depth and 0 <= w.level < lowest]
            if levels:
                lowest = min(levels)
                expected.append((depth, lowest, min(each, levels.count(lowest))))
        found = chooser.workers.holders(chooser.index.depths(hashes), 6, each, random.getrandbits(16))
        told = [(depths[w.number], w.level) for w in found]
        assert len({w.number for w in found}) == len(found)
        assert sorted(set(told), reverse=True) == [(depth, level) for depth, level, _ in expected]
        assert [told.count((depth, level)) for depth, level, _ in expected] == [count for _, _, count in expected]


def test_equal_seeds_choose_alike_and_more_to_do_attracts_nobody() -> None:
    for seed in range(30):
        made = [fleet(Random(seed), 50) for _ in range(2)]
        asked = GatewayAsk(1, "", 700, 60)
        one, two = (chooser.choose(asked, 60.0, 0.0) for chooser, _ in made)
        assert one == two and one is not None
        chooser, known = made[0]
        others = {number for number in known if number != one.worker}
        worse = known[one.worker]
        worse.heard(Pressure(0, worse.load.backlog_ms + 1e4, worse.load.rows, worse.load.longest, 1, 0.0, 32_768), 0.0)
        chooser.workers.weigh(worse, 0.0)
        again = chooser.choose(asked, 60.0, 0.0)
        assert again is not None and again.worker in others
