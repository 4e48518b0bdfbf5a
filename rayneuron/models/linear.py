"""The product with a weight, plain or quantised.

A layer's weights are a mapping: `name.w` [out, in], optional `name.b` [out], and for a quantised weight `name.scale` ([1], or [out, 1]).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out] in x's dtype. A quantised weight is stored small and multiplied in x's dtype."""
    weight, scale = w[name + ".w"], w.get(name + ".scale")
    if scale is None:
        return F.linear(x, weight, w.get(name + ".b"))
    y = F.linear(x, weight.to(x.dtype)) * scale.flatten().to(x.dtype)
    bias = w.get(name + ".b")
    return y if bias is None else y + bias


def expert_weight(w: Mapping[str, Tensor], name: str, index: Tensor, dtype: object) -> Tensor:
    """The weights of experts `index` [...] -> [..., out, in], dequantised to `dtype`."""
    weight = w[name + ".w"][index]
    scale = w.get(name + ".scale")
    return weight if scale is None else weight.to(dtype) * scale[index].to(dtype)  # type: ignore[call-overload]
