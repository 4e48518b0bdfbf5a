"""The CPU: eager torch, linears packed by oneDNN, KV in place; one rank a process.

Shapes: B rows, T new tokens, K KV heads, S positions of a block, D head size.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.base import LIKELIEST, SCORES, Batch, Ended, KvMemory, Program, Shape, Weights
from rayneuron.devices.cpu import adapters, carry, int8, packing, panels
from rayneuron.devices.cpu.ops import kernels
from rayneuron.devices.cpu.packing import LOOKED_UP
from rayneuron.devices.cpu.stack import refused
from rayneuron.devices.idle import idle
from rayneuron.errors import CompileError
from rayneuron.models import Progress, adapted, experts
from rayneuron.models import ops as plain
from rayneuron.models.adapted import Pairs
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives, Solo
from rayneuron.models.kv import Kv, KvShape
from rayneuron.models.ops import bytes_of


class Cpu:
    """One rank on this process's cores. Unlike Neuron it keeps nothing between runs of the program but weights and KV."""

    ranks_per_process = 1
    overlaps = False

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        threads: int = 1,
        comm: Collectives | None = None,
        native: bool = True,
        shared_kv: bool = False,
    ) -> None:
        """`native`: with the C++ kernels where they can be had; False: torch's own ops. `shared_kv`: other processes may read its KV."""
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.comm = comm or Solo()
        self.ops = replace(
            plain.PLAIN, linear=linear, write_kv=write_kv, attend=attend, experts=experts.grouped_experts, write_features=write_features,
            dynamic=True,
        )  # fmt: skip
        self.kernels = kernels(threads, dtype, self.ops) if native else None
        if self.kernels is not None:
            self.ops = self.kernels.ops
        self.kv: Kv | None = None
        self._shared_kv = shared_kv
        self._fd, self._stride = -1, 0
        self._units: list[Tensor] = []
        self._followed: list[Tensor] = []  # what heads know of a block, which is copied with it
        self._panels = False
        self._weights: Weights = {}
        self._beside: Weights = {}
        self._program: Program | None = None
        self._shapes: frozenset[Shape] = frozenset()
        self._threads = threads

    def load(self, weights: Weights, kv: KvShape) -> None:
        """Pack the weights and allocate KV, a unit of keys and values for each head of a block, in panels where the kernels read them."""
        torch.set_num_threads(self._threads)
        self._weights = self._packed(weights, self.dtype)
        shape = (kv.space.total, kv.heads, 2, kv.columns, kv.dim)
        self._units = self._shared(kv.layers, shape) if self._shared_kv else self._zeros(kv, self.kv_dtype)
        self._panels = self.kernels is not None and self.kv_dtype == self.dtype and panels.fit(kv, self.kv_dtype)
        self.kv = Kv(kv, viewed(self._units, self._panels))
        if kv.draft is not None:
            draft = weights["draft"]
            dtype = self.dtype if kv.features else draft["top"]["embed.w"].dtype  # a model need not compute in the same
            self._weights = {**self._weights, "draft": self._packed(draft, dtype)}
            units = self._zeros(kv.draft, dtype)
            self.kv.draft = Kv(kv.draft, viewed(units, self.kernels is not None and panels.fit(kv.draft, dtype)))
            if kv.features:
                zeros = torch.zeros if self.kernels is None else self.kernels.zeros
                self.kv.features = zeros((kv.space.total, kv.space.block, kv.features), dtype=dtype)
                self._followed = [*units, self.kv.features]

    def stage_weights(self, weights: Weights) -> None:
        """Packed as its own; a draft model stays."""
        torch.set_num_threads(self._threads)
        self._beside = {**self._weights, **self._packed(weights, self.dtype)}

    def turn_weights(self) -> None:
        """No step is told apart: each is given all weights."""
        self._weights, self._beside = self._beside, self._weights

    def drop_weights(self) -> None:
        """And what the kernels know of them."""
        if self.kernels is not None and self._beside:
            self.kernels.forget(self._beside)
        self._beside = {}

    def _packed(self, weights: Weights, dtype: torch.dtype) -> Weights:
        if self.kernels is not None:
            return self.kernels.pack(weights, dtype)
        return {**weights, "top": pack(weights["top"]), "layers": [pack(w) for w in weights["layers"]]}

    def _zeros(self, kv: KvShape, dtype: torch.dtype) -> list[Tensor]:
        zeros = torch.zeros if self.kernels is None else self.kernels.zeros
        return [zeros((kv.space.total, kv.heads, 2, kv.columns, kv.dim), dtype=dtype) for _ in range(kv.layers)]

    def _shared(self, layers: int, shape: tuple[int, ...]) -> list[Tensor]:
        """Units of every layer, each from a page on, in one piece of memory."""
        size = prod(shape) * self.kv_dtype.itemsize
        self._stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        whole, self._fd = packing.shared(layers * self._stride)
        return [layer[:size].view(self.kv_dtype).view(shape) for layer in whole.view(layers, self._stride)]

    def kv_memory(self) -> KvMemory:
        """Its units, which another process may map if the device was opened so."""
        held = [bytes_of(units).flatten(2).view(torch.uint8).numpy() for units in self._units]
        long = held[0].shape[-1] >= carry.LEAST_BYTES
        how = carry.by(self.kernels.found) if self.kernels is not None and long else None
        return KvMemory(held, "panels" if self._panels else "rows", self._fd, self._stride, how)

    def open_adapters(self, arch: Arch, sizes: Sequence[Mapping[str, tuple[int, int]]], slots: int, rank: int) -> None:
        """As the kernels read them where they run whole layers, else as tables for torch's products."""
        layers = self._weights["layers"]
        if self.kernels is not None and self.kv is not None and refused(arch, layers, self.kv) is None:
            self.kernels.slots = adapters.Slots(sizes, slots)
            self._weights = {**self._weights, "lora_rank": 0}
            return
        layers = [adapted.tables(w, each, slots, rank, self.dtype) for w, each in zip(layers, sizes, strict=True)]
        self._weights = {**self._weights, "layers": layers, "lora_rank": rank}

    def pack_adapter(self, adapter: Iterable[Pairs], rest: Callable[[], None]) -> Any:
        """Packed, or as it is."""
        slots = self.kernels.slots if self.kernels is not None else None
        return list(adapter) if slots is None else slots.pack(adapter, self.dtype, rest)

    def put_adapter(self, slot: int, adapter: Any) -> None:
        """A row of the kernels' tables, or a part of torch's."""
        if self.kernels is not None and self.kernels.slots is not None:
            self.kernels.slots.put(slot, adapter)
        else:
            adapted.put(self._weights["layers"], slot, self._weights["lora_rank"], adapter)

    def prepare(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """Nothing is compiled."""

    def compile(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """Nothing is compiled, but oneDNN builds a kernel for each number of new tokens, and the allocator grows: meet them all now."""
        self._program = program
        self._shapes = frozenset(shapes)
        first = representatives(shapes)
        assert self.kv is not None
        for i, shape in enumerate(first):
            self.start(shape, idle(shape, self.kv.shape.space))
            progress(i + 1, len(first))

    @torch.inference_mode()
    def start(self, shape: Shape, batch: Batch) -> Ended:
        """One step, to its end. The calling thread takes this rank's number of threads, since torch counts them by thread; where whole
        layers run in the kernels one: those that torch would wake for a copy go on spinning beside the kernels' own."""
        if shape not in self._shapes or self._program is None:
            raise CompileError(f"{shape} was not listed when this engine started")
        threads = 1 if self.kernels is not None and self.kernels.runs_all(self._weights) else self._threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        return Ended(self._program(self.ops, self.comm, self._weights, self.kv, batch, shape))

    @torch.inference_mode()
    def kv_copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks; of a draft model none: it reads what it has not read, and remembers blocks by what it wrote there."""
        source, target = zip(*pairs, strict=True)
        for units in (*self._units, *self._followed):
            bytes_of(units)[list(target)] = bytes_of(units)[list(source)]

    @torch.inference_mode()
    def kv_read(self, blocks: Sequence[int]) -> Tensor:
        """[layers, n, K, 2, S, D] in rows, copied."""
        held = [bytes_of(units)[list(blocks)].view(units.dtype) for units in self._units]
        return torch.stack([torch.stack(panels.rows(panels.views(x)), 2) if self._panels else x for x in held])

    @torch.inference_mode()
    def kv_write(self, blocks: Sequence[int], values: Tensor) -> None:
        """Write [layers, n, K, 2, S, D]."""
        for units, value in zip(self._units, values, strict=True):
            if self._panels:
                panels.write_rows(panels.views(units), list(blocks), value)
            else:
                bytes_of(units)[list(blocks)] = bytes_of(value)

    def close(self) -> None:
        """Drop weights and KV."""
        if self.kernels is not None:
            self.kernels.close()
        if self._fd >= 0:
            os.close(self._fd)
        self.kv, self._units, self._followed, self._weights, self._program, self._fd = None, [], [], {}, None, -1


def viewed(units: Sequence[Tensor], lying: bool) -> list[plain.Layer]:
    """The keys and values of every layer's units. `lying`: in panels."""
    return [panels.views(each) if lying else (each[:, :, 0], each[:, :, 1]) for each in units]


def representatives(shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes that between them touch every kernel: oneDNN knows products by rows x tokens, samplers by rows, lengths by nothing.

    So: every (rows, tokens) once at its shortest length, every (rows, want) once, and decode at its longest length.
    """
    chosen: dict[tuple[object, ...], Shape] = {}
    for shape in shapes:
        keys: list[tuple[object, ...]] = [
            (shape.rows, shape.tokens),
            (shape.rows, shape.want, shape.tag, shape.want == SCORES and shape.tokens),
        ]
        for key in keys:
            if key not in chosen or (shape.length, shape.tokens) < (chosen[key].length, chosen[key].tokens):
                chosen[key] = shape
        if shape.tag == "decode" and shape.want == LIKELIEST:
            longest = chosen.setdefault((shape.rows, "longest"), shape)
            if shape.length > longest.length:
                chosen[shape.rows, "longest"] = shape
    return list(dict.fromkeys(chosen.values()))


def pack(w: Mapping[str, Tensor]) -> dict[str, Any]:
    """Weights of products in oneDNN's blocked layout (about +25 % decode speed in bf16, +70 % in fp32); everything else as it is."""
    return {n: _reorder(t) if _packable(n, t, w) else t for n, t in w.items()}


def _packable(name: str, t: object, w: Mapping[str, Tensor]) -> bool:
    return (
        isinstance(t, Tensor)
        and name.endswith(".w")
        and name not in LOOKED_UP
        and t.dim() == 2
        and t.dtype in (torch.float32, torch.bfloat16)
        and name[:-2] + ".scale" not in w
        and torch.backends.mkldnn.is_available()
    )


def _reorder(t: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(t.contiguous(), None)


def linear(w: Mapping[str, Any], name: str, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out]."""
    weight = w[name + ".w"]
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, w.get(name + ".b"), "none", [], "")
    return int8.linear(w, name, x)


def write_kv(layer: plain.Layer, slots: Tensor, k: Tensor, v: Tensor) -> plain.Layer:
    """As `models.ops.write_kv`, in place."""
    if panels.lie(layer):
        return panels.write(layer, slots, k, v)
    size = layer[0].shape[2]
    block, offset = slots // size, slots % size
    for store, x in zip(layer, (k, v), strict=True):
        bytes_of(store)[block, :, offset] = bytes_of(plain.to_kv(x, store.dtype))
    return layer


def write_features(store: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """As `models.ops.write_features`, in place."""
    store.view(-1, store.shape[-1])[slots] = x
    return store


def attend(q: Tensor, layer: plain.Layer, blocks: Tensor, length: int, bias: Tensor, scale: float, *more: Any) -> Tensor:
    """As `models.ops.attend`."""
    if panels.lie(layer):
        layer, blocks = panels.read(layer, blocks)
    return plain.attend(q, layer, blocks, length, bias, scale, *more)
