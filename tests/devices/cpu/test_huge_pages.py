"""Weights and KV of the CPU device lie in huge pages where the kernel gives them to whoever asks."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

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
