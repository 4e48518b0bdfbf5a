"""The last layer leaves out tokens whose output nobody reads: what is read has the same bits, and so has the KV of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayneuron import models
from rayneuron.models import decoder, hub, quantize
from rayneuron.models.collectives import Solo
from tests.devices.cpu import built, test_adapters, test_families
from tests.models import adapters, cases
from tests.models.cases import Runner, Saved

HOW: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "int8": (torch.bfloat16, {"quantization": quantize.parse("int8")}),
}
STEPS = (((9, 9), (-1, 8)), ((7, 4), (-1, -1)), ((1, 6), (0, 5)), ((2, 2), (1, -1)))  # new tokens of rows 2 and 0; which are read

saved = test_families.saved


def states(open_runner: Callable[[], Runner], ids: torch.Tensor, told: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The hidden states [3,T,E] of each step, and the KV they leave. `told`: the device knows what is read."""
    runner, start, found = open_runner(), [0, 0], []
    space = runner.kv.shape.space
    for counts, read in STEPS:
        tokens = torch.zeros(3, max(counts), dtype=torch.int32)
        positions = torch.full((3, max(counts)), space.limit, dtype=torch.int32)
        for row, count in enumerate(counts):
            tokens[row, :count] = ids[row, start[row] : start[row] + count]
            positions[row, :count] = torch.arange(start[row], start[row] + count)
            start[row] += count
        where = runner.places(positions, torch.tensor([2, 0, space.rows], dtype=torch.int32), space.limit)
        if told:
            where = replace(where, read=torch.tensor([*read, -1], dtype=torch.int32))
        with torch.no_grad():
            found.append(decoder.forward(runner.arch, runner.ops, runner.comm, runner.weights, runner.kv, tokens, where))
    return found, [t.clone() for layer in runner.kv.layers for t in layer]


def check(open_runner: Callable[[], Runner], ids: torch.Tensor, left_out: bool) -> None:
    (want, kept), (got, written) = (states(open_runner, ids, told) for told in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(kept, written, strict=True))
    for (counts, read), whole, some in zip(STEPS, want, got, strict=True):
        assert some.isfinite().all()
        for row, (count, at) in enumerate(zip(counts, read, strict=True)):
            for t in range(count):
                assert torch.equal(some[row, t], whole[row, t]) or (left_out and t != at), (row, t)
                assert not (left_out and t != at and torch.equal(some[row, t], whole[row, t])), (row, t)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_every_family(saved: Saved, ranks: int, how: str) -> None:
    dtype, options = HOW[how]
    by_torch = bool(models.architecture(hub.read_config(saved.path)).uncommon)

    def work(comm: Any) -> None:
        made = test_families.team(dtype)
        check(lambda: test_families.on_kernels(saved, comm, dtype, made, **options), saved.ids, not by_torch)
        made.close()

    cases.on_ranks(ranks, work)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_of_rows_with_adapters(name: str, how: str, tmp_path: Path) -> None:
    """Their order is that of the adapters: of both rows, of the second, of the first."""
    one, (dtype, options) = cases.save(cases.CONFIGS[name](), tmp_path / "model"), HOW[how]
    folders = [adapters.write(tmp_path / str(i), one.path, r=r, seed=i) for i, r in enumerate((4, 7))]
    for own in ([1, 0, -1], [-1, 1, -1], [1, -1, -1]):
        made = built.team(dtype)
        check(lambda own=own, made=made: test_adapters.on_kernels(one, Solo(), made, own, folders, dtype, **options), one.ids, True)  # type: ignore[misc]
        made.close()
