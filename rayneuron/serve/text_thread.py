"""One thread for text that is too long for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rayneuron.api import call as api
from rayneuron.policies import admission
from rayneuron.types import Delta

Result = TypeVar("Result")

LONG_BYTES = 16 * 1024  # beyond this a body is tokenised off the event loop; below, the hop costs more than the work


class TextThread:
    """Begun with the first long work, ended by `close`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rayneuron-text")

    async def run(self, size_bytes: int, work: Callable[[], Result]) -> Result:
        """Run `work` here if it is small, else on the thread."""
        if size_bytes <= LONG_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def write(self, call: api.Call, deltas: list[Delta], write: Callable[[dict[str, Any]], Result]) -> Result:
        """The whole reply, as `write` makes it; one with many probabilities is put together on the thread."""
        return await self.run(100 * admission.measure(call.requests).scores, lambda: write(call.reply(deltas)))

    def close(self) -> None:
        """Forget what has not begun; the thread ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
