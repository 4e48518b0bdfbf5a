"""Weights and KV of the CPU device lie in huge pages where the kernel gives them to whoever asks."""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from pathlib import Path

import pytest
import torch

from rayneuron import LLM, SamplingParams
from rayneuron.devices.cpu import packing

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(address: int) -> int:
    """AnonHugePages of the mapping that holds `address` (man 5 proc, smaps)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(x, 16) for x in head.split("-"))
            inside = start <= address < stop
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(not SETTING.is_file() or "[never]" in SETTING.read_text(), reason="this kernel gives no huge pages")
def test_weights_and_kv_are_in_huge_pages() -> None:
    size = 8 << 20
    asked = mmap.mmap(-1, 2 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    asked.madvise(mmap.MADV_HUGEPAGE)
    control = torch.frombuffer(asked, dtype=torch.uint8)
    control.fill_(1)
    if huge_bytes(control.data_ptr()) < size:
        pytest.skip("this kernel has no huge pages left to give: its memory is in pieces")
    weights, kv = packing.Arena().take(size), packing.zeros((size // 2,), torch.bfloat16)
    assert not kv.any()
    weights.fill_(1)
    kv.fill_(1)
    assert huge_bytes(weights.data_ptr()) >= size and huge_bytes(kv.data_ptr()) >= size


def resident(address: int, size: int) -> bool:
    """Whether all pages of some memory are there (mincore(2))."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (-(-(address + size - first) // mmap.PAGESIZE)))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), pages) == 0
    return all(page & 1 for page in pages)


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (5, 14), reason="this kernel takes pages as they are touched")
def test_pages_of_kv_are_there_before_they_are_written() -> None:
    """Those of some blocks behind the last one that a step wrote, in every layer; not all there are."""
    with LLM("demo:random:tiny", max_model_len=1024, max_num_seqs=400, block_size=64) as llm:
        device = llm.engine.runner.device  # type: ignore[attr-defined]
        if device.kernels is None:
            pytest.skip("torch's own operations take pages as they write")
        units = device._units
        each = units[0][0].nbytes
        some, last = (4 << 20) // each, len(units[0]) - 2
        assert last * each > 8 << 20, "more than is taken ahead"
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, ignore_eos=True))
        until = time.monotonic() + 60
        while not all(resident(layer.data_ptr() + each, some * each) for layer in units):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert not any(resident(layer.data_ptr() + last * each, each) for layer in units)
