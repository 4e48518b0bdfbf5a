"""Who has KV of which prefix: one dictionary from blocks to sets of workers, fed by their events.

A worker that has a block has all blocks before it (`engine.blocks`), so along a chain of hashes the set of those who have it only grows
towards the root: a lookup bisects for the deepest block somebody has, and then for the places where the set grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct

from rayneuron.news import Cleared, KvNews, Removed, Stored

_SHARDS = 64  # dead entries are swept a shard at a time
_KEY = (1 << 60) - 1  # of a hash: integers of so many bits are the largest that Python keeps in 32 bytes
_SHARD = 54  # bits below those that say which shard
_NUMBER = Struct("<Q").unpack_from
_EDGES = 10_000
GROUPS = 16  # of workers that have equally much
_PLACES = 32  # in a chain of hashes that are kept of a prompt under way, or some more than half as many


class PrefixIndex:
    """Sets of workers are integers of a bit each. A bit that was given up is another's only after its last entry has been swept."""

    __slots__ = ("_asked", "_bits", "_dying", "_edges", "_found", "_free", "_known", "_live", "_shards", "_slots", "_sweep", "_sweeping")

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._bits: dict[int, int] = {}  # of workers: one object each, which all its entries share
        self._slots = 0  # bits that were ever given
        self._free: list[int] = []
        self._live = 0
        self._known: dict[int, tuple[int, int]] = {}  # worker: up to which number of which epoch
        self._dying = self._sweeping = 0  # bits that nobody has any more
        self._sweep = _SHARDS
        self._asked: tuple[bytes, ...] | None = None  # last, and nothing has changed since: a desk asks when one comes, and when it goes
        self._found: list[tuple[int, int]] = []
        self._edges: dict[bytes, int] = {}  # by a first block: where a set grew of late, as it may again: prompts share their beginnings

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def hear(self, worker: int, news: KvNews) -> bool:
        """What a worker has registered and forgotten. False where something before it is missing: then nothing is known of that worker."""
        self._asked = None
        if news.held is not None:
            self.forget(worker)
            self._store(worker, news.held)
        elif self._known.get(worker, (news.epoch, 0)) != (news.epoch, news.number - len(news.batches)):
            self.forget(worker)
            return False
        for batch in news.batches:
            for event in batch:
                if isinstance(event, Stored):
                    self._store(worker, event.hashes)
                elif isinstance(event, Removed):
                    self._remove(worker, event.hashes)
                elif isinstance(event, Cleared):
                    self.forget(worker)
        self._known[worker] = (news.epoch, news.number)
        return True

    def knows(self, worker: int) -> bool:
        """Whether it has heard everything of a worker."""
        return worker in self._known

    @property
    def followed(self) -> int:
        """Workers of whom it has heard everything."""
        return len(self._known)

    def forget(self, worker: int) -> None:
        """A worker has nothing, or nobody knows what."""
        self._asked = None
        self._known.pop(worker, None)
        bit = self._bits.pop(worker, 0)
        self._live &= ~bit
        self._dying |= bit

    def sweep(self) -> bool:
        """Drop some entries of those who are gone; False where there are none."""
        if self._sweep == _SHARDS:
            if not self._dying:
                return False
            self._sweeping, self._dying, self._sweep = self._dying, 0, 0
        gone, shard = self._sweeping, self._shards[self._sweep]
        for key, held in list(shard.items()):
            if held & gone:
                if held & ~gone:
                    shard[key] = held & ~gone
                else:
                    del shard[key]
        self._sweep += 1
        if self._sweep == _SHARDS:
            self._free += [slot for slot in range(gone.bit_length()) if gone >> slot & 1]
        return True

    def depths(self, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """(blocks, who has so many at least), the deepest first, and not too many; each set holds the one before it."""
        if hashes is not self._asked:
            self._asked, self._found = hashes if isinstance(hashes, tuple) else None, self._depths(hashes)  # a list may grow
        return self._found

    def _depths(self, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        low, high = 1, len(hashes)  # blocks that somebody has, and one more than anybody may
        if not high or not (most := self._have(hashes[0])):
            return []
        shards, live, key_of = self._shards, self._live, _NUMBER

        def have(digest: bytes) -> int:  # `_have`, of what does not change meanwhile
            key: int = key_of(digest)[0] & _KEY
            return shards[key >> _SHARD].get(key, 0) & live

        deepest, middle = most, high  # who comes back has all of it there
        while low < high:
            if some := have(hashes[middle - 1]):
                low, deepest = middle, some
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        found = [(low, deepest)]
        while deepest != most and len(found) < GROUPS:
            first, last = 1, low - 1  # the deepest block that more have lies here
            wider, edge = most, self._edges.get(hashes[0], 0)
            middle = edge if 0 < edge < last else (first + last + 1) // 2
            while first < last:
                if (some := have(hashes[middle - 1])) != deepest:
                    first, wider = middle, some
                else:
                    last = middle - 1
                middle = middle + 1 if middle == edge == first else (first + last + 1) // 2
            low, deepest = first, wider
            found.append((low, deepest))
            if edge != low:
                self._remember(hashes[0], low)
        return found

    def _remember(self, first: bytes, edge: int) -> None:
        if len(self._edges) >= _EDGES:
            self._edges.clear()
        self._edges[first] = edge

    def bit(self, worker: int) -> int:
        """A worker in sets; 0 where it has nothing."""
        return self._bits.get(worker, 0)

    def depth(self, hashes: Sequence[bytes], groups: Sequence[tuple[int, int]], worker: int) -> int:
        """Blocks that a worker has, by what `depths` has found."""
        bit = self._bits.get(worker, 0)
        if not bit:
            return 0
        for depth, held in groups:
            if held & bit:
                return depth
        if len(groups) < GROUPS:
            return 0
        low, high = 0, groups[-1][0] - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._have(hashes[middle - 1]) & bit:
                low = middle
            else:
                high = middle - 1
        return low

    def _have(self, digest: bytes) -> int:
        key: int = _NUMBER(digest)[0] & _KEY
        return self._shards[key >> _SHARD].get(key, 0) & self._live

    def _store(self, worker: int, hashes: Iterable[bytes]) -> None:
        bit, shards = self._bits.get(worker) or self._take(worker), self._shards
        for (number,) in map(_NUMBER, hashes):
            key = number & _KEY
            shard = shards[key >> _SHARD]
            held = shard.setdefault(key, bit)
            if held is not bit:
                shard[key] = held | bit

    def _take(self, worker: int) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._slots
            self._slots += 1
        bit = self._bits[worker] = 1 << slot
        self._live |= bit
        return bit

    def _remove(self, worker: int, hashes: Iterable[bytes]) -> None:
        bit, shards = self._bits.get(worker, 0), self._shards
        for (number,) in map(_NUMBER, hashes):
            key = number & _KEY
            shard = shards[key >> _SHARD]
            held = shard.get(key)
            if held == bit:
                del shard[key]
            elif held is not None and held & bit:
                shard[key] = held ^ bit


class Coming:
    """Prefixes that will be known soon: how many requests that wait or are under way have each. Long ones are kept at fewer places, which
    those of like lengths share."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def add(self, hashes: Sequence[bytes]) -> None:
        """A request has come."""
        step, counts = _step(len(hashes)), self._counts
        for digest in hashes[step - 1 :: step]:
            counts[digest] = counts.get(digest, 0) + 1

    def drop(self, hashes: Sequence[bytes]) -> None:
        """One that was added is over."""
        step, counts = _step(len(hashes)), self._counts
        for digest in hashes[step - 1 :: step]:
            if left := counts.pop(digest) - 1:
                counts[digest] = left

    def depth(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from its beginning, some request has too, or a few less."""
        step, counts = _step(len(hashes)), self._counts
        left = len(hashes) // step * step
        while left and hashes[left - 1] not in counts:
            left -= step
        return left

    def __len__(self) -> int:
        return len(self._counts)


def _step(blocks: int) -> int:
    """From one place to the next that is kept."""
    step = 1
    while blocks // step > _PLACES:
        step *= 2
    return step
