"""How much memory a rank needs, from the config alone: nothing of the weights is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import ModuleType

import torch
from torch import Tensor

from rayneuron.models.arch import Arch
from rayneuron.models.decoder import kv_shapes
from rayneuron.models.quantization import Quantization
from rayneuron.models.rules import shape_of
from rayneuron.models.weights import load


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of one rank. `reading_bytes`: the largest tensor of the checkpoint, held for a moment while it is cut."""

    weights_bytes: int
    kv_bytes: int
    reading_bytes: int

    @property
    def total_bytes(self) -> int:
        """The most a rank needs at once, but for activations and the program itself."""
        return self.weights_bytes + max(self.kv_bytes, self.reading_bytes)

    def __str__(self) -> str:
        held, kv, read = (n / 2**20 for n in (self.weights_bytes, self.kv_bytes, self.reading_bytes))
        return f"weights {held:.1f} MiB, KV {kv:.1f} MiB, {read:.1f} MiB while reading"


def estimate(
    arch: Arch,
    family: ModuleType,
    *,
    dtype: torch.dtype,
    ranks: int = 1,
    rows: int = 0,
    length: int = 0,
    kv_dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
    stage: int = 0,
    stages: int = 1,
) -> Estimate:
    """What rank 0 of a stage holds. `rows` x `length` KV positions, scratch included."""
    whole = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in checkpoint_shapes(arch, family)}
    held = load(arch, family, whole, dtype=dtype, ranks=ranks, quantization=quantization, stage=stage, stages=stages)
    kv = kv_shapes(arch, rows, length, ranks, layers=len(held["layers"]))
    width = (kv_dtype or dtype).itemsize
    return Estimate(held_bytes(held), sum(prod(s) for s in kv) * width, max(t.nbytes for t in whole.values()))


def held_bytes(weights: Mapping[str, object]) -> int:
    """Bytes of a rank's weights; a tied head counts once."""
    tensors = {id(t): t for w in [weights["top"], *weights["layers"]] for t in w.values()}  # type: ignore[misc]
    return sum(t.nbytes for t in tensors.values())


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
