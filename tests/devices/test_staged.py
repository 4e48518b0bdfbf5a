"""Copies of a device's KV in host memory: where they lie, who may read and who may write them, and what memory they take."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from rayneuron import devices
from rayneuron.devices.staged import Staged

LAYERS, BLOCKS, HEADS, SIZE, DIM = 2, 6, 3, 8, 64


class Far:
    """KV that the host cannot address."""

    def __init__(self, dtype: torch.dtype) -> None:
        made = torch.arange(LAYERS * BLOCKS * HEADS * 2 * SIZE * DIM).remainder(251).float()
        self.kv = made.view(LAYERS, BLOCKS, HEADS, 2, SIZE, DIM).to(dtype)

    def kv_read(self, blocks: Sequence[int]) -> Tensor:
        return self.kv.view(torch.uint8)[:, list(blocks)].view(self.kv.dtype)

    def kv_write(self, blocks: Sequence[int], values: Tensor) -> None:
        self.kv.view(torch.uint8)[:, list(blocks)] = values.view(torch.uint8)


def resident() -> int:
    """Bytes of this process's memory that are there."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_go_out_by_their_numbers_and_into_another_device(dtype: torch.dtype, shared: bool) -> None:
    far, other = Far(dtype), Far(dtype)
    want = far.kv.clone()
    other.kv.zero_()
    staged = devices.stage_kv(far, BLOCKS, shared=shared)  # type: ignore[arg-type]
    there = Staged(other, BLOCKS, shared=False)  # type: ignore[arg-type]
    assert staged is not None
    memory = staged.kv_memory()
    assert [units.shape for units in memory.units] == [(BLOCKS, HEADS, 2 * SIZE * DIM * dtype.itemsize)] * LAYERS
    assert (memory.fd >= 0) is shared and memory.format == "rows"
    staged.out([4, 1])
    for mine, theirs in zip(there.kv_memory().units, memory.units, strict=True):
        mine[[2, 0], 1:] = theirs[[4, 1], 1:]  # heads from the second on
    there.into([0, 2])
    for target, source in ((2, 4), (0, 1)):
        assert torch.equal(other.kv[:, target, 1:].float(), want[:, source, 1:].float()) and not other.kv[:, target, 0].float().any()
    assert not other.kv[:, [1, 3, 4, 5]].float().any()


def test_others_read_and_cannot_write() -> None:
    staged = Staged(Far(torch.float32), BLOCKS, shared=True)  # type: ignore[arg-type]
    memory = staged.kv_memory()
    size = LAYERS * memory.stride
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, size)
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, 0)
    theirs = np.frombuffer(mmap.mmap(memory.fd, size, prot=mmap.PROT_READ), np.uint8).reshape(LAYERS, memory.stride)
    staged.close()
    staged.close()
    staged.out([3])
    unit = memory.units[1][3].reshape(-1)
    assert unit.any() and np.array_equal(theirs[1, 3 * len(unit) :][: len(unit)], unit)
    staged.drop([3])
    assert not unit[: len(unit) // 4096 * 4096 - 4096].all() and not theirs[1, 4 * len(unit) - 4096].any()


@pytest.mark.parametrize("shared", [False, True])
def test_only_what_is_on_its_way_takes_memory(shared: bool) -> None:
    far = Far(torch.float32)
    far.kv = torch.ones(2, 64, 4, 2, 64, 64)  # 128 KiB a block and layer
    staged = Staged(far, 64, shared=shared)  # type: ignore[arg-type]
    before, whole = resident(), far.kv.nbytes
    staged.out(range(64))
    held = resident() - before
    staged.drop(range(64))
    assert held > 0.8 * whole and resident() - before < held - 0.8 * whole
