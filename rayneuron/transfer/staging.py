"""Where the host cannot address the device's KV: blocks are copied out before they are lent, and in after they have come.

Both on the engine's thread, between its steps: what was computed once its tokens are out, what has come in a share of the time between two
steps, so that those who decode are not held up.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from rayneuron.engine.remote import Absent, Arrived, First, Lent, Loan, Prefill, Prefills
from rayneuron.errors import NotReady
from rayneuron.news import KvNews
from rayneuron.transfer.base import Lends
from rayneuron.types import Request

AT_ONCE = 16  # blocks that are copied in by one call
SHARE = 0.2  # of the time between two steps


class Stages(Protocol):
    """Host memory for blocks, by their numbers (`devices.staged.Staged`)."""

    def out(self, blocks: Sequence[int]) -> None:
        """From the device."""

    def into(self, blocks: Sequence[int]) -> None:
        """To the device."""

    def drop(self, blocks: Sequence[int]) -> None:
        """Nobody reads them here any more."""


class StagedLends:
    """`Lends` of an engine whose blocks are lent as copies. A block that several tickets have is kept until the last of them is over."""

    def __init__(self, engine: Lends, stages: Stages, later: Callable[[Callable[[], None]], object]) -> None:
        """`later`: has something done on the engine's thread before its next step. Raises NotReady where there is none."""
        self._engine, self._stages, self._later = engine, stages, later
        self._lock = threading.Lock()
        self._lent: dict[bytes, list[int]] = {}  # of every ticket: the blocks that were copied out
        self._tickets: Counter[int] = Counter()  # by block: how many have it

    def submit(self, request: Request, loan: Loan | None = None) -> None:
        """As `Lends`."""
        if loan is None:
            return self._engine.submit(request)
        with self._lock:
            self._lent[loan.ticket] = []
        try:
            self._engine.submit(request, Loan(loan.ticket, partial(self._settled, loan.told)))
        except BaseException:
            self._forget(loan.ticket)
            raise

    def abort(self, request_id: str) -> None:
        """As `Lends`."""
        self._engine.abort(request_id)

    def unpin(self, ticket: bytes) -> None:
        """As `Lends`."""
        self._forget(ticket)
        self._engine.unpin(ticket)

    def news(self, epoch: int, number: int) -> Future[KvNews | None] | None:
        """As `Lends`."""
        return self._engine.news(epoch, number)

    def _settled(self, told: Callable[[Lent], None], news: Lent) -> None:
        with contextlib.suppress(NotReady):
            self._later(partial(self._copied, told, news))  # the tokens of this step go out first

    def _copied(self, told: Callable[[Lent], None], news: Lent) -> None:
        with self._lock:
            lent = self._lent.get(news.ticket)
            if lent is None:
                return  # it is over
            new = news.blocks[len(lent) :]
            if new:
                self._stages.out(new)
                lent += new
                self._tickets.update(new)
        told(news)

    def _forget(self, ticket: bytes) -> None:
        with self._lock:
            lent = self._lent.pop(ticket, [])
            self._tickets.subtract(lent)
            over = [block for block in lent if not self._tickets[block]]
            for block in over:
                del self._tickets[block]
            self._stages.drop(over)


class StagedPrefills:
    """`Prefills` whose KV has arrived once it is on the device."""

    def __init__(self, prefills: Prefills, stages: Stages, block: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`block`: positions of one."""
        self._prefills, self._stages, self._size, self._clock = prefills, stages, block, clock
        self._blocks: dict[str, list[int]] = {}  # by key: what others write
        self._arrived: deque[tuple[Arrived, list[int]]] = deque()  # and what of it is not on the device yet
        self._taken = clock()

    @property
    def wake(self) -> Callable[[], None]:
        """As `Prefills`."""
        return self._prefills.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._prefills.wake = wake

    def ask(self, prefill: Prefill) -> bool:
        """As `Prefills`."""
        if not self._prefills.ask(prefill):
            return False
        self._blocks[prefill.key] = list(prefill.blocks[prefill.known // self._size :])
        return True

    def kept(self, why: str) -> None:
        """As `Prefills`."""
        self._prefills.kept(why)

    def cancel(self, key: str) -> None:
        """As `Prefills`."""
        self._prefills.cancel(key)

    def take(self) -> list[First | Arrived | Absent]:
        """As `Prefills`; what has come is copied in first, some blocks at a time."""
        taken: list[First | Arrived | Absent] = []
        for event in self._prefills.take():
            if isinstance(event, Arrived):
                self._arrived.append((event, self._blocks.pop(event.key)))
                continue
            if isinstance(event, Absent):
                self._stages.drop(self._blocks.pop(event.key))
            taken.append(event)
        began = now = self._clock()
        until, self._taken = began + SHARE * (began - self._taken), began
        while self._arrived and (now < until or now == began):
            event, left = self._arrived[0]
            some = left[:AT_ONCE]
            self._stages.into(some)
            self._stages.drop(some)
            del left[: len(some)]
            if not left:
                taken.append(self._arrived.popleft()[0])
            now = self._clock()
        if self._arrived:
            self._prefills.wake()
        return taken

    def close(self) -> None:
        """As `Prefills`."""
        self._prefills.close()
