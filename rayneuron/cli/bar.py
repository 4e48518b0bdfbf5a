"""A progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayneuron.models import Progress


@contextmanager
def bar(unit: str) -> Iterator[Progress]:
    """A progress bar in a terminal, nothing elsewhere, driven by progress(done, total)."""
    from tqdm import tqdm

    with tqdm(unit=f" {unit}", disable=None) as drawn:

        def progress(done: int, total: int) -> None:
            drawn.total = total
            drawn.update(done - drawn.n)

        yield progress
