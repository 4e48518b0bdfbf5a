"""The seats of a host on a virtual clock: random demand, slow starts, slow cores, failures; what must never happen, and what should."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest

from rayneuron.frames import Asked
from rayneuron.host.table import Action, HostedModel, SeatTable
from rayneuron.policies import packing, scaling
from rayneuron.policies.seats import COMING, Bring, Dismissal, HostDecision, HostNode, ScalingLimits, Wish

SIZES = (1, 2, 4, 8, 12, 24)
LIMITS = ScalingLimits()


@dataclass
class Played:
    """A node of 24 cores, its Serve and its gateway, played. `starts_s`: what starts take; calls end `serve_s` after they were taken."""

    table: SeatTable
    random: Random
    starts_s: Callable[[str], float]
    serve_s: float = 2.0
    broken: float = 0.0  # share of starts that fail
    now_s: float = 0.0
    held: set[int] = field(default_factory=set)  # by processes
    foreign: set[int] = field(default_factory=set)
    there: set[str] = field(default_factory=set)
    waiting: dict[str, list[float]] = field(default_factory=dict)
    running: dict[str, list[float]] = field(default_factory=dict)  # by seat: when each call ends
    awake: int = 0  # calls that met a model that was awake
    calls: int = 0
    waits: list[float] = field(default_factory=list)
    starts: list[tuple[float, str]] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count = field(default_factory=itertools.count)  # type: ignore[type-arg]
    _arrived: dict[str, int] = field(default_factory=dict)

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), what))

    def call(self, model: str) -> None:
        """A call comes."""
        self.calls += 1
        self._arrived[model] = self._arrived.get(model, 0) + 1
        seat = self.seat(model)
        self.awake += seat is not None
        if seat is None:
            self.waiting.setdefault(model, []).append(self.now_s)
        else:
            self.running.setdefault(seat, []).append(self.now_s + self.serve_s)

    def seat(self, model: str) -> str | None:
        return next((r.key for r in self.table.rows.values() if r.model == model and r.state in ("ready", "moving")), None)

    def run(self, until_s: float, step_s: float = 1.0) -> None:
        while self.now_s < until_s:
            self.now_s += step_s
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
            self.tell()
            node = HostNode("n", 24, frozenset(range(24)) - self.held - self.foreign, SIZES)
            for action in self.table.tick([node], self.there, self.now_s):
                self.do(action)

    def tell(self) -> None:
        asked: dict[str, Asked] = {}
        for model in self.table.models:
            if (seat := self.seat(model)) is not None and self.waiting.get(model):
                self.waits += [self.now_s - came_s for came_s in self.waiting[model]]
                self.running.setdefault(seat, []).extend(self.now_s + self.serve_s for _ in self.waiting.pop(model))
            waiting = self.waiting.get(model, [])
            busy = {}
            for row in self.table.rows.values():
                left = self.running[row.key] = [end_s for end_s in self.running.get(row.key, []) if end_s > self.now_s]
                if left and row.model == model:
                    busy[row.key] = max(left) - self.now_s
            oldest_s = self.now_s - min(waiting) if waiting else 0.0
            asked[model] = Asked(len(waiting), oldest_s, self._arrived.pop(model, 0), 0.0, busy)
        self.table.heard(b"g", asked, self.now_s)

    def do(self, action: Action) -> None:
        row = action.row
        cores = set(range(row.first, row.first + row.size))
        if action.what == "start":
            assert not cores & (self.held | self.foreign), f"{row.key} is started on cores that are held"
            assert row.first % row.size == 0
            self.held |= cores
            self.there.add(row.key)
            self.starts.append((self.now_s, row.model))
            fails, took_s = self.random.random() < self.broken, self.starts_s(row.model)

            def end() -> None:
                self.fail(row.key) if fails else self.table.ready(row.key, {"weights": took_s}, self.now_s)

            self.after(took_s, end)
        elif action.what == "drain":
            end_s = min(max([0.0, *(e - self.now_s for e in self.running.get(row.key, []))]), self.table.limits.drain_s)
            self.after(end_s, lambda: [self.do(then) for then in self.table.drained(row.key, self.now_s)] and None)
        else:
            self.there.discard(row.key)
            self.after(self.random.uniform(0.0, 8.0), lambda: self.held.difference_update(cores))  # cores come late

    def fail(self, key: str) -> None:
        for action in self.table.failed(key, "no such file", self.now_s):
            self.do(action)


def played(sizes: dict[str, int], seed: int, start_s: float = 20.0, limits: ScalingLimits = LIMITS, **wish: object) -> Played:
    random = Random(seed)
    models = {name: HostedModel(Wish(name, size, **wish)) for name, size in sizes.items()}  # type: ignore[arg-type]
    return Played(SeatTable(models, limits), random, lambda model: random.uniform(0.8, 1.2) * start_s)


MIX = {"a": 2, "b": 4, "c": 4, "d": 8, "e": 8, "f": 12, "g": 24}


@pytest.mark.parametrize(("seed", "hours"), [(0, 0.5), *(pytest.param(seed, 24, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_a_day_of_random_demand(seed: int, hours: float) -> None:
    """Starts that fail, cores that come late, and foreign holders. `do` asserts that no core is given twice."""
    host = played(MIX, seed)
    host.broken = 0.1
    random = Random(seed)
    while host.now_s < 3600 * hours:
        model = random.choices([*MIX], [random.choice((1, 5)) for _ in MIX])[0]
        for _ in range(random.randint(1, 4)):
            host.call(model)
        if random.random() < 0.02:
            taken = random.sample(sorted(set(range(24)) - host.held), k=min(2, 24 - len(host.held)))
            host.foreign.update(taken)
            host.after(90.0, lambda taken=taken: host.foreign.difference_update(taken))  # type: ignore[misc]
        host.run(host.now_s + random.expovariate(1 / 40.0), 2.0)
    for name in MIX:  # no ping-pong: whoever has come stays for min_life_s
        times = [at_s for at_s, model in host.starts if model == name]
        gone = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert not host.table.counts.get((name, "failed")) or min(gone, default=1e9) >= 8.0
    host.foreign.clear()
    host.broken = 0.0
    for name in MIX:  # every wish is met in the end, where it lasts
        host.call(name)
    host.run(host.now_s + 3000, 5.0)
    assert not any(host.waiting.values()), host.waiting
    assert max(host.waits) < 3600
    host.run(host.now_s + 1000, 5.0)
    assert not host.table.rows and not host.held, "and all of them sleep when nobody asks"


def test_two_models_that_want_the_same_cores_do_not_push_each_other_out_for_ever() -> None:
    host = played({"a": 24, "b": 24}, 1, start_s=20.0)
    for _ in range(360):  # an hour; both are asked all the time
        host.call("a")
        host.call("b")
        host.run(host.now_s + 10.0, 5.0)
    starts = [at_s for at_s, _ in host.starts]
    assert min(later - earlier for earlier, later in itertools.pairwise(starts)) >= LIMITS.min_life_s
    assert len(starts) <= 3600 / (LIMITS.min_life_s + 20) + 1 and {model for _, model in host.starts} == {"a", "b"}


def test_cores_count_as_free_by_the_ledgers_word_alone() -> None:
    host = played({"a": 24, "b": 24}, 1, limits=ScalingLimits(min_life_s=0.0))
    host.call("a")
    host.run(60)
    assert host.seat("a") == "a.0"
    host.call("b")
    host.run(61)
    host.random = Random(7)
    host.run(300)
    assert host.seat("b") == "b.0" and host.seat("a") is None
    # A process that does not let go: its application is gone, one of its cores is not.
    host.foreign = {5}
    host.call("a")
    before = len(host.starts)
    host.run(400)
    assert len(host.starts) == before and host.table.standings()["a"].state != "ready"
    host.foreign.clear()
    host.run(500)
    assert host.seat("a") is not None


def test_what_fails_is_tried_ever_later_and_says_why() -> None:
    host = played({"a": 2}, 3)
    host.broken = 1.0
    for _ in range(400):
        if not host.waiting.get("a"):
            host.call("a")
        host.run(host.now_s + 5, 5.0)
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(host.starts)]
    assert gaps == sorted(gaps) and gaps[0] >= 30 and gaps[-1] > 200, gaps
    assert host.table.standings()["a"].failed == "no such file" and not host.table.rows.get("a.1")


def test_what_the_arbiter_finds_is_adopted_or_ended() -> None:
    host = played({"a": 8, "b": 8}, 0)
    host.table.adopt("a.0", "a", "n", range(8), 0.0, keep=True)
    host.table.adopt("b.0", "b", "n", range(8, 16), 0.0, keep=False)
    host.held, host.there = set(range(16)), {"a.0", "b.0"}
    host.table.ready("a.0", {}, 0.0)
    for action in host.table.drained("b.0", 0.0):
        host.do(action)
    host.run(30)
    assert set(host.table.rows) == {"a.0"} and host.seat("a") == "a.0" and host.held == set(range(8))


def test_a_node_that_is_lost_gives_its_seats_up() -> None:
    host = played({"a": 8}, 0)
    host.call("a")
    host.run(60)
    assert host.seat("a") is not None
    for action in host.table.tick([], host.there, host.now_s):
        host.do(action)
    host.table.tick([], host.there, host.now_s)
    assert host.seat("a") is None


def by_last_use(nodes: Sequence[HostNode], wishes: Sequence[Wish], limits: ScalingLimits, since_move_s: float = 0.0) -> HostDecision:
    """The control: whoever is asked comes at once, in place of the seat that was used longest ago and has answered."""
    bring, dismiss = [], []
    there = [seat for wish in wishes for seat in wish.seats]
    free = set(nodes[0].free) - {core for seat in there for core in seat.cores}
    able = sorted((s for s in there if s.state == "ready" and not s.busy_s), key=lambda s: -s.quiet_s)
    starting = sum(seat.state in COMING for seat in there)
    for wish in sorted(wishes, key=lambda wish: -wish.oldest_s):
        if not wish.waiting or wish.standing or starting + len(bring) >= limits.starts_at_once:
            continue
        start = packing.choose(free, wish.size, 24, SIZES)
        if start is None and able:
            gone = able.pop(0)
            dismiss.append(Dismissal(gone.key, "used longest ago"))
            start = gone.first
        if start is not None:
            free -= set(range(start, start + wish.size))
            bring.append(Bring(wish.model, "n", start, wish.size))
    return HostDecision(tuple(bring), tuple(dismiss), {}, {})


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_more_calls_meet_an_awake_model_than_by_last_use(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bar 10: six models on three seats, Zipf 1.1, an hour, the same calls on the same host; a start
    takes as long as four calls take to come."""
    random, names = Random(seed), list("abcdef")
    weights = [1 / rank**1.1 for rank in range(1, 7)]
    calls, at_s = [], 0.0
    while (at_s := at_s + random.expovariate(1 / 5.0)) < 3600:
        calls.append((at_s, random.choices(names, weights)[0]))

    def lived() -> Played:
        host = played(dict.fromkeys(names, 8), seed, idle_s=1e9)
        for at_s, model in calls:
            host.run(at_s, 2.0)
            host.call(model)
        host.run(3800, 2.0)
        assert not any(host.waiting.values())
        return host

    ours = lived()
    monkeypatch.setattr(scaling, "decide", by_last_use)
    theirs = lived()
    for host in (ours, theirs):
        print(f"awake {host.awake / host.calls:.1%}, {len(host.starts)} starts, mean wait {sum(host.waits) / host.calls:.1f} s")
    assert ours.awake / ours.calls >= theirs.awake / ours.calls + 0.05
    assert len(ours.starts) <= len(theirs.starts)
