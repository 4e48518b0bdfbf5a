"""Adapters in the kernels: equal to merged weights, the same bits in any company, and rows without one as if there were none."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayneuron.devices.cpu import adapters as device
from rayneuron.devices.cpu.ops import Kernels
from rayneuron.models import quantize
from rayneuron.models.collectives import Solo
from tests.devices.cpu.built import team
from tests.models import adapters, cases
from tests.models.cases import Runner, Saved

# Each kind of layer the kernels know: gated and not, parallel with one norm and two, normed after the residual, experts, fused, clipped.
FAMILIES = ("llama", "gptj", "llama_biased", "qwen3", "gpt2", "gpt_neox", "opt_350m", "bloom", "phi3", "falcon_new", "dbrx")
FAMILIES += ("qwen3_moe_dense",)


@pytest.fixture(scope="module", params=[*FAMILIES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[2:])])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return cases.save(cases.CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def folders(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of different ranks; the last leaves half of the products alone."""
    root = tmp_path_factory.mktemp("adapters")
    names = adapters.products(saved.path)
    kinds = enumerate(((names, 4), (names, 7), (names[::2], 1)))
    return [adapters.write(root / str(i), saved.path, chosen, r=r, seed=i) for i, (chosen, r) in kinds]


def on_kernels(
    saved: Saved, comm: Any, made: Kernels, own: list[int], folders: list[Path], dtype: torch.dtype = torch.float32, **options: Any
) -> Runner:
    """A rank on the kernels; own: the slots of rows 2, 0 and the idle one. Without folders it has no room for adapters at all."""
    runner = Runner.open(saved.path, comm, dtype=dtype, **options)
    runner = replace(runner, ops=made.ops, weights=made.pack(runner.weights, dtype))
    if not folders:
        return runner
    made.slots = device.Slots(adapters.sizes(saved.path, runner), len(folders))
    for slot, pairs in enumerate(adapters.cut(saved.path, runner, folders, dtype)):
        made.slots.put(slot, made.slots.pack(pairs, dtype))
    return adapters.Adapted(
        runner.arch, {**runner.weights, "lora_rank": 0}, runner.kv, comm, runner.ops, torch.tensor(own, dtype=torch.int32)
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_merged_weights(saved: Saved, folders: list[Path], ranks: int) -> None:
    want = torch.stack([adapters.merged(saved.path, folders[slot], saved.ids)[row] for row, slot in enumerate((1, 2))])

    def work(comm: Any) -> torch.Tensor:
        made = team(torch.float32)
        got = cases.run(on_kernels(saved, comm, made, [1, 2, -1], folders), saved.ids, 16)
        made.close()
        return got

    for got in cases.on_ranks(ranks, work):
        assert (got - want).abs().max() < 1e-4
    assert (want - saved.logits).abs().max() > 0.05


@pytest.mark.parametrize("how", ["float32", "bfloat16", "int8"])
def test_bits_do_not_depend_on_company(saved: Saved, folders: list[Path], how: str) -> None:
    """A row with an adapter beside one with another, beside one without, alone; a row without, beside one with, and where none are."""
    dtype = torch.float32 if how == "float32" else torch.bfloat16
    options = {"quantization": quantize.parse("int8")} if how == "int8" else {}

    def logits(own: list[int], rows: slice, chunk: int, some: list[Path] = folders) -> torch.Tensor:
        made = team(dtype)
        runner = on_kernels(saved, Solo(), made, own, some, dtype, **options)
        ids = saved.ids[rows]
        with torch.no_grad():
            parts = [runner.chunk(ids, s, min(s + chunk, ids.shape[1]), chunk, 64) for s in range(0, ids.shape[1], chunk)]
        made.close()
        return torch.cat(parts, 1)

    first, second = slice(0, 1), slice(1, 2)
    base, mixed, both = logits([], slice(None), 24, []), logits([1, -1, -1], slice(None), 24), logits([1, 0, -1], slice(None), 5)
    alike = logits([1, 1, -1], slice(None), 24)
    assert torch.equal(mixed[second], base[second])  # without an adapter: as if there were none
    assert torch.equal(mixed[first], both[first])
    assert torch.equal(mixed[first], alike[first])
    assert torch.equal(mixed[first], logits([1, -1], first, 7))
    assert not torch.equal(mixed[first], base[first])
    assert torch.equal(logits([-1, -1, -1], slice(None), 24), base)


@pytest.mark.slow
def test_it_is_near_to_merged_weights_in_smaller_numbers(saved: Saved, tmp_path: Path) -> None:
    """bf16 and int8 products: the adapter is added in bf16, whatever the base is."""
    folders = [adapters.write(tmp_path / "a", saved.path, size=0.15)]
    want = adapters.merged(saved.path, folders[0], saved.ids)
    assert (want - saved.logits).abs().max() > 0.05
    for options, bound in (({}, 0.05), ({"quantization": quantize.parse("int8")}, 0.12)):
        made = team(torch.bfloat16)
        runner = on_kernels(saved, Solo(), made, [0, 0, -1], folders, torch.bfloat16, **options)
        with torch.no_grad():
            got = cases.run(runner, saved.ids, 16)
        made.close()
        change = (got - want).abs().amax(-1) / want.abs().max()
        assert 0 < (change.median() if runner.arch.experts else change.max()) < bound


def unpacked(at: int, vectors: int, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """[vectors, 16, K] of what lies as `Pair` of adapt.h says."""
    each = 4 // dtype.itemsize
    raw = torch.frombuffer((ctypes.c_char * (vectors * steps * 64)).from_address(at), dtype=dtype)
    return raw.view(vectors, steps, 16, each).transpose(1, 2).flatten(2).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [(32, 16, 16), (24, 8, 8), (33, 7, 5)])  # parts that end with a vector, and such as do not
def test_what_is_multiplied_at_once_reads_its_own_part(outputs: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Ranks that differ, a part without an adapter, an A that two share: the packed pair gives what the parts give one by one."""
    sizes = {**{name: (n, 40) for name, n in zip("qkv", outputs, strict=True)}, "gate": (37, 40), "up": (37, 40)}
    shared, small = torch.randn(20, 40).to(dtype), torch.randn(3, 40).to(dtype)
    pairs = {"v": (small, torch.randn(outputs[2], 3).to(dtype))}
    pairs |= {name: (shared, torch.randn(sizes[name][0], 20).to(dtype)) for name in ("q", "gate", "up")}
    packed = device.Slots([sizes], 1).pack([pairs], dtype)
    x = torch.nn.functional.pad(torch.randn(40), (0, 8))
    for name, parts in (("qkv", ("q", "k", "v")), ("up", ("gate", "up"))):
        pair, want = getattr(packed.rows[0], name), []
        for part in parts:
            a, b = pairs.get(part, (small, torch.zeros(sizes[part][0], 3)))
            want.append(b.float() @ (a.float() @ x[:40]))
        between = (unpacked(pair.a, pair.ranks, pair.a_steps, dtype) @ x).flatten()
        count = 2 * 3 if name == "up" else -(-sum(outputs) // 16)
        got = torch.zeros(count, 16)
        starts = [start // dtype.itemsize for start in (ctypes.c_int32 * count).from_address(pair.from_)]
        for i, (vector, start) in enumerate(zip(unpacked(pair.b, count, pair.b_steps, dtype), starts, strict=True)):
            got[i] = vector @ between[start : start + vector.shape[1]] if start >= 0 else 0
        sides = [got[0::2].flatten()[:37], got[1::2].flatten()[:37]] if name == "up" else [got.flatten()[: sum(outputs)]]
        assert (torch.cat(sides) - torch.cat(want)).abs().max() < 1e-3
        assert pair.ranks == (2 if name == "up" else 4)  # 20 and 3 in vectors of the longer; gate and up have one A
