"""A progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in a terminal, nothing elsewhere, driven by progress(done, total)."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", disable=None) as drawn:

        def progress(done: int, total: int) -> None:
            drawn.total = total
            drawn.update(done - drawn.n)

        yield progress
