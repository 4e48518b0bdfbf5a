"""Which block holds the KV of which prefix: by the hash of its chain, or as what follows a prefix and begins alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

_LOOKED_AT = 8  # of what follows one prefix, the newest
NAMELESS = b""  # of a block that is kept, and that nobody finds by a hash


class Registered:
    """The registered blocks of a store: a hash names one block, a block has one hash, or none where it is full in part (NAMELESS).

    `part`: positions that are found alike together; None: only whole blocks are. Fewer would hardly be worth a copy, and who guesses what
    others have sent, and is told how much of it was known, must guess so many at once. `hashes`: by block, for others to read.
    """

    def __init__(self, part: int | None) -> None:
        self.part = part
        self.hashes: dict[int, bytes] = {}
        self._at: dict[bytes, int] = {}
        self._ids: dict[int, tuple[bytes, Sequence[int]]] = {}  # the hash before a block, and its ids, where those were said
        self._after: dict[bytes, dict[int, None]] = {}  # blocks by the hash before them, the newest last

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._at)

    def get(self, digest: bytes) -> int | None:
        """The block of a hash."""
        return self._at.get(digest)

    def chain(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the first hashes, up to one that names none."""
        found: list[int] = []
        for digest in hashes:
            if (block := self._at.get(digest)) is None:
                break
            found.append(block)
        return found

    def enter(self, digests: Sequence[bytes], blocks: Sequence[int], before: bytes, ids: Sequence[int] = ()) -> list[int]:
        """The blocks of these hashes, of which each follows the one before: those of `blocks` from now on, where there was none. `before`:
        the hash of what the first follows; `ids`: of all of them."""
        found, known = list(map(self._at.setdefault, digests, blocks)), self.hashes
        entered = {block: d for d, block, first in zip(digests, blocks, found, strict=True) if first == block and block not in known}
        known.update(entered)
        if self.part is not None and ids:
            size = len(ids) // len(digests)
            for at, block in enumerate(blocks):
                if block in entered:
                    self._ids[block] = before, ids[at * size : (at + 1) * size]
                    self._after.setdefault(before, {})[block] = None
                before = digests[at]
        return found

    def enter_part(self, block: int, before: bytes, ids: Sequence[int]) -> None:
        """A block that begins with `ids` behind `before`, and will be no fuller: it has no hash, but whoever begins so finds it. Unless
        another has as many of them already, or they are too few."""
        if self.part is not None and self.alike(before, ids)[1] < len(ids) // self.part * self.part and block not in self.hashes:
            self.hashes[block], self._ids[block] = NAMELESS, (before, ids)
            self._after.setdefault(before, {})[block] = None

    def leave(self, blocks: Sequence[int]) -> list[bytes]:
        """Blocks are known no more, where they were; the hashes they had."""
        known, at = self.hashes, self._at
        digests = [digest for block in blocks if block in known and (digest := known.pop(block))]
        for digest in digests:
            del at[digest]
        for block in blocks if self._ids else ():
            if block in self._ids:
                before, _ = self._ids.pop(block)
                after = self._after[before]
                del after[block]
                if not after:
                    del self._after[before]
        return digests

    def clear(self) -> None:
        """Forget all."""
        for held in (self._at, self.hashes, self._ids, self._after):
            held.clear()

    def alike(self, before: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """Of what follows `before`, the block that begins with most of `ids`, and with how many, in whole parts; 0: there is none."""
        block, most, after = -1, 0, self._after.get(before)
        if after and self.part is not None and len(ids) >= self.part:
            wanted = np.array(ids, np.int32)
            for other in islice(reversed(after), _LOOKED_AT):
                theirs = np.array(self._ids[other][1], np.int32)
                count = min(len(wanted), len(theirs))
                differ = np.flatnonzero(wanted[:count] != theirs[:count])
                same = (int(differ[0]) if differ.size else count) // self.part * self.part
                if same > most:
                    block, most = other, same
        return block, most

    def check(self) -> None:
        """Raise AssertionError if what is kept of a block and of its hash differ."""
        assert {block: digest for digest, block in self._at.items()} == {b: digest for b, digest in self.hashes.items() if digest}
        followed = {block: before for before, after in self._after.items() for block in after}
        assert {block: before for block, (before, _) in self._ids.items()} == followed
        assert self._ids.keys() <= self.hashes.keys()
