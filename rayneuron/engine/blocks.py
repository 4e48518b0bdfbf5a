"""The KV store of one engine: who holds which row and which blocks, and which full blocks are known by their hash.

A full block whose KV is computed and whose ids are known is registered: from then on nobody writes it, and whoever needs the same prefix
takes it. When nobody holds it any more it stays, until the room is needed: the one that has been free longest goes first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rayneuron.engine.hold import Hold
from rayneuron.engine.idle import Cached, Free
from rayneuron.engine.kv_events import KvLog
from rayneuron.engine.registered import Registered
from rayneuron.models.kv import KvSpace
from rayneuron.news import Cleared, KvNews, Removed, Stored


class Blocks:
    """Owner of every row and block. The lowest free ones go first, so that rows stay dense and memory that was never used stays untouched.

    Invariant (`check`): free + held rows are all rows; a block is free, cached (registered, and nobody's), in limbo, or as many hold it
    as its count says; a hash names one block. Limbo: what is freed while steps are under way, which may still read it, until they have
    ended. A ticket holds the blocks of a prompt that another pool reads, whose sequence has ended. A registered block's parent is
    registered: a holder of a child holds the whole chain, of which equal blocks are one (`settle`), and gives the last back first. `log`:
    None where no block is ever registered. `part`: positions of a block that are copied together where another begins so.
    """

    def __init__(self, space: KvSpace, log: KvLog | None = None, part: int | None = 16) -> None:
        self.space = space
        self.log = log
        self.limbo: dict[int, int] = {}  # block: the step it waits for
        self.cached = Cached()
        self.evictions = 0
        self._rows = list(range(space.rows))
        self._free = Free(space.blocks)
        self._held: set[int] = set()  # that somebody holds
        self._more: dict[int, int] = {}  # how many hold one of these beside the first: few are shared
        self.registered = Registered(part)
        self._copies: dict[int, int] = {}  # to: from, which is held until it has been copied
        self._tickets: dict[bytes, Hold] = {}
        self._pins: Counter[int] = Counter()  # tickets of a block
        self._begun = self._ended = self._resets = 0
        self._table = np.full((space.rows, space.width(space.limit)), space.null, np.int32)

    @property
    def free_rows(self) -> int:
        """Rows nobody holds."""
        return len(self._rows)

    @property
    def free(self) -> int:
        """Blocks nobody holds and nobody knows."""
        return self._free.count

    @property
    def used(self) -> int:
        """Blocks somebody holds."""
        return self.space.blocks - self._free.count - self.cached.count - len(self.limbo)

    @property
    def pinned(self) -> int:
        """Blocks that tickets hold."""
        return len(self._pins)

    @property
    def total_tokens(self) -> int:
        """Positions in all blocks."""
        return self.space.blocks * self.space.block

    def admit(self, tokens: int, hashes: Sequence[bytes] = (), like: Hold | None = None, known: int = 0) -> Hold | None:
        """A row with room for `tokens`, or None, and nothing changed.

        It begins with the registered blocks that `hashes` name from the first on. Where `like`, which has KV of the same first `known`
        positions, goes further, its whole blocks are shared and the rest is copied.
        """
        size, found = self.space.block, self.registered.chain(hashes)
        further = like is not None and known > len(found) * size
        if like is not None and further:
            found = like.blocks[: known // size]
        shared, need = len(found), -(-tokens // size) - len(found)
        nobodys = [block for block in found if block not in self._held and block not in self.limbo] if found else ()
        if not self._rows or need > self._free.count + self.cached.count - len(nobodys):
            return None
        age = like.age if like is not None and further else self._resets
        hold = Hold(heapq.heappop(self._rows), found, self._table, age, shared, known if further else shared * size)
        for block in found:
            self._take(block)
        self.extend(hold, tokens)
        if like is not None and further:
            like.shared = max(like.shared, shared)
            if known % size:
                self._copies[hold.blocks[shared]] = source = like.blocks[shared]
                self._take(source)
        return hold

    def extend(self, hold: Hold, tokens: int) -> bool:
        """Make room for `tokens` positions; False, and nothing changed, where too few blocks can be had."""
        if (more := -(-tokens // self.space.block) - len(hold.blocks)) <= 0:
            return True
        taken = self._fresh(more)
        hold.blocks += taken
        hold.changes += 1
        return len(taken) >= more

    def rematch(self, hold: Hold, hashes: Sequence[bytes]) -> int:
        """Take what others have registered meanwhile instead of computing it; positions of the leading registered blocks."""
        if hold.age == self._resets:
            for at in range(hold.shared, min(len(hashes), len(hold.blocks))):
                if (block := self.registered.get(hashes[at])) is None:
                    break
                self._swap(hold, at, block)
                hold.shared = at + 1
        return hold.shared * self.space.block

    def begin_alike(self, hold: Hold, before: bytes, ids: Sequence[int], spare: int) -> bool:
        """Whether a hold's first own block, of `ids` behind `before`, begins as a registered one, whose KV is copied: `hold.known` says
        how far. `spare`: blocks that must stay to be had meanwhile."""
        at, size = hold.shared, self.space.block
        if hold.known != at * size or self._free.count + self.cached.count <= spare:
            return False
        source, count = self.registered.alike(before, ids)
        if count:
            self._take(source)
            self._copies[hold.blocks[at]] = source
            hold.known += count
        return count > 0

    def settle(self, hold: Hold, hashes: Sequence[bytes], root: bytes, ids: Sequence[int] = ()) -> None:
        """Register the first blocks of a hold, one a hash, whose KV of `ids` is computed. Where an equal block is there, that is taken."""
        shared, size, most = hold.shared, self.space.block, len(hashes)
        if self.log is None or hold.age != self._resets or most <= shared:
            return
        fresh, own = list(hashes[shared:]), hold.blocks[shared:most]
        found = self.registered.enter(fresh, own, hashes[shared - 1] if shared else root, ids[shared * size : most * size])
        if found != own:
            fresh = [digest for digest, first, block in zip(fresh, found, own, strict=True) if first == block]
            for at, first in enumerate(found, shared):
                self._swap(hold, at, first)
        if fresh:
            before = most - len(fresh)
            self.log.note(Stored(hashes[before - 1] if before else root, fresh))
        hold.shared = most

    def release(self, hold: Hold) -> None:
        """Give a row and its blocks back, the last first; shared ones stay with those who still hold them."""
        self._shorten(hold, 0)
        self._vacate(hold)

    def pin(self, hold: Hold, ticket: bytes, tokens: int) -> None:
        """What holds the first `tokens` positions is the ticket's from now on; the row and the rest are given back."""
        self._shorten(hold, self.space.width(tokens))
        self._vacate(hold)
        self._tickets[ticket] = hold
        self._pins.update(hold.blocks)

    def unpin(self, ticket: bytes) -> None:
        """Give back what a ticket holds; harmless where it holds nothing."""
        if (hold := self._tickets.pop(ticket, None)) is not None:
            self._pins -= Counter(hold.blocks)  # what comes to nothing goes
            self._shorten(hold, 0)

    def reset(self) -> int:
        """Forget what every block holds, and of how many. Who runs goes on with what it holds, and registers nothing more."""
        count = len(self.registered.hashes)
        self.registered.clear()
        self._resets += 1
        for block in self.cached.clear():
            self._free.give(block)
        if self.log is not None:
            self.log.note(Cleared())
        return count

    def copies(self) -> list[tuple[int, int]]:
        """(from, to) of the copies that the next step begins with."""
        return [(source, target) for target, source in self._copies.items()] if self._copies else []

    def begin(self) -> None:
        """A step has begun, with the copies there were."""
        self._begun += 1
        if self._copies:
            copied, self._copies = self._copies, {}
            self._drop(copied.values())

    def end(self) -> None:
        """The step that has been under way longest has ended."""
        self._ended += 1
        if self.limbo:
            over = [block for block, step in self.limbo.items() if step <= self._ended]
            for block in over:
                del self.limbo[block]
            self._rest(over)

    def hashes(self) -> list[bytes]:
        """Of all registered blocks."""
        return list(self.registered)

    def news(self, epoch: int = 0, number: int = 0) -> KvNews | None:
        """What who knows the blocks registered here up to `number` of `epoch` lacks; None where none ever is."""
        return None if self.log is None else self.log.since(epoch, number, self.registered)

    def _shorten(self, hold: Hold, blocks: int) -> None:
        """Give back all but the first blocks, the last first."""
        given, hold.blocks[blocks:] = hold.blocks[blocks:], []
        self._drop(reversed(given))

    def _vacate(self, hold: Hold) -> None:
        hold.lift(self.space.null)
        heapq.heappush(self._rows, hold.row)

    def _take(self, block: int) -> None:
        """One more holder of a block that is held, cached or in limbo."""
        if block in self._held:
            self._more[block] = self._more.get(block, 0) + 1
            return
        if self.limbo.pop(block, None) is None:
            self.cached.leave(block)
        self._held.add(block)

    def _swap(self, hold: Hold, at: int, block: int) -> None:
        if (own := hold.blocks[at]) != block:
            self._take(block)
            hold.swap(at, block)
            self._drop([own])

    def _drop(self, blocks: Iterable[int]) -> None:
        over = self._unshared(blocks) if self._more or self._copies else list(blocks)
        self._held.difference_update(over)
        if self._begun > self._ended:
            self.limbo.update(dict.fromkeys(over, self._begun))
        else:
            self._rest(over)

    def _unshared(self, blocks: Iterable[int]) -> list[int]:
        """Those of which the last holder goes; of the others one goes."""
        over: list[int] = []
        for block in blocks:
            if more := self._more.pop(block, 0):
                if more > 1:
                    self._more[block] = more - 1
                continue
            if block in self._copies:  # it is not needed any more
                self._drop([self._copies.pop(block)])
            over.append(block)
        return over

    def _rest(self, blocks: list[int]) -> None:
        known = self.registered.hashes
        fresh = [block for block in blocks if block not in known]
        self.cached.add([block for block in blocks if block in known] if fresh else blocks)
        for block in fresh:
            self._free.give(block)

    def _fresh(self, count: int) -> list[int]:
        """So many blocks that nobody holds, the lowest unknown ones first; none where there are too few."""
        free, cached = self._free, self.cached
        if (short := count - free.count) > cached.count:
            return []
        taken = free.take(count if short < 0 else free.count)
        if short > 0:
            taken += (old := cached.take(short))
            gone, self.evictions = self.registered.leave(old), self.evictions + short
            if self.log is not None and gone:
                self.log.note(Removed(gone))
        self._held.update(taken)
        return taken

    def check(self, holds: Iterable[Hold]) -> None:
        """Raise AssertionError if the invariant is broken. `holds`: all there are but the tickets'."""
        holds, known = list(holds), self.registered.hashes
        tickets = Counter(block for hold in self._tickets.values() for block in hold.blocks)
        counted = tickets + Counter(block for hold in holds for block in hold.blocks) + Counter(self._copies.values())
        assert tickets == self._pins, (tickets, self._pins)
        assert sorted([*self._rows, *(hold.row for hold in holds)]) == list(range(self.space.rows)), self._rows
        assert counted.keys() == self._held and {b: n - 1 for b, n in counted.items() if n > 1} == self._more, (counted, self._more)
        nobodys = [block for block in range(self.space.blocks) if block not in self._held]
        assert sorted([*self._free, *self.cached, *self.limbo]) == nobodys, (self._free, self.cached, self.limbo)
        self.registered.check()
        assert known.keys().isdisjoint(self._free)
        self._check_cached()
        for hold in holds:
            laid, line = hold.laid, hold.table[hold.row]
            assert line[:laid].tolist() == hold.blocks[:laid] and (line[laid:] == self.space.null).all(), hold
            written = [block for block in hold.blocks[hold.shared :] if block not in self._copies.values()]
            assert all(counted[block] == 1 and block not in known for block in written), "a block that others read may be written"

    def _check_cached(self) -> None:
        assert {*self.cached} <= self.registered.hashes.keys()
