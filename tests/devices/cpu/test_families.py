"""Every family on the CPU kernels: equal to transformers, and bit for bit the same in any batch, bucket and chunking."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rayneuron import models
from rayneuron.devices.cpu.ops import Kernels
from rayneuron.models import hub, quantize
from rayneuron.models.collectives import Solo
from tests.devices.cpu.built import team
from tests.models import cases
from tests.models.cases import Runner, Saved

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", params=cases.PARAMS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return cases.save(cases.CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


def on_kernels(saved: Saved, comm, dtype: torch.dtype, made: Kernels, **options) -> Runner:
    runner = Runner.open(saved.path, comm, dtype=dtype, **options)
    return replace(runner, ops=made.ops, weights=made.pack(runner.weights, dtype))


@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_transformers(saved: Saved, ranks: int) -> None:
    def work(comm):
        made = team(torch.float32)
        runner = on_kernels(saved, comm, torch.float32, made)
        got = [cases.run(runner, saved.ids, prompt) for prompt in (15, 16, 17)]
        made.close()
        return got

    for prompts in cases.on_ranks(ranks, work):
        for got in prompts:
            assert (got - saved.logits).abs().max() < 1e-4


def test_bf16_stays_within_its_bound(saved: Saved) -> None:
    made = team(torch.bfloat16)
    runner = on_kernels(saved, Solo(), torch.bfloat16, made)
    with torch.no_grad():
        got = cases.run(runner, saved.ids, 16)
    change = (got - saved.logits).abs().amax(-1) / saved.logits.abs().max()
    assert 0 < (change.median() if runner.arch.experts else change.max()) < 0.05
    made.close()


@pytest.mark.parametrize("how", ["float32", "bfloat16", "int8"])
def test_a_token_has_the_same_bits_in_every_batch_and_chunking(saved: Saved, how: str) -> None:
    """Two rows and an idle one in chunks of 16, of 5, of 1 and whole; then the first row alone.

    Layers that the kernels do not know run by torch's ops, whose bits depend on the number of rows: of those fp32 is close.
    """
    torch_ops = bool(models.architecture(hub.read_config(saved.path)).uncommon)
    if torch_ops and how != "float32":
        return
    dtype = torch.float32 if how == "float32" else torch.bfloat16
    options = {"quantization": quantize.parse("int8")} if how == "int8" else {}
    made = team(dtype)

    def logits(chunk: int, rows: slice, length: int) -> torch.Tensor:
        runner = on_kernels(saved, Solo(), dtype, made, **options)
        ids = saved.ids[rows]
        n = ids.shape[1]
        with torch.no_grad():
            parts = [runner.chunk(ids, s, min(s + chunk, n), chunk, length) for s in range(0, n, chunk)]
        return torch.cat(parts, 1)

    whole = logits(saved.ids.shape[1], slice(None), 63)
    for chunk in (16, 5, 1):
        assert (logits(chunk, slice(None), 64) - whole).abs().max() <= (1e-5 if torch_ops else 0), chunk
    assert (logits(7, slice(0, 1), 64) - whole[:1]).abs().max() <= (1e-5 if torch_ops else 0)
    made.close()
