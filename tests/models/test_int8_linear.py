"""The packed int8 product equals the dequantised one."""

from __future__ import annotations

import pytest
import torch

from rayneuron.devices.cpu import int8
from rayneuron.models import linear, quantization


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("out", "inner"), [(48, 32), (49, 48), (50, 70), (48, 40)])  # 70 and 40: torch's kernel reads past the row
def test_packed_equals_dequantised(rows: int, bias: bool, dtype: torch.dtype, out: int, inner: int) -> None:
    how, draw = quantization.parse("int8", "per_channel"), torch.Generator().manual_seed(rows)
    whole = torch.randn(out, inner, generator=draw)
    scale = quantization.scale_of(whole, how)
    w = {"up.w": quantization.quantise(whole, scale, how), "up.scale": scale} | ({"up.b": torch.randn(out).to(dtype)} if bias else {})
    x = torch.randn(rows, 1, inner, generator=draw).to(dtype)
    assert int8.packable(w, "up") == (inner % 16 == 0)
    exact = x.double() @ (w["up.w"].double() * scale.double()).T + (w["up.b"].double() if bias else 0)
    for form in (int8.linear, linear.linear):
        got = form(w, "up", x)
        assert got.shape == (rows, 1, out) and got.dtype == dtype
        assert (got.double() - exact).abs().max() < (0.02 if dtype == torch.bfloat16 else 1e-5) * exact.abs().max()


def test_other_forms_are_left_to_the_plain_product() -> None:
    how = quantization.parse("int8", "per_tensor")
    w = torch.randn(8, 8)
    scale = quantization.scale_of(w, how)
    assert not int8.packable({"up.w": quantization.quantise(w, scale, how), "up.scale": scale}, "up")
