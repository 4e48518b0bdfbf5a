"""The CPU: eager torch, linears packed by oneDNN, KV in place; one rank a process.

Shapes: B rows, T new tokens, L attended positions, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.devices.base import Batch, Program, Progress, Shape, StepOutput, Weights
from rayneuron.devices.cpu import int8
from rayneuron.devices.cpu.ops import kernels
from rayneuron.devices.cpu.packing import LOOKED_UP
from rayneuron.errors import CompileError
from rayneuron.models import feedforward
from rayneuron.models import ops as plain
from rayneuron.models.collectives import Collectives, Solo


class Cpu:
    """One rank on this process's cores. Unlike Neuron it keeps nothing between runs of the program but weights and KV."""

    ranks_per_process = 1

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        threads: int = 1,
        comm: Collectives | None = None,
        native: bool = True,
    ) -> None:
        """`native`: with the C++ kernels where they can be had; False: torch's own ops."""
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.comm = comm or Solo()
        self.ops = replace(plain.PLAIN, linear=linear, write_kv=write_kv, attend=attend, experts=feedforward.grouped_experts)
        self.kernels = kernels(threads, dtype, self.ops) if native else None
        if self.kernels is not None:
            self.ops = self.kernels.ops
        self.kv: list[Tensor] = []
        self._weights: Weights = {}
        self._program: Program | None = None
        self._shapes: frozenset[Shape] = frozenset()
        self._threads = threads

    def load(self, weights: Weights, kv: Sequence[tuple[int, ...]]) -> None:
        """Pack the weights and allocate KV; untouched KV pages cost no memory."""
        if self.kernels is not None:
            self._weights = self.kernels.pack(weights, self.dtype)
        else:
            self._weights = {**weights, "top": pack(weights["top"]), "layers": [pack(w) for w in weights["layers"]]}
        zeros = torch.zeros if self.kernels is None else self.kernels.zeros
        self.kv = [zeros(shape, dtype=self.kv_dtype) for shape in kv]

    def compile(self, program: Program, shapes: Sequence[Shape], progress: Progress) -> None:
        """Nothing is compiled, but oneDNN builds a kernel for each number of new tokens, and the allocator grows: meet them all now."""
        self._program = program
        self._shapes = frozenset(shapes)
        first = representatives(shapes)
        for i, shape in enumerate(first):
            self.run(shape, idle(shape, self.kv[0].shape[1] - 1))
            progress(i + 1, len(first), shape)

    @torch.inference_mode()
    def run(self, shape: Shape, batch: Batch) -> StepOutput:
        """One step. The calling thread takes this rank's number of threads, since torch counts them by thread."""
        if shape not in self._shapes or self._program is None:
            raise CompileError(f"{shape} was not listed when this engine started")
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return self._program(self.ops, self.comm, self._weights, self.kv, batch, shape)

    @torch.inference_mode()
    def kv_read(self, row: int, start: int, stop: int) -> list[Tensor]:
        """[2, K, stop-start, D] a layer, copied."""
        return [layer[:, row, :, start:stop].clone() for layer in self.kv]

    @torch.inference_mode()
    def kv_write(self, row: int, start: int, values: Sequence[Tensor]) -> None:
        """Write [2, K, n, D] a layer at `start`."""
        for layer, value in zip(self.kv, values, strict=True):
            layer[:, row, :, start : start + value.shape[2]] = value

    def close(self) -> None:
        """Drop weights and KV."""
        if self.kernels is not None:
            self.kernels.close()
        self.kv, self._weights, self._program = [], {}, None


def representatives(shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes that between them touch every kernel: oneDNN knows products by rows x tokens, samplers by rows, lengths by nothing.

    So: every (rows, tokens) once at its shortest length, every (rows, output) once, and decode at its longest length.
    """
    chosen: dict[tuple[object, ...], Shape] = {}
    for shape in shapes:
        keys: list[tuple[object, ...]] = [
            (shape.rows, shape.tokens),
            (shape.rows, shape.output, shape.tag, shape.output == "scores" and shape.tokens),
        ]
        for key in keys:
            if key not in chosen or (shape.length, shape.tokens) < (chosen[key].length, chosen[key].tokens):
                chosen[key] = shape
        if shape.tag == "decode" and shape.output == "greedy":
            longest = chosen.setdefault((shape.rows, "longest"), shape)
            if shape.length > longest.length:
                chosen[shape.rows, "longest"] = shape
    return list(dict.fromkeys(chosen.values()))


def idle(shape: Shape, scratch_row: int) -> Batch:
    """A batch of idle rows only; it writes nothing but scratch."""
    b = shape.rows
    ints, reals = torch.zeros(b, dtype=torch.int32), torch.ones(b)
    return Batch(
        tokens=torch.zeros(b, shape.tokens, dtype=torch.int32),
        positions=torch.zeros(b, shape.tokens, dtype=torch.int32),
        rows=torch.full((b,), scratch_row, dtype=torch.int32),
        last=ints,
        temperature=reals,
        top_k=ints,
        top_p=reals * 0.9,
        min_p=reals * 0,
        uniform=reals * 0.5,
        adapters=ints,
    )


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


def write_kv(kv: Tensor, rows: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
    """As `models.ops.write_kv`, with one scatter for a decode step and slice copies for prefill chunks."""
    if kv.dtype.itemsize == 1:
        return plain.write_kv(kv, rows, positions, k, v)
    if positions.shape[1] == 1 and rows.shape[0] > 1:
        kv[:, rows, :, positions[:, 0]] = torch.stack((k[:, 0], v[:, 0]), 1)  # B 2 K D: the indexed dims come first
        return None
    runs = _runs(positions, kv.shape[3] - 1)
    if runs is None:
        return plain.write_kv(kv, rows, positions, k, v)
    for i, (row, (start, count)) in enumerate(zip(rows.tolist(), runs, strict=True)):
        kv[0, row, :, start : start + count] = k[i, :count].transpose(0, 1)
        kv[1, row, :, start : start + count] = v[i, :count].transpose(0, 1)


def _runs(positions: Tensor, scratch_column: int) -> list[tuple[int, int]] | None:
    """(first position, count) of every row's true tokens; None where a row's are not consecutive (flash decoding)."""
    counts: list[int] = (positions != scratch_column).sum(1).tolist()
    runs = [(at[0], n) for at, n in zip(positions.tolist(), counts, strict=True) if at[:n] == list(range(at[0], at[0] + n))]
    return runs if len(runs) == len(counts) else None


def attend(q: Tensor, kv: Tensor, rows: Tensor, length: int, bias: Tensor, scale: float) -> Tensor:
    """As `models.ops.attend`, reading neighbouring rows of KV in place instead of gathering them."""
    if kv.dtype.itemsize == 1:
        return plain.attend(q, kv, rows, length, bias, scale)
    runs = neighbours(rows.tolist())
    if len(runs) > 3:
        return plain.attend(q, kv, rows, length, bias, scale)
    parts = [_attend(q[i:j], kv[:, row : row + j - i, :, :length], bias[i:j], scale) for i, j, row in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def neighbours(rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs (from, to, first row) of batch rows whose KV rows are consecutive."""
    runs, start = [], 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            runs.append((start, i, rows[start]))
            start = i
    return runs


def _attend(q: Tensor, kv: Tensor, bias: Tensor, scale: float) -> Tensor:
    """q [B,T,H,D], kv [2,B,K,L,D], bias [B,1|H,T,L] -> [B,T,H*D]."""
    b, t, heads, size = q.shape
    k, v = kv[0], kv[1]
    group = heads // k.shape[1]
    if t == 1:  # the queries of a group are rows of one product: nothing is repeated
        bias = bias if bias.shape[1] == 1 else bias.view(b, k.shape[1], group, -1)
        return F.scaled_dot_product_attention(q.view(b, k.shape[1], group, size), k, v, attn_mask=bias, scale=scale).reshape(
            b, 1, heads * size
        )
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias, scale=scale, enable_gqa=group > 1)
    return out.transpose(1, 2).reshape(b, t, heads * size)
