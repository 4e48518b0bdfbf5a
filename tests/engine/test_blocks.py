"""The store against a model of it with a real trie: what is found, what is kept, what goes first; nothing is lost or held twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from os.path import commonprefix

from hypothesis import given
from hypothesis import strategies as st

from rayneuron import hashing
from rayneuron.engine.blocks import Blocks
from rayneuron.engine.hold import Hold
from rayneuron.engine.kv_events import Cleared, KvLog, KvNews, Removed, Stored
from rayneuron.models.kv import KvSpace
from tests.drawn import examples

SIZE, LIMIT = 2, 16
ROOT = hashing.root("model")
Path = tuple[int, ...]  # the ids of a chain of full blocks: a node of the trie


def called(path: Path) -> bytes:
    return hashing.chain(path, SIZE, ROOT)[-1]


@dataclass
class Run:
    """A sequence: its ids, how many have KV, the nodes at its front, and the other blocks it holds. `stale`: admitted before a reset;
    `ticket`: it has ended, and its blocks are this ticket's."""

    ids: list[int]
    hold: Hold
    nodes: list[Path]
    private: int
    computed: int
    stale: bool = False
    ticket: bytes | None = None


@dataclass
class Model:
    """Sets and stamps. `trie`: every registered chain; `rest`: since when nobody holds one; `limbo`: what waits for which step."""

    blocks: int
    rows: int
    trie: set[Path] = field(default_factory=set)
    rest: dict[Path, tuple[int, int]] = field(default_factory=dict)
    limbo: list[tuple[int, Path | None]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    begun: int = 0
    ended: int = 0
    clock: int = 0
    nameless: set[int] = field(default_factory=set)  # blocks that were registered before a reset and are still held

    def walk(self, ids: list[int]) -> list[Path]:
        """The longest way down the trie."""
        found: list[Path] = []
        while (path := tuple(ids[: SIZE * (len(found) + 1)])) in self.trie and len(path) == SIZE * (len(found) + 1):
            found.append(path)
        return found

    @property
    def live(self) -> list[Run]:
        return [run for run in self.runs if run.ticket is None]

    def holders(self, path: Path) -> int:
        return sum(path in run.nodes for run in self.runs if not run.stale)

    @property
    def free(self) -> int:
        private = sum(run.private for run in self.runs)
        return self.blocks - len(self.trie) - private - len(self.nameless) - sum(path is None for _, path in self.limbo)

    def available(self) -> int:
        return self.free + len(self.rest)

    def take(self, path: Path) -> None:
        self.rest.pop(path, None)
        self.limbo = [(step, other) for step, other in self.limbo if other != path]

    def drop(self, path: Path | None) -> None:
        """A block that nobody holds any more; None: one without a name."""
        if self.begun > self.ended:
            self.limbo.append((self.begun, path))
        elif path is not None:
            self.clock += 1
            self.rest[path] = (self.clock, -len(path))

    def allocate(self, count: int) -> None:
        """Free ones first, then of the registered ones those that rest longest."""
        for _ in range(count - max(0, self.free)):
            oldest = min(self.rest, key=self.rest.__getitem__)
            assert not any(path[: len(oldest)] == oldest and path != oldest for path in self.trie), "a parent goes before its child"
            del self.rest[oldest]
            self.trie.discard(oldest)


@dataclass
class Follower:
    """Somebody who knows of the store only what it publishes."""

    epoch: int = 0
    number: int = 0
    held: set[bytes] = field(default_factory=set)

    def hear(self, news: KvNews) -> None:
        if news.held is not None:
            self.held = set(news.held)
        for event in (event for batch in news.batches for event in batch):
            if isinstance(event, Stored):
                assert not self.held & set(event.hashes)
                self.held |= set(event.hashes)
            elif isinstance(event, Removed):
                assert set(event.hashes) <= self.held
                self.held -= set(event.hashes)
            else:
                assert isinstance(event, Cleared)
                self.held.clear()
        self.epoch, self.number = news.epoch, news.number


class Both:
    """The store and the model side by side."""

    def __init__(self, blocks: int, rows: int) -> None:
        self.model = Model(blocks, rows)
        self.store = Blocks(KvSpace(rows, LIMIT, blocks, SIZE), KvLog(), part=1)
        self.follower = Follower()

    def hashes(self, run: Run, tokens: int) -> list[bytes]:
        return hashing.chain(run.ids[:tokens], SIZE, ROOT)

    def admit(self, ids: list[int], reads: bool) -> None:
        model = self.model
        nodes = model.walk(ids) if reads else []
        width = -(-(len(ids) + 1) // SIZE)
        fits = len(model.live) < model.rows and width - len(nodes) <= model.available() - sum(path in model.rest for path in nodes)
        hold = self.store.admit(len(ids) + 1, hashing.chain(ids, SIZE, ROOT) if reads else ())
        assert (hold is not None) is fits
        if hold is None:
            return
        assert hold.known == SIZE * len(nodes) == SIZE * hold.shared
        for path in nodes:
            model.take(path)
        model.allocate(width - len(nodes))
        model.runs.append(Run(list(ids), hold, nodes, width - len(nodes), hold.known))
        if reads:
            self.begin_alike(model.runs[-1])

    def begin_alike(self, run: Run) -> None:
        """The first block of its own begins as one of those that follow what it shares: that is copied, and held until it has been."""
        model, hold, at = self.model, run.hold, SIZE * len(run.nodes)
        ids, walked = run.ids[at : at + SIZE][: len(run.ids) - 1 - at], tuple(run.ids[:at])
        alike = [path for path in model.trie if path[:-SIZE] == walked and path[-SIZE : -SIZE + len(ids[:1])] == tuple(ids[:1]) and ids]
        spare = model.available() > 0
        assert self.store.begin_alike(hold, called(walked) if walked else ROOT, ids, 0) is (spare and bool(alike))
        if hold.known > at:
            (source,) = (source for source, target in self.store.copies() if target == hold.blocks[hold.shared])
            (path,) = (path for path in alike if self.store.registered.get(called(path)) == source)
            assert hold.known == at + max(len(commonprefix([tuple(ids), other[-SIZE:]])) for other in alike)
            run.computed = hold.known
            model.take(path)
            self.step(path)

    def sibling(self, leader: Run) -> None:
        """Another choice: all but the last id of what the leader has computed is shared, the last block in part by a copy."""
        model, known = self.model, leader.computed - 1
        if known < 1 or leader.stale:
            return
        ids = leader.ids[: leader.computed]
        shared = known // SIZE
        nodes, width = leader.nodes[:shared], -(-(len(ids) + 1) // SIZE)
        assert len(nodes) == shared, "what is settled is registered"
        fits = len(model.live) < model.rows and width - shared <= model.available()
        hold = self.store.admit(len(ids) + 1, (), leader.hold, known)
        assert (hold is not None) is fits
        if hold is not None:
            assert hold.known == known and hold.blocks[:shared] == leader.hold.blocks[:shared]
            copy = (leader.hold.blocks[shared], hold.blocks[shared])
            assert (copy in self.store.copies()) is (known % SIZE > 0)
            model.allocate(width - shared)
            model.runs.append(Run(ids, hold, list(nodes), width - shared, known))
            self.step()

    def step(self, copied: Path | None = None) -> None:
        """A step has begun, with the copies there were; `copied`: of which block."""
        self.store.begin()
        self.model.begun += 1
        if copied is not None and not self.model.holders(copied):
            self.model.drop(copied)
        if self.model.begun - self.model.ended > 2:
            self.end()

    def end(self) -> None:
        model = self.model
        if model.begun == model.ended:
            return
        self.store.end()
        model.ended += 1
        waiting, model.limbo = model.limbo, []
        for step, path in waiting:
            if step <= model.ended:
                under_way, model.begun = model.begun, model.ended
                model.drop(path)
                model.begun = under_way
            else:
                model.limbo.append((step, path))

    def compute(self, run: Run, tokens: int) -> None:
        model = self.model
        run.computed = max(run.computed, min(tokens, len(run.ids)))
        self.store.settle(run.hold, self.hashes(run, run.computed), ROOT, run.ids)
        if run.stale:
            return
        for at in range(len(run.nodes), run.computed // SIZE):
            path = tuple(run.ids[: SIZE * (at + 1)])
            if path in model.trie:
                model.take(path)
                run.private -= 1
                model.drop(None)
            else:
                model.trie.add(path)
                run.private -= 1
            run.nodes.append(path)

    def rematch(self, run: Run) -> None:
        model = self.model
        found = self.store.rematch(run.hold, self.hashes(run, len(run.ids)))
        if not run.stale:
            for path in model.walk(run.ids)[len(run.nodes) :]:
                model.take(path)
                run.private -= 1
                model.drop(None)
                run.nodes.append(path)
            assert found == SIZE * len(run.nodes)
            run.computed = max(run.computed, found)

    def grow(self, run: Run, ids: list[int]) -> None:
        ids = ids[: LIMIT - 1 - len(run.ids)]
        need = -(-(len(run.ids) + len(ids) + 1) // SIZE) - len(run.hold.blocks)
        fits = need <= self.model.available()
        assert self.store.extend(run.hold, len(run.ids) + len(ids) + 1) is fits
        if fits:
            self.model.allocate(max(0, need))
            run.private += max(0, need)
            run.ids += ids

    def release(self, run: Run) -> None:
        self.model.runs.remove(run)
        self.shorten(run, 0, lambda: self.store.release(run.hold) if run.ticket is None else self.store.unpin(run.ticket))

    def pin(self, run: Run) -> None:
        if run.computed:
            run.ids, run.ticket = run.ids[: run.computed], str(len(self.model.runs) + 100 * self.model.clock).encode()
            self.model.clock += 1
            self.shorten(run, -(-run.computed // SIZE), lambda: self.store.pin(run.hold, run.ticket, run.computed))

    def shorten(self, run: Run, kept: int, give_back: Callable[[], None]) -> None:
        """All but the first `kept` blocks are given back."""
        model, gone = self.model, run.nodes[kept:]
        stale = set(run.hold.blocks[kept : len(run.nodes)]) if run.stale else set()
        private = len(run.hold.blocks) - max(kept, len(run.nodes))
        run.nodes, run.private = run.nodes[:kept], run.private - private
        give_back()
        for _ in range(private):
            model.drop(None)
        for block in stale.difference(*(other.hold.blocks for other in model.runs)):
            model.nameless.remove(block)
            model.drop(None)
        for path in reversed(gone if not run.stale else []):
            if not model.holders(path):
                model.drop(path)

    def reset(self) -> None:
        model = self.model
        assert self.store.log is not None
        number = self.store.log.number
        assert self.store.reset() == len(model.trie)
        assert self.store.log.number > number, "who looks at the number alone hears of it, though no step comes"
        for run in model.runs:
            run.stale = True
        model.nameless = {block for run in model.runs for block in run.hold.blocks[: len(run.nodes)]}
        model.limbo = [(step, None) for step, _ in model.limbo]
        model.trie.clear()
        model.rest.clear()

    def check(self) -> None:
        model, store = self.model, self.store
        store.check([run.hold for run in model.live])
        assert store.pinned == len({block for run in model.runs if run.ticket is not None for block in run.hold.blocks})
        assert set(store.hashes()) == {called(path) for path in model.trie}
        assert all(path[:-SIZE] in model.trie for path in model.trie if len(path) > SIZE), "a child without its parent"
        assert (store.free, store.cached.count, len(store.limbo)) == (model.free, len(model.rest), len(model.limbo))
        assert store.free + store.cached.count + len(store.limbo) + store.used == model.blocks
        for run in model.runs:
            assert run.stale or run.hold.shared == len(run.nodes)


IDS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=LIMIT - 2)


@examples(250)
@given(st.data())
def test_the_store_is_a_trie(data: st.DataObject) -> None:
    actions = [*["admit"] * 3, *["compute"] * 3, "rematch", "grow", "release", "sibling", "lay", "pin", "unpin", "step", "end", "end"]
    both = Both(blocks=data.draw(st.integers(LIMIT // SIZE, 16)), rows=data.draw(st.integers(1, 5)))
    model = both.model
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(actions))
        if data.draw(st.integers(0, 60)) == 60:
            both.reset()
        live, pinned = model.live, [run for run in model.runs if run.ticket is not None]
        leads = action == "sibling" and pinned and data.draw(st.booleans())
        choice = pinned if action == "unpin" or leads else live
        run = data.draw(st.sampled_from(choice)) if choice else None
        if action == "admit":
            both.admit(data.draw(IDS), data.draw(st.integers(0, 4)) > 0)
        elif action in ("step", "end"):
            getattr(both, action)()
        elif run is not None and action == "compute":
            both.compute(run, data.draw(st.integers(1, LIMIT)))
        elif run is not None and action == "grow":
            both.grow(run, data.draw(IDS))
        elif run is not None and action in ("rematch", "release", "sibling", "pin"):
            getattr(both, action)(run)
        elif run is not None and action == "unpin":
            both.release(run)
        elif run is not None and action == "lay":
            run.hold.lay()
            assert run.hold.laid == len(run.hold.blocks)  # and `check` looks at the line
        both.check()
        if data.draw(st.booleans()):
            both.follower.hear(both.store.news(both.follower.epoch, both.follower.number))
            assert both.follower.held == set(both.store.hashes())
    for run in list(model.runs):
        both.release(run)
    while model.begun > model.ended:
        both.end()
    both.check()
    assert both.store.used == 0 and both.store.free + both.store.cached.count == model.blocks and both.store.free_rows == model.rows


def test_what_is_found_is_no_room() -> None:
    """Five blocks are left, three of them found: they are taken out of what can be had, so that a newcomer that needs three more waits."""
    store = Blocks(KvSpace(3, LIMIT, 8, SIZE), KvLog())
    first = store.admit(6)
    assert first is not None
    store.settle(first, hashing.chain([1] * 6, SIZE, ROOT), ROOT, [1] * 6)
    other = store.admit(6)
    store.release(first)
    assert other is not None and (store.free, store.cached.count) == (2, 3)
    assert store.admit(12, hashing.chain([1] * 12, SIZE, ROOT)) is None and (store.free, store.cached.count) == (2, 3)
    hold = store.admit(10, hashing.chain([1] * 10, SIZE, ROOT))
    assert hold is not None and hold.known == 6 and len(hold.blocks) == 5 and (store.free, store.cached.count) == (0, 0)
    store.check([other, hold])


def test_a_block_that_is_full_in_part_is_found_by_who_begins_so_and_goes_when_its_room_is_needed() -> None:
    """It has no name that others could be told, and stands once for all who hold the same or less of it."""
    store, called = Blocks(KvSpace(3, 64, 4, 16), KvLog(), part=4), hashing.chain(range(16), 16, ROOT)

    def ended(ids: list[int]) -> None:
        hold = store.admit(16 + len(ids), called)
        assert hold is not None
        store.settle(hold, called, ROOT, range(16))
        store.registered.enter_part(hold.blocks[1], called[0], ids)
        store.release(hold)
        store.check([])

    ended([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert store.registered.alike(called[0], [1, 2, 3, 4, 5, 6, 7, 0])[1] == 4 and store.cached.count == 2 and store.hashes() == called
    for known in ([1, 2, 3, 4, 9, 9], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]):
        ended(known)
    assert store.cached.count == 2, "nothing more is known by these"
    ended([1, 2, 3, 4, 0, 0, 0, 0])
    assert store.cached.count == 3 and store.registered.alike(called[0], [1, 2, 3, 4, 5, 6, 7, 8])[1] == 8
    reader = store.admit(32, called)
    assert reader is not None and store.begin_alike(reader, called[0], [1, 2, 3, 4, 5, 6, 7, 8, 5], 0) and reader.known == 24
    store.check([reader])
    store.begin()
    store.end()
    store.release(reader)
    assert store.log is not None
    store.log.flush()
    number = store.log.number
    holds = [hold for hold in (store.admit(16) for _ in range(3)) if hold is not None]
    assert len(holds) == 3 and store.hashes() == called, "they go before what they follow"
    assert store.registered.alike(called[0], [1, 2, 3, 4])[1] == 0
    store.log.flush()
    assert store.log.number == number, "who follows the names hears nothing of it"
    store.check(holds)
    known = len(store.registered.hashes)
    assert store.reset() == known == 1 and len(store.registered) == 0
