"""What the store has registered and forgotten, as numbered batches that others can follow."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable

from rayneuron.news import Cleared, KvNews, Removed, Stored

RING = 4096  # batches that are kept for who comes late


class KvLog:
    """The events of one engine's life, its `epoch`. Belongs to the engine's thread."""

    def __init__(self, kept: int = RING) -> None:
        self.epoch = secrets.randbits(63)
        self.number = 0  # of the last batch, from 1
        self._ring: deque[list[Stored | Removed | Cleared]] = deque(maxlen=kept)
        self.open: list[Stored | Removed | Cleared] = []  # not in a batch yet

    def note(self, event: Stored | Removed | Cleared) -> None:
        """Something has changed."""
        last = self.open[-1] if self.open else None
        if isinstance(event, Removed) and isinstance(last, Removed):
            last.hashes.extend(event.hashes)
        else:
            self.open.append(event)
        if isinstance(event, Cleared):
            self.flush()  # nobody is to count on them until the next step, which may be long in coming

    def flush(self) -> None:
        """What has changed since the last time is a batch."""
        if self.open:
            self.number += 1
            self._ring.append(self.open)
            self.open = []

    def since(self, epoch: int, number: int, held: Iterable[bytes]) -> KvNews:
        """What who knows everything up to `number` of `epoch` lacks. `held`: the hashes there are."""
        self.flush()
        behind = self.number - number
        if epoch != self.epoch or not 0 <= behind <= len(self._ring):
            return KvNews(self.epoch, self.number, [], list(held))
        return KvNews(self.epoch, self.number, [self._ring[-1]] if behind == 1 else [self._ring[at] for at in range(-behind, 0)])
