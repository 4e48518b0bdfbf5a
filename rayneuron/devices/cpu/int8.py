"""Products with int8 weights on a CPU, by torch's packed kernel: half the bytes of bf16 are read, which is what decoding waits for.

N rows (B x T).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rayneuron.models import linear as plain

# With AVX-512 torch 2.13's kernel reads past the row where `in` is no multiple of 16: NaN, wrong numbers, or a crash (found by our test).
WIDTH = 16
FEW_ROWS = 4  # the kernel reads the weight once a row: up to here it beats oneDNN in bf16, beyond it the weight is dequantised first


def packable(w: Mapping[str, Tensor], name: str) -> bool:
    """Whether `name` is an int8 weight the kernel may have: one scale an output channel, `in` a multiple of WIDTH."""
    weight, scale = w[name + ".w"], w.get(name + ".scale")
    if weight.dtype is not torch.int8 or weight.dim() != 2 or weight.shape[1] % WIDTH or not weight.is_contiguous():
        return False
    return scale is not None and scale.numel() == weight.shape[0]


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """x [..., in] bf16 -> [..., out]; other dtypes and more rows as `models.linear.linear`."""
    rows = x.numel() // x.shape[-1]
    if x.dtype is not torch.bfloat16 or rows > FEW_ROWS or not packable(w, name):
        return plain.linear(w, name, x)
    weight, bias = w[name + ".w"], w.get(name + ".b")
    y = torch.ops.aten._weight_int8pack_mm(x.reshape(rows, -1), weight, w[name + ".scale"].flatten().to(x.dtype))
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias
