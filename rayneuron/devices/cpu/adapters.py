"""Adapters as the kernels read them: packed pairs, and a table of one row a slot for every layer.

R the adapter's rank, in whole vectors; a pair is A [R, in] and B [out, R].
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.cpu.packing import LANES, Arena
from rayneuron.models.adapted import Pairs

# What is multiplied at once, of what: outputs lie one behind the other, those of gate and up in turns of a vector.
TOGETHER = {"qkv": ("q", "k", "v"), "o": ("o",), "up": ("gate", "up"), "down": ("down",)}
PartSizes = Mapping[str, tuple[int, int]]


class PairFields(ctypes.Structure):
    """`Pair` of adapt.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "from_")),
        *((name, ctypes.c_int32) for name in ("ranks", "a_steps", "b_steps")),
    ]


class LoraFields(ctypes.Structure):
    """`Lora` of adapt.h."""

    _fields_ = [(name, PairFields) for name in TOGETHER]


class PackedAdapter:
    """An adapter: `rows` of every layer's table, in memory that is given back with them."""

    def __init__(self, layers: int) -> None:
        self.rows = [LoraFields() for _ in range(layers)]
        self._arena, self._held = Arena(), list[Tensor]()

    def put(self, layer: int, name: str, pairs: Pairs, sizes: PartSizes, dtype: torch.dtype, rest: Callable[[], None]) -> None:
        """The pairs of what is multiplied at once."""
        parts = [part for part in TOGETHER[name] if part in sizes]
        every = [pairs.get(part) for part in parts]
        downs = list({id(pair[0]): pair[0] for pair in every if pair is not None}.values())  # what was fused may share its A
        if not downs:
            return
        rank = _whole(max(map(len, downs)))
        a = torch.zeros(len(downs) * rank, _whole(downs[0].shape[1]), dtype=dtype)
        for i, down in enumerate(downs):
            a[i * rank : i * rank + len(down), : down.shape[1]] = down
        places = [-1 if pair is None else next(i for i, down in enumerate(downs) if down is pair[0]) for pair in every]
        outputs = [sizes[part][0] for part in parts]
        down = self._vectors(a)
        rest()
        b, starts = _up(every, places, outputs, rank, len(downs), dtype, gated=parts[0] == "gate")
        rest()
        up = self._vectors(b)
        rest()
        self._held += [down, up, starts]
        fields = PairFields(down.data_ptr(), up.data_ptr(), starts.data_ptr(), len(down), down.shape[1], up.shape[1])
        setattr(self.rows[layer], name, fields)

    def _vectors(self, t: Tensor) -> Tensor:
        """[N,K] -> [vectors, steps, 16, values of a dword] in the arena."""
        each = 4 // t.element_size()
        cut = t.view(-1, LANES, t.shape[1] // each, each).transpose(1, 2)
        return self._arena.take(t.nbytes).view(t.dtype).view(cut.shape).copy_(cut)


class Slots:
    """The slots of every layer. `put` changes them between two steps; what is in one is kept alive here."""

    def __init__(self, sizes: Sequence[PartSizes], slots: int) -> None:
        """sizes: `models.lora.sizes`."""
        self._sizes = sizes
        self._tables = [(LoraFields * slots)() for _ in sizes]
        self._held: list[PackedAdapter | None] = [None] * slots

    def address(self, layer: int) -> int:
        """Of a layer's table."""
        return ctypes.addressof(self._tables[layer])

    def pack(self, adapter: Iterable[Pairs], dtype: torch.dtype, rest: Callable[[], None] = lambda: None) -> PackedAdapter:
        """An adapter for `put`. For any thread. `rest`: called after every little piece of work."""
        made = PackedAdapter(len(self._sizes))
        for i, (pairs, sizes) in enumerate(zip(adapter, self._sizes, strict=True)):
            for name in TOGETHER:
                made.put(i, name, pairs, sizes, dtype, rest)
        return made

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Have a slot hold an adapter."""
        for table, row in zip(self._tables, adapter.rows, strict=True):
            table[slot] = row
        self._held[slot] = adapter


def _up(
    pairs: Sequence[Any], places: Sequence[int], outputs: Sequence[int], rank: int, downs: int, dtype: torch.dtype, *, gated: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """B of all outputs, whole vectors, and the byte of a row of A x at which each vector begins to read; negative: adds nothing.

    Where a vector would be of two parts, all of them read all of the row, with zeros for what is not theirs.
    """
    apart = gated or all(n % LANES == 0 for n in outputs[:-1])
    firsts = [0, *torch.tensor(outputs).cumsum(0).tolist()]
    b = torch.zeros(2 * _whole(outputs[0]) if gated else _whole(firsts[-1]), rank if apart else rank * downs, dtype=dtype)
    starts = torch.full((len(b) // LANES,), -1 if apart else 0, dtype=torch.int32)
    for i, (pair, place) in enumerate(zip(pairs, places, strict=True)):
        if pair is None:
            continue
        up, column = pair[1], 0 if apart else place * rank
        columns = slice(column, column + up.shape[1])
        if gated:
            whole, turns = len(up) // LANES, b.view(-1, 2, LANES, b.shape[1])[:, i, :, columns]
            turns[:whole] = up[: whole * LANES].view(whole, LANES, -1)
            turns[whole:, : len(up) % LANES] = up[whole * LANES :]
        else:
            b[firsts[i] : firsts[i + 1], columns] = up
        if apart:
            vectors = slice(i, None, 2) if gated else slice(firsts[i] // LANES, _whole(firsts[i + 1]) // LANES)
            starts[vectors] = place * rank * dtype.itemsize
    return b, starts


def _whole(n: int) -> int:
    return -(-n // LANES) * LANES
