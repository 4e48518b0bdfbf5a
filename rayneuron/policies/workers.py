"""What a gateway knows of its replicas: the load each has told, what it has sent there since, and who has least to do."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import log2

from rayneuron.news import Pressure
from rayneuron.policies.known_worker import KnownWorker

_LEVELS = 160  # of load, each 9 % above the one before: from 1 ms to a quarter of an hour
_POINTS = 64  # of a replica on the ring
_FEW = 8  # replicas
_NEWS = 1.05  # of a common pace, by how much it must have changed before all strangers hear of it
_LATELY = 0.05  # of an average of late, its newest


class Workers:
    """All replicas of a model, by load in levels: whoever has least to do is found at once, however many there are."""

    def __init__(self) -> None:
        self.all: dict[int, KnownWorker] = {}
        self.placed = 0  # that may be chosen
        self._strangers: set[int] = set()  # whose first tokens nobody here has seen
        self._common = 1.0  # the pace they are taken to have: that of whom was last learned of
        self._late_ms = 0.0  # from when an order is sent until a replica is heard that counts it in
        self._others = 0.0  # share of the sequences on replicas that came from elsewhere
        self._between_ms, self._sent_s = 0.0, 0.0  # from one order of this gateway to the next
        self._ms = 0.0  # of all of them
        self._levels: list[list[KnownWorker]] = [[] for _ in range(_LEVELS)]
        self._sets = [0] * _LEVELS  # the same as bits of the prefix index
        self._filled = 0  # a bit a level that is not empty
        self._marked: dict[int, KnownWorker] = {}  # by its bit
        self._ring: list[tuple[int, int]] = []

    def join(self, worker: KnownWorker) -> None:
        """A replica is there."""
        self.all[worker.number] = worker
        self._strangers.add(worker.number)
        worker.pace.assume(self._common)
        for point in range(_POINTS):
            insort(self._ring, (_hashed(f"{worker.name} {point}".encode()), worker.number))

    def leave(self, number: int) -> KnownWorker:
        """A replica is gone."""
        worker = self.all.pop(number)
        self._strangers.discard(number)
        worker.accepting = False
        self.weigh(worker, 0.0)
        self.mark(worker, 0)
        self._ring = [at for at in self._ring if at[1] != number]
        return worker

    def heard(self, worker: KnownWorker, load: Pressure, now_s: float) -> None:
        """A replica says how busy it is."""
        since = worker.waits_since
        if since is not None and load.seen > worker.load.seen:
            self._late_ms += _LATELY * (1e3 * (now_s - since) - self._late_ms)
        worker.heard(load, now_s)
        if there := load.rows + load.waiting:
            own = len(worker.keys) - len(worker.bookings)
            self._others += _LATELY * (max(0, there - own) / there - self._others)

    def began(self, worker: KnownWorker, queue_ms: float, own_ms: float, actual_ms: float, now_s: float) -> None:
        """A first token has come of a replica, as `LearnedPace.learn` has it."""
        self._strangers.discard(worker.number)
        worker.pace.learn(queue_ms, own_ms, actual_ms, now_s)
        factor = worker.pace.factor
        if self._strangers and not 1 / _NEWS < factor / self._common < _NEWS:
            self._common = factor
            for number in self._strangers:
                self.all[number].pace.assume(self._common)

    @property
    def unseen(self) -> float:
        """How many orders of other gateways are under way that nobody here has heard of, as far as one can tell."""
        if not self._between_ms or not self._others:
            return 0.0
        return min(self._late_ms / self._between_ms * self._others / max(1 - self._others, _LATELY), 2.0 * len(self.all))

    def booked(self, now_s: float) -> None:
        """An order goes somewhere."""
        if self._sent_s:
            self._between_ms += _LATELY * (1e3 * (now_s - self._sent_s) - self._between_ms)
        self._sent_s = now_s

    def weigh(self, worker: KnownWorker, now_s: float) -> None:
        """Find a replica's place among the others anew: something about it has changed."""
        level, ms = -1, 0.0
        if worker.accepting and worker.load.accepting:
            ms = worker.typical_ms(now_s)
            level = _level(ms)
        self._ms += ms - worker.ms
        worker.ms = ms
        if level == worker.level:
            return
        if worker.level >= 0:
            here = self._levels[worker.level]
            last = here.pop()
            self._sets[worker.level] &= ~worker.bit
            if last is not worker:
                here[worker.place] = last
                last.place = worker.place
            if not here:
                self._filled &= ~(1 << worker.level)
            self.placed -= 1
        worker.level = level
        if level >= 0:
            worker.place = len(self._levels[level])
            self._levels[level].append(worker)
            self._sets[level] |= worker.bit
            self._filled |= 1 << level
            self.placed += 1

    def mark(self, worker: KnownWorker, bit: int) -> None:
        """A replica's bit in the sets of the prefix index."""
        if self._marked.get(worker.bit) is worker:
            del self._marked[worker.bit]
        if bit:
            self._marked[bit] = worker
        if worker.level >= 0:
            self._sets[worker.level] = self._sets[worker.level] & ~worker.bit | bit
        worker.bit = bit

    def holders(self, groups: Sequence[tuple[int, int]], most: int, each: int, start: int) -> list[KnownWorker]:
        """Those that come into question for a prefix: of each group `each` with least to do, who have less than all before them."""
        found: list[KnownWorker] = []
        before, lowest, left = 0, _LEVELS, most
        for _, held in groups:
            fresh = held & ~before
            before = held
            if fresh & (fresh - 1):
                level, some = self._least_of(fresh, lowest, each, start)
            else:
                one = self._marked.get(fresh)
                level, some = (_LEVELS, []) if one is None or one.level < 0 else (one.level, [one])
            if level < lowest:
                lowest, left = level, left - 1
                found += some
                if not left:
                    break
        return found

    def _least_of(self, held: int, below: int, most: int, start: int) -> tuple[int, list[KnownWorker]]:
        """Of a set those with least to do, and their level, which is below some level; some of them, from some place on."""
        left, sets = self._filled & (1 << below) - 1, self._sets
        while left:
            low = left & -left
            left ^= low
            level = low.bit_length() - 1
            if both := held & sets[level]:
                return level, self._some_of(both, most, start)
        return _LEVELS, []

    def _some_of(self, held: int, most: int, start: int) -> list[KnownWorker]:
        if not held & (held - 1):
            return [self._marked[held]]
        found: list[KnownWorker] = []
        below = (1 << start % held.bit_length()) - 1
        for part in (held & ~below, held & below):
            while part and len(found) < most:
                low = part & -part
                part ^= low
                found.append(self._marked[low])
        return found

    @property
    def mean_ms(self) -> float:
        """Of what is compared in levels."""
        return self._ms / self.placed if self.placed else 0.0

    def busy_ms(self, now_s: float) -> float:
        """What every replica has to do first, at least; 0 where they are too many to ask each."""
        if len(self.all) > _FEW:
            return 0.0
        return min([worker.waits_ms(now_s) for worker in self.all.values() if worker.level >= 0], default=0.0)

    def least(self, most: int, start: int) -> list[KnownWorker]:
        """Up to `most` of those with least to do; where many have equally little, some of these, from some place on."""
        filled, left, levels = self._filled, most, self._levels
        found: list[KnownWorker] = []
        while filled and left > 0:
            low = filled & -filled
            filled ^= low
            here = levels[low.bit_length() - 1]
            count = len(here)
            found += here if count <= left else _some(here, left, start)
            left -= count
        return found

    def fullest(self, most: int, start: int, ms: float) -> list[KnownWorker]:
        """Up to `most` of those with as much to do as `ms` allows."""
        filled = self._filled & ((2 << _level(ms)) - 1)
        found: list[KnownWorker] = []
        while filled and len(found) < most:
            level = filled.bit_length() - 1
            filled ^= 1 << level
            found += _some(self._levels[level], most - len(found), start)
        return found

    def on_ring(self, hashes: tuple[bytes, ...]) -> Iterator[KnownWorker]:
        """Replicas in an order that every gateway finds alike for prompts that begin alike."""
        if not self._ring:
            return
        at, seen = bisect_right(self._ring, (_hashed(b"".join(hashes)), -1)), set()
        for i in range(len(self._ring)):
            number = self._ring[(at + i) % len(self._ring)][1]
            if number not in seen:
                seen.add(number)
                yield self.all[number]


def _level(ms: float) -> int:
    level = int(8 * log2(ms + 1)) if ms > 0 else 0  # times measured on a busy machine may fall with the rows
    return level if level < _LEVELS else _LEVELS - 1


def _some(workers: list[KnownWorker], most: int, start: int) -> list[KnownWorker]:
    count = len(workers)
    if count <= most:
        return workers
    at = start % count
    return workers[at : at + most] if at + most <= count else workers[at:] + workers[: at + most - count]


def _hashed(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
