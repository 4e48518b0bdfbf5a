"""What the engine does with single rows of logits on the host, by the CPU's kernels where they are built, whatever the device is.

B rows, V vocabulary. None: there are no kernels, or they do not read such logits; `engine.sampling` and `engine.logits` do it in torch.
"""

from __future__ import annotations

from torch import Tensor

from rayneuron.devices.cpu import draws, library


def draw(logits: Tensor, *how: Tensor) -> Tensor | None:
    """Ids [B] of logits [B,V]; `how`: temperature, top_k, top_p, min_p, uniform, each [B]. By the calling thread alone."""
    found = library.present() if draws.fits(logits) else None
    return None if found is None else draws.draw(found, None, logits, *how)


def describe(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """As `engine.logits.describe`."""
    found = library.present() if draws.fits(logits) else None
    return None if found is None else draws.describe(found, logits, tokens, count)
