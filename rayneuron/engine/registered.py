"""Which block holds the KV of which prefix: by the hash of its chain, or as what follows a prefix and begins alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

_LOOKED_AT = 8  # of what follows one prefix, the newest


class Registered:
    """The registered blocks of a store: a hash names one block, a block has one hash.

    `part`: positions that are found alike together. Fewer would hardly be worth a copy, and who guesses what others have sent, and is told
    how much of it was known, must guess so many at once.
    """

    def __init__(self, part: int) -> None:
        self.part = part
        self._at: dict[bytes, int] = {}
        self._of: dict[int, bytes] = {}
        self._ids: dict[int, tuple[bytes, Sequence[int]]] = {}  # the hash before a block, and its ids, where those were said
        self._after: dict[bytes, dict[int, None]] = {}  # blocks by the hash before them, the newest last

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._at)

    def __contains__(self, block: int) -> bool:
        return block in self._of

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

    def enter(self, digest: bytes, block: int, before: bytes, ids: Sequence[int]) -> int:
        """The block of this hash: `block` from now on, where there was none. `before`: the hash of what it follows; `ids`: its own."""
        known = self._at.setdefault(digest, block)
        if known == block and block not in self._of:
            self._of[block] = digest
            if ids:
                self._ids[block] = before, ids
                self._after.setdefault(before, {})[block] = None
        return known

    def leave(self, block: int) -> bytes:
        """A block is known no more; the hash it had."""
        digest = self._of.pop(block)
        del self._at[digest]
        if block in self._ids:
            before, _ = self._ids.pop(block)
            after = self._after[before]
            del after[block]
            if not after:
                del self._after[before]
        return digest

    def clear(self) -> None:
        """Forget all."""
        for held in (self._at, self._of, self._ids, self._after):
            held.clear()

    def alike(self, before: bytes, ids: Sequence[int]) -> tuple[int, int]:
        """Of what follows `before`, the block that begins with most of `ids`, and with how many, in whole parts; 0: there is none."""
        block, most, after = -1, 0, self._after.get(before)
        if after and len(ids) >= self.part:
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
        assert {block: digest for digest, block in self._at.items()} == self._of
        followed = {block: before for before, after in self._after.items() for block in after}
        assert {block: before for block, (before, _) in self._ids.items()} == followed
        assert self._ids.keys() <= self._of.keys()
