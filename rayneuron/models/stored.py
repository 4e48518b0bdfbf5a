"""The shape of every tensor as a family's checkpoints store it: tried on tensors without memory, from the config alone."""

from __future__ import annotations

import torch
from torch import Tensor

from rayneuron.models.arch import Arch
from rayneuron.models.rules import same, shape_of


def stored_shape(arch: Arch, names: list[str], ffn: int, convert: object) -> tuple[int, ...]:
    """The shape that `convert` brings to the canonical one(s): tried, for there are few ways to store a product."""
    want = [shape_of(arch, n, ffn) for n in names]
    shape = (sum(s[0] for s in want), *want[0][1:])
    product = names[0].partition(".")[0]
    stacked = arch.experts and (product == "experts" or (product in ("gate", "up", "down") and convert not in (None, same)))
    together = [(arch.experts, *shape), (arch.experts, *shape[::-1])] if stacked else []
    ways = (*together, shape, shape[::-1], (arch.experts * ffn, arch.hidden), (arch.heads,), (1, *shape))
    return next(w for w in ways if _fits(w, convert, want, arch.experts))


def _fits(shape: tuple[int, ...], convert: object, want: list[tuple[int, ...]], experts: int) -> bool:
    if convert is None:
        return shape in (want[0], (experts, *want[0]))
    try:
        made = convert(torch.empty(shape, device="meta"))  # type: ignore[operator]
    except (RuntimeError, IndexError):  # this shape cannot be unflattened so
        return False
    pieces: tuple[Tensor, ...] = made if isinstance(made, tuple) else (made,)
    return all(tuple(p.shape) in (w, (experts, *w)) for p, w in zip(pieces, want, strict=True))
