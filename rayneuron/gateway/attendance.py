"""Calls of Serve that stand for orders: Serve scales, drains and chooses by how many calls a replica has, and orders are none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)


class Attends(Protocol):
    """How such calls reach replicas: `gateway.dispatch`, by Serve."""

    async def attend(self, replica: str, gateway: bytes) -> bool:
        """Wait there until it has fewer orders of this gateway than such calls; False where it came to another one. Raises whatever Serve
        says of a replica that has died."""

    def knows(self, replica: str) -> bool:
        """Whether Serve has it already."""


class Attendance:
    """As many calls wait at a replica as it has orders of one gateway. It lets those end that are too many, but only in a moment: orders
    that follow each other use the same calls. `doubt`: told where Serve has a replica no more that it had."""

    def __init__(self, calls: Attends, gateway: bytes, doubt: Callable[[], None]) -> None:
        self._calls, self._gateway, self._doubt = calls, gateway, doubt
        self._waiting: dict[int, set[asyncio.Task[None]]] = {}  # by worker
        self._attended: set[int] = set()

    def stand_for(self, worker: int, replica: str, orders: int) -> None:
        """A replica has so many orders. Which call has failed is made anew when this is asked next."""
        waiting = self._waiting.setdefault(worker, set())
        if len(waiting) < orders and self._calls.knows(replica):
            for _ in range(orders - len(waiting)):
                task = asyncio.get_running_loop().create_task(self._attend(worker, replica))
                waiting.add(task)
                task.add_done_callback(waiting.discard)

    async def _attend(self, worker: int, replica: str) -> None:
        try:
            if await self._calls.attend(replica, self._gateway):
                self._attended.add(worker)
            elif worker in self._attended:
                self._doubt()
        except Exception as wrong:  # Serve's word for a replica that has died: its connection says so, too
            log.info("%s is not attended: %r", replica, wrong)

    def forget(self, worker: int) -> None:
        """A replica is gone."""
        self._attended.discard(worker)
        for task in self._waiting.pop(worker, ()):
            task.cancel()

    def close(self) -> None:
        """No replica is there any more."""
        for worker in list(self._waiting):
            self.forget(worker)
