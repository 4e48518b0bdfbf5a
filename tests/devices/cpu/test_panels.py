"""KV in panels: what is kept and read there is what lies in rows, bit for bit, by the kernels and by torch's ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf

from rayneuron import devices
from rayneuron.devices.cpu import device, isa, panels
from rayneuron.models import ops as plain
from rayneuron.models.collectives import Solo
from rayneuron.models.kv import Kv, KvShape, KvSpace
from tests.devices.cpu.built import opened
from tests.models import cases
from tests.models.cases import Runner, Saved

DTYPES = (torch.float32, torch.bfloat16)
LENGTH = 150


@pytest.fixture(scope="module", params=["best", "x86-64-v3", isa.EMULATED])
def kernels(request: pytest.FixtureRequest):
    yield from opened(None if request.param == "best" else request.param)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    sizes = {**cases.SMALL, "max_position_embeddings": 256, "head_dim": 32, "hidden_size": 96, "num_attention_heads": 6}
    return cases.save(tf.LlamaConfig(**sizes), tmp_path_factory.mktemp("panels"))


def in_panels(shape: KvShape, dtype: torch.dtype) -> Kv:
    """KV in which whatever nobody writes is NaN."""
    size = (shape.space.total, shape.heads, 2, shape.columns, shape.dim)
    return Kv(shape, [panels.views(torch.full(size, torch.nan, dtype=dtype)) for _ in range(shape.layers)])


def logits(saved: Saved, made: plain.Ops, pack, dtype: torch.dtype, block: int, chunk: int, lying: bool) -> tuple[torch.Tensor, Kv]:
    """Of two rows of LENGTH ids in chunks, and the KV afterwards."""
    runner = Runner.open(saved.path, Solo(), dtype=dtype, length=LENGTH, block=block)
    runner = replace(runner, ops=made, weights=pack(runner.weights, dtype))
    if lying:
        runner.kv = in_panels(runner.kv.shape, dtype)
    ids = torch.randint(0, cases.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    with torch.no_grad():
        parts = [runner.chunk(ids, s, min(s + chunk, LENGTH), chunk, LENGTH) for s in range(0, LENGTH, chunk)]
    return torch.cat(parts, 1), runner.kv


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_gives_the_same_bits_in_panels_and_in_rows(kernels, saved: Saved, dtype: torch.dtype) -> None:
    want, in_rows = logits(saved, kernels.ops, kernels.pack, dtype, 64, LENGTH, False)
    assert not panels.lie(in_rows.layers[0])
    for block, chunk in ((64, LENGTH), (64, 37), (128, 50), (64, 1)):
        got, kv = logits(saved, kernels.ops, kernels.pack, dtype, block, chunk, True)
        assert torch.equal(got, want), (block, chunk)
        if block == 64:
            for layer, other in zip(kv.layers, in_rows.layers, strict=True):
                for here, there in zip(panels.rows(layer), other, strict=True):
                    known = ~here.isnan()
                    assert torch.equal(here[known], there[known]) and known.sum() == 2 * 2 * LENGTH * 32
    assert torch.equal(logits(saved, kernels.ops, kernels.pack, dtype, 16, 37, False)[0], want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_ops_find_their_way(saved: Saved, dtype: torch.dtype) -> None:
    """Where the kernels cannot run a layer, or a step has adapters, torch's ops read what kernels wrote and the other way round."""
    made = replace(plain.PLAIN, write_kv=device.write_kv, attend=device.attend)

    def unpacked(weights, _dtype):
        return weights

    def canary(shape: KvShape, kind: torch.dtype) -> Kv:  # torch reads what it then masks: zeros where nobody writes
        return Kv(shape, [tuple(store.zero_() for store in layer) for layer in in_panels(shape, kind).layers])

    want, in_rows = logits(saved, made, unpacked, dtype, 64, 50, False)
    runner = replace(Runner.open(saved.path, Solo(), dtype=dtype, length=LENGTH, block=64), ops=made)
    runner.kv = canary(runner.kv.shape, dtype)
    ids = torch.randint(0, cases.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    with torch.no_grad():
        got = torch.cat([runner.chunk(ids, s, s + 50, 50, LENGTH) for s in range(0, LENGTH, 50)], 1)
    assert torch.equal(got, want)
    scratch = runner.kv.shape.space.scratch
    for layer, other in zip(runner.kv.layers, in_rows.layers, strict=True):
        for here, there in zip(panels.rows(layer), other, strict=True):
            assert torch.equal(here[:scratch], there[:scratch])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_verbs_of_the_device_speak_rows(dtype: torch.dtype) -> None:
    made = devices.open("cpu", dtype=dtype)
    if made.kernels is None:
        pytest.skip("no kernels here")
    shape = KvShape(KvSpace(rows=2, limit=200, blocks=8, block=64), layers=2, heads=3, dim=64)
    made.load({"top": {}, "layers": []}, shape)
    assert panels.lie(made.kv.layers[0])
    values = torch.randn(2, 10, 3, 2, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    made.kv_write(range(10), values)
    assert torch.equal(made.kv_read(range(10)), values)
    made.kv_write([4, 1], made.kv_read([0, 3]))
    made.kv_copy([(3, 2), (5, 6)])
    assert torch.equal(made.kv_read(range(10)), values[:, [0, 3, 3, 3, 0, 5, 5, 7, 8, 9]])
    made.close()


@pytest.mark.parametrize(
    ("dim", "block", "shards", "dtype"),
    [(80, 64, 1, torch.bfloat16), (64, 32, 1, torch.bfloat16), (64, 64, 2, torch.bfloat16), (64, 64, 1, torch.float8_e4m3fn)],
)
def test_what_does_not_fit_lies_in_rows(dim: int, block: int, shards: int, dtype: torch.dtype) -> None:
    assert not panels.fit(KvShape(KvSpace(2, 200, 8, block), 1, 2, dim, shards), dtype)
    assert panels.fit(KvShape(KvSpace(2, 200, 8, 64), 1, 2, 64), torch.bfloat16)
