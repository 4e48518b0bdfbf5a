"""Adapters as the kernels read them: packed pairs, and a table of one row a slot for every layer.

R the adapter's rank; a pair is A [R, in] and B [out, R].
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from rayneuron.devices.cpu.packing import Arena, MatrixFields, Packed, packed
from rayneuron.models.adapted import Pairs

PARTS = ("q", "k", "v", "o", "gate", "up", "down")
PackedPairs = Mapping[str, tuple[Packed, Packed]]


class PairFields(ctypes.Structure):
    """`Pair` of adapt.h."""

    _fields_ = [("a", MatrixFields), ("b", MatrixFields)]


class LoraFields(ctypes.Structure):
    """`Lora` of adapt.h."""

    _fields_ = [(part, PairFields) for part in PARTS]


class Slots:
    """The slots of every layer. `put` changes them between two steps; what is in one is kept alive here."""

    def __init__(self, layers: int, slots: int) -> None:
        self._tables = [(LoraFields * slots)() for _ in range(layers)]
        self._held: list[Sequence[PackedPairs] | None] = [None] * slots

    def address(self, layer: int) -> int:
        """Of a layer's table."""
        return ctypes.addressof(self._tables[layer])

    def put(self, slot: int, adapter: Sequence[PackedPairs]) -> None:
        """Have a slot hold an adapter."""
        for table, pairs in zip(self._tables, adapter, strict=True):
            table[slot] = LoraFields(**{name: PairFields(a.fields, b.fields) for name, (a, b) in pairs.items()})
        self._held[slot] = adapter


def pack(adapter: Sequence[Pairs], dtype: torch.dtype) -> list[PackedPairs]:
    """Every pair packed, in memory that is given back with them. For any thread."""
    arena = Arena()
    return [{name: (_packed(a, arena, dtype), _packed(b, arena, dtype)) for name, (a, b) in pairs.items()} for pairs in adapter]


def _packed(t: torch.Tensor, arena: Arena, dtype: torch.dtype) -> Packed:
    return packed({"pair.w": t}, "pair", arena, dtype)
