"""KV of a device that the host cannot address, as host memory: what is handed over is copied out of it, what has come is copied in."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from rayneuron.devices.base import Device, KvMemory


class Staged:
    """A place for every block of the device by its own number, so that nothing is numbered twice and nothing can be full. Only what is on
    its way takes memory: `drop` gives the pages of blocks back."""

    def __init__(self, device: Device, blocks: int, *, shared: bool) -> None:
        """`shared`: other processes may map it to read."""
        one = device.kv_read([blocks - 1])  # [layers,1,H,2,S,D]
        self._device, self._size = device, one[0].nbytes
        self._stride, layers = -(-blocks * self._size // mmap.PAGESIZE) * mmap.PAGESIZE, one.shape[0]
        self._fd, written = -1, -1
        if shared:
            written = os.memfd_create("rayneuron-staged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(written, layers * self._stride)
            fcntl.fcntl(written, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._fd = os.open(f"/proc/self/fd/{written}", os.O_RDONLY | os.O_CLOEXEC)  # a seal against writing would keep all pages
        flags, self._how = (mmap.MAP_SHARED, mmap.MADV_REMOVE) if shared else (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MADV_DONTNEED)
        self._map = mmap.mmap(written, layers * self._stride, flags)
        if shared:
            os.close(written)
        whole = torch.frombuffer(self._map, dtype=torch.uint8).view(layers, self._stride)
        self._layers = [layer[: blocks * self._size].view(one.dtype).view(blocks, *one.shape[2:]) for layer in whole]

    def kv_memory(self) -> KvMemory:
        """Where it lies."""
        return KvMemory([_bytes(layer).flatten(2).numpy() for layer in self._layers], "rows", self._fd, self._stride)

    def out(self, blocks: Sequence[int]) -> None:
        """Copy blocks of the device to their places."""
        for layer, values in zip(self._layers, self._device.kv_read(blocks), strict=True):
            _bytes(layer)[list(blocks)] = _bytes(values)

    def into(self, blocks: Sequence[int]) -> None:
        """Copy blocks from their places to the device."""
        held = [_bytes(layer)[list(blocks)].view(layer.dtype) for layer in self._layers]
        self._device.kv_write(blocks, torch.stack(held))

    def drop(self, blocks: Sequence[int]) -> None:
        """Nobody reads these here any more."""
        for layer in range(len(self._layers)):
            for block in blocks:
                start = layer * self._stride + block * self._size
                first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + self._size) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    self._map.madvise(self._how, first, end - first)

    def close(self) -> None:
        """Give the descriptor back; the memory stays as long as somebody looks at it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
