"""The index of prefixes against plain sets of what every worker has, under random storing, evicting, clearing and dying."""

from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron.news import Cleared, KvNews, Removed, Stored
from rayneuron.policies.prefix_index import PrefixIndex
from tests.drawn import examples


def digest(*path: int) -> bytes:
    return Random(repr(path)).randbytes(16)


def chain(path: list[int]) -> list[bytes]:
    return [digest(*path[: i + 1]) for i in range(len(path))]


class Workers:
    """What every worker has, leaves first out, and the events of it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.have: dict[int, dict[bytes, list[int]]] = {}
        self.number: dict[int, int] = {}

    def tell(self, index: PrefixIndex, worker: int, events: list[Stored | Removed | Cleared]) -> bool:
        self.number[worker] = self.number.get(worker, 0) + 1
        return index.hear(worker, KvNews(worker, self.number[worker], [events]))

    def store(self, worker: int, path: list[int]) -> list[Stored | Removed | Cleared]:
        mine = self.have.setdefault(worker, {})
        fresh = [(h, path[: i + 1]) for i, h in enumerate(chain(path)) if h not in mine]
        mine.update(fresh)
        return [Stored(b"", [h for h, _ in fresh])] if fresh else []

    def remove(self, worker: int, most: int) -> list[Stored | Removed | Cleared]:
        mine, gone = self.have.get(worker, {}), []
        for _ in range(most):
            inner = {digest(*path[:-1]) for path in mine.values()}
            leaves = sorted(h for h in mine if h not in inner)
            if leaves:
                gone.append(self.random.choice(leaves))
                del mine[gone[-1]]
        return [Removed(gone)] if gone else []


@examples(60)
@given(st.integers(0, 10**6))
def test_it_knows_what_they_have(seed: int) -> None:
    random, index = Random(seed), PrefixIndex()
    world, alive, born = Workers(random), [0, 1, 2, 3], 4
    for _ in range(60):
        worker = random.choice(alive)
        path = [random.randint(0, 1) for _ in range(random.randint(1, 9))]
        what = random.random()
        if what < 0.6:
            assert world.tell(index, worker, world.store(worker, path))
        elif what < 0.85:
            assert world.tell(index, worker, world.remove(worker, random.randint(1, 4)))
        elif what < 0.92:
            world.have[worker] = {}
            assert world.tell(index, worker, [Cleared(), *world.store(worker, path)])
        else:
            index.forget(worker)
            alive.remove(worker)
            world.have.pop(worker, None)
            alive.append(born)
            born += 1
        if random.random() < 0.3:
            index.sweep()
        asked = chain([random.randint(0, 1) for _ in range(random.randint(0, 10))])
        groups = index.depths(asked)
        for worker in alive:
            mine = world.have.get(worker, {})
            depth = next((i for i, h in enumerate(asked) if h not in mine), len(asked))
            assert index.depth(asked, groups, worker) == depth
        living = sum(index.bit(worker) for worker in alive)
        assert all(held & ~living == 0 for _, held in groups)
        assert all(low[0] > high[0] and low[1] & ~high[1] == 0 for low, high in zip(groups, groups[1:], strict=False))
    for worker in alive:
        index.forget(worker)
    while index.sweep():
        pass
    assert len(index) == 0


def test_who_missed_something_knows_nothing_until_it_is_told_all() -> None:
    index = PrefixIndex()
    a, b, c = chain([1, 2, 3])
    assert index.hear(7, KvNews(5, 1, [[Stored(b"", [a])]])) and index.knows(7)
    assert not index.hear(7, KvNews(5, 3, [[Stored(a, [b])]])) and not index.knows(7)
    assert index.depths([a, b, c]) == []
    assert index.hear(7, KvNews(5, 3, [], [a, b])) and index.depths([a, b, c])[0][0] == 2
    assert index.hear(7, KvNews(5, 5, [[Stored(b, [c])], [Removed([c])]])) and index.depths([a, b, c])[0][0] == 2


def test_who_asks_again_hears_what_has_changed() -> None:
    index, (a, b, c) = PrefixIndex(), (bytes([i]) * 16 for i in range(3))
    grows, asked = [a], (a, b, c)
    assert index.hear(7, KvNews(5, 0, [], [a, b, c]))
    assert [index.depths(asked)[0][0] for _ in range(2)] == [3, 3] and index.depths(grows)[0][0] == 1
    grows.append(b)
    assert index.depths(grows)[0][0] == 2
    assert index.depths(asked)[0][0] == 3 and index.hear(7, KvNews(5, 1, [[Removed([c])]])) and index.depths(asked)[0][0] == 2
    index.forget(7)
    assert index.depths(asked) == []
    assert not index.hear(7, KvNews(6, 9, [[Removed([b])]]))  # another life
    assert not index.hear(8, KvNews(5, 9, [[Stored(b"", [a])]]))  # whose beginning nobody has heard


@pytest.mark.slow
def test_memory_of_a_million_blocks() -> None:
    index, random = PrefixIndex(), Random(1)
    gc.collect()
    tracemalloc.start()
    for worker in range(1000):
        index.hear(worker, KvNews(1, 1, [[Stored(b"", [random.randbytes(16) for _ in range(1000)])]]))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(index) == 1_000_000 and used / 1e6 <= 90, used / 1e6


def test_a_lookup_takes_no_longer_with_more_workers() -> None:
    """Three of four prompts meet what somebody has; the control is the same with sixteen workers."""
    took = {}
    for workers in (16, 1000):
        index, random = PrefixIndex(), Random(1)
        paths = [[random.randbytes(16) for _ in range(512)] for _ in range(workers)]
        for worker, hashes in enumerate(paths):
            index.hear(worker, KvNews(1, 1, [[Stored(b"", hashes)]]))
        asked = [random.choice(paths)[: random.randint(0, 512)] + [random.randbytes(16)] * 16 for _ in range(300)]
        times = []
        for hashes in asked:
            began = time.perf_counter()
            index.depths(hashes)
            times.append(time.perf_counter() - began)
        took[workers] = statistics.median(times)
    assert took[1000] <= 4 * took[16], took
