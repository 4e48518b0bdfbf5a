"""Weights as the kernels read them, in huge pages.

N outputs, K inputs. A panel is 32 outputs, two vectors of 16; it holds, step by step along K, one dword of every output: a float, two
bf16 or four int8.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LANES = 16
PANEL = 2 * LANES
F32, BF16, S8 = 0, 1, 2
KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: S8}
LOOKED_UP = ("embed.w", "position.w")  # read by row, never multiplied
_BLOCK_BYTES = 64 << 20
_HUGE_BYTES = 2 << 20
_FUTURE_WRITE, _POPULATE_WRITE = 0x10, 23  # F_SEAL_FUTURE_WRITE, MADV_POPULATE_WRITE, which Python does not name


class MatrixFields(ctypes.Structure):
    """`Matrix` of matmul.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "scale", "sums", "bias")),
        *((name, ctypes.c_int32) for name in ("kind", "n", "k", "panels", "steps", "gated")),
    ]


@dataclass(slots=True)
class Packed:
    """One packed weight: `fields` for the kernels, which find it at `address`; `held` keeps what they point to alive."""

    fields: MatrixFields
    held: tuple[Any, ...]
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.fields)

    @property
    def outputs(self) -> int:
        """N."""
        return int(self.fields.n)


class Arena:
    """Memory for weights: few large blocks in huge pages (about +10 % read bandwidth), given back with the last tensor in them."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._used = 0

    def take(self, count_bytes: int) -> Tensor:
        """Uninitialised uint8 [count_bytes], aligned to 64 bytes."""
        if self._block is None or self._used + count_bytes > self._block.numel():
            self._block, self._used = _mapped(max(count_bytes, _BLOCK_BYTES)), 0
        part = self._block[self._used : self._used + count_bytes]
        self._used += -(-count_bytes // 64) * 64
        return part


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed tensor in huge pages; those nobody touches cost no memory."""
    return _mapped(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def shared(count_bytes: int) -> tuple[Tensor, int]:
    """Zeroed uint8 [count_bytes] that other processes may map by the descriptor, from then on only to read; soon all of it is there, not
    in huge pages, unless the kernel gives them to shared memory too."""
    fd = os.memfd_create("rayneuron-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, count_bytes)
    memory = mmap.mmap(fd, count_bytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    # A descriptor opened to read alone could be opened anew to write; what is sealed cannot, save by who has mapped it already.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    threading.Thread(target=_populate, args=(whole,), name="rayneuron-pages", daemon=True).start()
    return whole, fd


def _populate(memory: Tensor) -> None:
    """Take every page: those of shared memory are dear to come by, and whoever hands KV over would wait for them."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    call = ctypes.CDLL(None).madvise  # mmap's own would hold the interpreter; Linux before 5.14 refuses, and pages come as they are touched
    call(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), _POPULATE_WRITE)


def _mapped(count_bytes: int) -> Tensor:
    """Zeroed uint8 [count_bytes] in huge pages."""
    # Private: shared anonymous memory, Python's default, is never in huge pages where the kernel's shmem_enabled is "never", as usual.
    memory = mmap.mmap(-1, count_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skip = -whole.data_ptr() % _HUGE_BYTES
    return whole[skip : skip + count_bytes]


def pack(w: Mapping[str, Any], arena: Arena, dtype: torch.dtype, int8: bool) -> dict[str, Any]:
    """A mapping of weights with every product's weight packed; everything else as it is. `int8`: the processor multiplies int8."""
    return {n: packed(w, n[:-2], arena, dtype, int8) if packable(n, t, dtype) else t for n, t in w.items()}


def pack_experts(w: dict[str, Any], arena: Arena, dtype: torch.dtype, int8: bool) -> None:
    """The stacked weights of experts [X,N,K] in `w`, each packed alone: a list takes their place."""
    for name in ("experts.gate_up", "experts.down"):
        if f"{name}.w" in w:
            scales = w.get(f"{name}.scale", [None] * len(w[f"{name}.w"]))
            short = name.removeprefix("experts.")
            w[f"{name}.w"] = [
                packed({f"{short}.w": each, f"{short}.scale": scale}, short, arena, dtype, int8)
                for each, scale in zip(w[f"{name}.w"], scales, strict=True)
            ]


def packable(name: str, t: object, dtype: torch.dtype) -> bool:
    """Weights of products, where they are computed in fp32 or bf16."""
    product = name.endswith(".w") and name not in LOOKED_UP
    return product and isinstance(t, Tensor) and t.dim() == 2 and dtype in (torch.float32, torch.bfloat16)


def packed(w: Mapping[str, Any], name: str, arena: Arena, dtype: torch.dtype, int8: bool = True) -> Packed:
    """The weight `name` with its scale and bias. int8 stays where products compute in it; else small dtypes become `dtype`, exactly."""
    weight, scale = w[f"{name}.w"], w.get(f"{name}.scale")
    if weight.dtype != torch.int8 or dtype == torch.float32 or not int8:
        weight = weight.to(dtype)
    gated = name == "gate_up"
    held = [panels(weight, arena, gated)]
    kind = KINDS[weight.dtype]
    fields = MatrixFields(kind=kind, n=weight.shape[0], k=weight.shape[1], panels=held[0].shape[0], steps=held[0].shape[1], gated=gated)
    fields.data = held[0].data_ptr()
    for part, value in (
        ("scale", None if scale is None else scale.flatten().float().expand(weight.shape[0])),
        ("sums", weight.to(torch.int32).sum(1, dtype=torch.int32) * 128 if kind == S8 else None),
        ("bias", w.get(f"{name}.b")),
    ):
        if value is not None:
            held.append(lanes(value if value.dtype == torch.int32 else value.float(), gated))
            setattr(fields, part, held[-1].data_ptr())
    return Packed(fields, tuple(held))


def panels(weight: Tensor, arena: Arena, gated: bool) -> Tensor:
    """[N,K] -> [panels, steps, 32, values of a dword] in the arena; gated: the vectors of a panel are of gate and up."""
    each = 4 // weight.element_size()
    rows, steps = _rows(weight.shape[0], gated), -(-weight.shape[1] // LANES) * LANES // each
    if tuple(weight.shape) != (rows, steps * each):  # else they are copied once, which is most of what packing takes
        whole = weight.new_zeros(rows, steps * each)
        place(whole, weight, gated)
        weight, gated = whole, False
    out, halves = arena.take(rows * steps * 4), 2 if gated else 1
    there = out.view(torch.int32).view(rows // PANEL, steps, halves, PANEL // halves)
    there.copy_(weight.contiguous().view(torch.int32).view(halves, rows // PANEL, PANEL // halves, steps).permute(1, 3, 0, 2))
    return out.view(weight.dtype).view(rows // PANEL, steps, PANEL, each)


def lanes(value: Tensor, gated: bool) -> Tensor:
    """[N] -> one value an output of every panel, zeros beyond N."""
    out = value.new_zeros(_rows(value.shape[0], gated), 1)
    place(out, value[:, None], gated)
    return out.flatten()


def place(out: Tensor, rows: Tensor, gated: bool) -> None:
    """Rows [N,K] into padded ones, in the order of panels."""
    n, k = rows.shape
    if not gated:
        out[:n, :k] = rows
        return
    pairs = out.view(-1, 2, LANES, out.shape[1])  # panel, gate or up, lane
    for i, part in enumerate(rows.chunk(2)):
        side = out.new_zeros(pairs.shape[0] * LANES, out.shape[1])
        side[: n // 2, :k] = part
        pairs[:, i] = side.view(-1, LANES, out.shape[1])


def _rows(n: int, gated: bool) -> int:
    return 2 * (-(-(n // 2) // LANES) * LANES) if gated else -(-n // PANEL) * PANEL
