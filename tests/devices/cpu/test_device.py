"""The CPU's ops against the plain ones, and the rules of the Device seam."""

from __future__ import annotations

import pytest
import torch

from rayneuron import devices, models
from rayneuron.devices.base import LIKELIEST, SCORES, Shape
from rayneuron.devices.cpu import device
from rayneuron.devices.idle import idle
from rayneuron.engine.buckets import capacity, inventory
from rayneuron.engine.runner import Runner
from rayneuron.errors import CompileError, ConfigError
from rayneuron.models import hub, weights
from rayneuron.models import ops as plain
from rayneuron.models.kv import KvShape, KvSpace

G = torch.Generator().manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [1, 6])
def test_writes_land_where_plain_writes_land(tokens, dtype):
    """In place, through views of the units, where the plain op makes new tensors."""
    units = rand(7, 2, 2, 4, 4).to(dtype)
    layer, before = (units[:, :, 0], units[:, :, 1]), units.clone()
    slots = torch.randperm(28, generator=G)[: 3 * tokens].view(3, tokens).to(torch.int32)
    k, v = rand(3, tokens, 2, 4), rand(3, tokens, 2, 4)
    want = plain.write_kv((before[:, :, 0], before[:, :, 1]), slots, k, v)
    assert device.write_kv(layer, slots, k, v) is layer
    for got, expected, was in zip(layer, want, (before[:, :, 0], before[:, :, 1]), strict=True):
        assert torch.equal(got.float(), expected.float()) and not torch.equal(got.float(), was.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_equal_plain_ones(dtype):
    w = {"a.w": rand(33, 48).to(dtype), "a.b": rand(33).to(dtype), "n.w": rand(48).to(dtype), "embed.w": rand(10, 48).to(dtype)}
    packed = device.pack(w)
    assert packed["embed.w"] is w["embed.w"] and packed["n.w"] is w["n.w"]
    for rows in (1, 2, 7, 33):
        x = rand(rows, 3, 48).to(dtype)
        got, want = device.linear(packed, "a", x), plain.PLAIN.linear(w, "a", x)
        assert torch.allclose(got.float(), want.float(), atol=1e-5 if dtype == torch.float32 else 0.1)


def test_warm_up_meets_every_kernel():
    """oneDNN keys products by rows x tokens, the sampler works on rows: each pair must occur among the representatives."""
    shapes = inventory(capacity(rows=16, length=2048, chunk=512))
    chosen = device.representatives(shapes)
    assert set(chosen) <= set(shapes) and len(chosen) < len(shapes) / 4
    assert {(s.rows, s.tokens) for s in chosen} == {(s.rows, s.tokens) for s in shapes}
    assert {(s.rows, s.want) for s in chosen} == {(s.rows, s.want) for s in shapes}
    assert {s.tokens for s in chosen if s.want == SCORES} == {s.tokens for s in shapes if s.want == SCORES}


def opened() -> tuple[device.Cpu, KvShape]:
    made, shape = devices.open("cpu", dtype=torch.float32), KvShape(KvSpace(rows=2, limit=8, blocks=5, block=4), layers=2, heads=2, dim=4)
    made.load({"top": {}, "layers": []}, shape)
    return made, shape


def test_a_shape_that_was_not_listed_is_refused():
    made, shape = opened()
    listed = Shape("decode", 1, 1, 8, LIKELIEST)
    ran = []
    made.compile(lambda *args: ran.append(args[-1]), [listed], lambda *_: None)
    assert ran == [listed]
    with pytest.raises(CompileError, match="not listed"):
        made.start(Shape("decode", 2, 1, 8, LIKELIEST), idle(listed, shape.space))


def test_kv_comes_back_as_it_was_read():
    made, shape = opened()
    made.kv_write(range(7), rand(2, 7, 2, 2, 4, 4))
    before = made.kv_read(range(7))
    made.kv_write([4, 1], made.kv_read([0, 3]))
    made.kv_copy([(3, 2), (5, 6)])
    want = before[:, [0, 3, 3, 3, 0, 5, 5]]
    assert torch.equal(made.kv_read(range(7)), want)
    assert torch.equal(torch.stack([torch.stack(layer, 2) for layer in made.kv.layers]), want)


def test_unknown_devices_are_named():
    with pytest.raises(ConfigError, match="cpu, neuron"):
        devices.open("cuda")


@pytest.mark.parametrize(("native", "threads"), [(True, 1), (False, 2)])
def test_torch_wakes_no_threads_beside_those_of_the_kernels(tiny, native, threads):
    """What it would wake for a copy goes on spinning, and the step of a full batch with drafts took half as long again."""
    raw, before = hub.read_config(tiny), torch.get_num_threads()
    arch, capacities = models.architecture(raw), capacity(rows=2, length=32, chunk=16)
    runner = Runner(arch, device.Cpu(dtype=torch.float32, threads=2, native=native), capacities)
    runner.load(weights.load(arch, models.family(raw), hub.Checkpoint(tiny), dtype=torch.float32))
    try:
        runner.warm(lambda *_: None)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
        runner.close()
