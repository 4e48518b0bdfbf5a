"""A stream from a model's handle, for other Ray applications: cancelled where it is dropped, as Serve's own is not."""

from __future__ import annotations

import contextlib
from typing import Any


class Stream:
    """`Stream(handle.generate, "Hello", {"max_tokens": 8})`: what `handle.generate.options(stream=True).remote(...)` yields, to be read by
    `for` or `async for`. Whoever lets go of it before its end has left: the model stops within two steps.

    Ray tells a replica nothing of a generator that was dropped; the caller's side has to.
    """

    def __init__(self, method: Any, *args: Any, **options: Any) -> None:
        self._response = method.options(stream=True).remote(*args, **options)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        return next(self._response)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._response)

    def cancel(self) -> None:
        """End it now. Harmless where it has ended."""
        self._response.cancel()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # Ray may be gone already
            self.cancel()
