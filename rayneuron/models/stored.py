"""The shape of every tensor as a family's checkpoints store it: tried on tensors without memory, from the config alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from rayneuron.models.arch import Arch
from rayneuron.models.rules import shape_of


def checkpoint_shapes(arch: Arch, family: ModuleType) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor a checkpoint of this architecture holds, as its family stores them."""
    parts = [("", family.top(arch), arch.ffn)]
    for i in range(arch.layers):
        parts.append((family.PREFIX.format(i), family.layer(arch, i), arch.dense_ffn if i in arch.dense_layers else arch.ffn))
    for prefix, rules, ffn in parts:
        for ours, rule in rules.items():
            theirs, convert = rule if isinstance(rule, tuple) else (rule, None)
            if arch.tied and ours == "head.w":
                continue
            for e in range(arch.experts if "{e}" in theirs else 1):
                yield prefix + theirs.replace("{e}", str(e)), stored_shape(arch, ours.split(), ffn, convert)


def stored_shape(arch: Arch, names: list[str], ffn: int, convert: object) -> tuple[int, ...]:
    """The shape that `convert` brings to the canonical one(s): tried, for there are few ways to store a product."""
    want = [shape_of(arch, n, ffn) for n in names]
    shape = (sum(s[0] for s in want), *want[0][1:])
    ways = (shape, shape[::-1], (arch.experts * ffn, arch.hidden))
    return next(w for w in ways if _fits(w, convert, want, arch.experts))


def _fits(shape: tuple[int, ...], convert: object, want: list[tuple[int, ...]], experts: int) -> bool:
    if convert is None:
        return shape == want[0]
    try:
        made = convert(torch.empty(shape, device="meta"))  # type: ignore[operator]
    except RuntimeError:  # this shape cannot be unflattened so
        return False
    pieces: tuple[Tensor, ...] = made if isinstance(made, tuple) else (made,)
    return all(tuple(p.shape) in (w, (experts, *w)) for p, w in zip(pieces, want, strict=True))
