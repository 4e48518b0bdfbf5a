"""Weights in the page cache: how much of a file is there, and reading what is not, at a pace."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

PACE_BYTES = 2**30  # a second
STEP_BYTES = 64 * 2**20


def weight_files(folder: Path) -> list[Path]:
    """The files of a model directory that a start reads."""
    return sorted(file for file in folder.rglob("*.safetensors") if file.is_file())


def resident(files: Sequence[Path]) -> float:
    """The share of some files that is in memory; 0 where nobody can say."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = there = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        count = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * count)()
        with file.open("rb") as opened:
            address = _map(libc, opened.fileno(), size)  # Python's own mmap does not say where a read-only one lies
            if address is None:
                continue
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0:
                there += sum(page & 1 for page in found)
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        pages += count
    return there / pages if pages else 0.0


def _map(libc: ctypes.CDLL, descriptor: int, size: int) -> int | None:
    libc.mmap.restype = ctypes.c_void_p
    args = (None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, descriptor, ctypes.c_long(0))
    address = libc.mmap(*args)
    return None if address in (None, ctypes.c_void_p(-1).value) else int(address)


def warm(files: Sequence[Path], most_bytes: int) -> int:
    """Ask the kernel to read files ahead, not faster than others can bear; how many bytes were asked for."""
    asked = 0
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as opened:
            for at in range(0, size, STEP_BYTES):
                if asked >= most_bytes:
                    return asked
                length = min(STEP_BYTES, size - at, most_bytes - asked)
                os.posix_fadvise(opened.fileno(), at, length, os.POSIX_FADV_WILLNEED)
                asked += length
                time.sleep(length / PACE_BYTES)
    return asked
