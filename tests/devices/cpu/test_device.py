"""The CPU's ops against the plain ones, and the rules of the Device seam."""

from __future__ import annotations

import pytest
import torch

from rayneuron import devices
from rayneuron.devices.base import Shape
from rayneuron.devices.cpu import device
from rayneuron.engine.buckets import capacity, inventory
from rayneuron.errors import CompileError, ConfigError
from rayneuron.models import ops as plain

G = torch.Generator().manual_seed(0)
ROWS = [[0], [2], [0, 1, 2], [1, 2, 4], [0, 2, 4], [3, 4, 4, 4], [4, 0]]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("alibi", [False, True])
def test_attention_reads_the_rows_that_plain_attention_reads(rows, heads, kv_heads, tokens, alibi):
    kv, b = rand(2, 5, kv_heads, 20, 8), len(rows)
    q, bias = rand(b, tokens, heads, 8), rand(b, heads if alibi else 1, tokens, 16)
    where = torch.tensor(rows, dtype=torch.int32)
    got = device.attend(q, kv, where, 16, bias, 0.3)
    assert torch.allclose(got, plain.attend(q, kv, where, 16, bias, 0.3), atol=1e-6)


@pytest.mark.parametrize("rows", [[1], [0, 1], [3, 0, 2]], ids=str)
@pytest.mark.parametrize(("tokens", "true"), [(1, 1), (6, 6), (6, 3)])
def test_writes_land_where_plain_writes_land(rows, tokens, true):
    kv = rand(2, 5, 2, 12, 4)
    positions = torch.full((len(rows), tokens), 11, dtype=torch.int32)
    for i in range(len(rows)):
        positions[i, :true] = torch.arange(i, i + true)
    k, v, where = rand(len(rows), tokens, 2, 4), rand(len(rows), tokens, 2, 4), torch.tensor(rows, dtype=torch.int32)
    mine, reference = kv.clone(), kv.clone()
    device.write_kv(mine, where, positions, k, v)
    plain.write_kv(reference, where, positions, k, v)
    assert torch.equal(mine[:, :, :, :11], reference[:, :, :, :11])  # the last column is scratch
    assert not torch.equal(mine, kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_equal_plain_ones(dtype):
    w = {"a.w": rand(33, 48).to(dtype), "a.b": rand(33).to(dtype), "n.w": rand(48).to(dtype), "embed.w": rand(10, 48).to(dtype)}
    packed = device.pack(w)
    assert packed["embed.w"] is w["embed.w"] and packed["n.w"] is w["n.w"]
    for rows in (1, 2, 7, 33):
        x = rand(rows, 3, 48).to(dtype)
        got, want = device.linear(packed, "a", x), plain.PLAIN.linear(w, "a", x)
        assert torch.allclose(got.float(), want.float(), atol=1e-5 if dtype == torch.float32 else 0.1)


def test_rows_fall_into_runs():
    assert device.neighbours([0, 1, 2]) == [(0, 3, 0)]
    assert device.neighbours([1, 2, 5, 6, 3]) == [(0, 2, 1), (2, 4, 5), (4, 5, 3)]


def test_warm_up_meets_every_kernel():
    """oneDNN keys products by rows x tokens, the sampler works on rows: each pair must occur among the representatives."""
    shapes = inventory(capacity(rows=16, length=2048, chunk=512))
    chosen = device.representatives(shapes)
    assert set(chosen) <= set(shapes) and len(chosen) < len(shapes) / 4
    assert {(s.rows, s.tokens) for s in chosen} == {(s.rows, s.tokens) for s in shapes}
    assert {(s.rows, s.output) for s in chosen} == {(s.rows, s.output) for s in shapes}
    assert {s.tokens for s in chosen if s.output == "scores"} == {s.tokens for s in shapes if s.output == "scores"}


def test_a_shape_that_was_not_listed_is_refused():
    device = devices.open("cpu", dtype=torch.float32)
    device.load({"top": {}, "layers": []}, [(2, 3, 1, 8, 4)])
    listed = Shape("decode", 1, 1, 8, "greedy")
    ran = []
    device.compile(lambda *args: ran.append(args[-1]), [listed], lambda *_: None)
    assert ran == [listed]
    with pytest.raises(CompileError, match="not listed"):
        device.run(Shape("decode", 2, 1, 8, "greedy"), device.idle(listed, 2))


def test_kv_comes_back_as_it_was_read():
    device = devices.open("cpu", dtype=torch.float32)
    device.load({"top": {}, "layers": []}, [(2, 3, 2, 8, 4)] * 2)
    for layer in device.kv:
        layer.copy_(rand(*layer.shape))
    before = [layer.clone() for layer in device.kv]
    device.kv_write(2, 1, device.kv_read(0, 3, 6))
    for was, layer in zip(before, device.kv, strict=True):
        assert torch.equal(layer[:, 2, :, 1:4], was[:, 0, :, 3:6])
        layer[:, 2, :, 1:4] = was[:, 2, :, 1:4]
        assert torch.equal(layer, was)


def test_unknown_devices_are_named():
    with pytest.raises(ConfigError, match="cpu, neuron, null"):
        devices.open("cuda")
