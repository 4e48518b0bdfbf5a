"""What the engine does with single rows of logits on the host, by the CPU's kernels where they are built, whatever the device is.

B rows, V vocabulary. None: there are no kernels, or they do not read such logits; `engine.sampling` and `engine.logits` do it in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rayneuron.devices.cpu import draws, library


def prepare() -> None:
    """Find out now whether there are kernels: that runs the compiler and reads the sources, which is not for a step to wait for."""
    library.present()


def draw(rows: Sequence[Tensor], hows: Sequence[draws.How], masks: Sequence[NDArray[np.uint32] | None]) -> list[int] | None:
    """The ids of rows [V]. Masks: a bit for each id that may come; -1 where none can."""
    found = library.present() if all(map(draws.fits, rows)) else None
    return None if found is None else draws.draw_rows(found, rows, hows, masks)


def describe(rows: Sequence[Tensor], tokens: Sequence[int], count: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """As `engine.logits.describe`."""
    found = library.present() if all(map(draws.fits, rows)) else None
    return None if found is None else draws.describe(found, rows, tokens, count)
