"""How much memory a rank needs, by arithmetic on a family's rules: nothing of the weights is read, and torch is not needed.

A test compares every family, at every degree and stage, with what the loader really holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from types import ModuleType

from rayneuron.models import shard
from rayneuron.models.adaptable import Module
from rayneuron.models.arch import Arch
from rayneuron.models.kv import KvShape, KvSpace
from rayneuron.models.rules import PRODUCTS, WIDE, Rules, cut_of, entering, shape_of

OF_EXPERTS = ("gate.w", "up.w", "down.w", "gate.b", "up.b", "experts.down.b")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Elements a rank holds: of products, which may be quantised, of what is always float32, and of everything else; and output channels of
    products, a scale each."""

    products: int = 0
    others: int = 0
    channels: int = 0
    wide: int = 0

    def __add__(self, more: Parameters) -> Parameters:
        sums = (getattr(self, f.name) + getattr(more, f.name) for f in fields(self))
        return Parameters(*sums)


@dataclass(frozen=True, slots=True)
class Share:
    """How ranks share a model: every tensor's shape on one of them."""

    arch: Arch
    plan: shard.HeadPlan

    def shape(self, name: str, ffn: int) -> tuple[int, ...]:
        """The shape of a canonical tensor (of one expert). `ffn`: the inner size of its layer."""
        shape = list(shape_of(self.arch, name, ffn))
        if (cut := cut_of(name)) is not None:
            units, dim = cut
            heads = {"query heads": self.plan.q_heads, "KV heads": self.plan.kv_heads}
            shape[dim] = heads[units] * self.arch.head_dim if units in heads else -(-shape[dim] // self.plan.ranks)
        return tuple(shape)

    def count(self, names: Iterable[str], ffn: int = 0, copies: int = 1) -> Parameters:
        """The elements of some canonical tensors. `copies`: experts a feed-forward product exists for."""
        total = Parameters()
        for name in names:
            shape = self.shape(name, ffn)
            each = copies if name in OF_EXPERTS else 1
            size = prod(shape) * each
            if name in PRODUCTS:
                total += Parameters(size, 0, shape[0] * each)
            else:
                total += Parameters(wide=size) if name in WIDE else Parameters(others=size)
        return total


def share(arch: Arch, ranks: int) -> Share:
    """How `ranks` share a model. Raises ConfigError where they cannot."""
    return Share(arch, shard.head_plan(arch.heads, arch.kv_heads, ranks, arch.gqa, arch.sequence_shards))


def canonical(rules: Rules) -> list[str]:
    """Our names on the left of `rules`."""
    return [name for names in rules for name in names.split()]


@lru_cache(64)  # a refusal tries many settings of one model
def parameters(
    arch: Arch, family: ModuleType, ranks: int = 1, layers: range | None = None, *, first: bool = True, last: bool = True
) -> Parameters:
    """What one rank of a stage holds, constants of a few hundred bytes aside. `layers`: the stage's (all); `first`, `last`: its place."""
    part = share(arch, ranks)
    names = [name for name in canonical(family.top(arch)) if name != "head.w"]
    total = part.count(name for name in names if (first if entering(name) else last))
    if last and not (arch.tied and first):
        total += part.count(["head.w"])
    for i in layers if layers is not None else range(arch.layers):
        dense = not arch.experts or i in arch.dense_layers
        inner = arch.dense_ffn if i in arch.dense_layers else arch.ffn
        total += part.count(canonical(family.layer(arch, i)), inner, 1 if dense else arch.experts)
    return total


def adapter_columns(arch: Arch, modules: Mapping[str, Module], ranks: int, layers: range) -> int:
    """Numbers of a column of A and a row of B on a rank, over all products of some layers that adapters may have."""
    part, total = share(arch, ranks), 0
    for module in modules.values():
        ffn = arch.dense_ffn if module.layer in arch.dense_layers else arch.ffn
        if module.room and module.layer in layers:
            total += sum(sum(part.shape(product + ".w", ffn)) for product in module.products)
    return total


def kv_shape(arch: Arch, space: KvSpace, ranks: int = 1, layers: int | None = None) -> KvShape:
    """The KV of one rank that holds `layers` layers (all of them)."""
    return KvShape(space, arch.layers if layers is None else layers, share(arch, ranks).plan.kv_heads, arch.head_dim, arch.sequence_shards)
