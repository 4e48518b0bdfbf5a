"""What this machine can do at most: bytes read from memory a second, and operations a second of large products in bf16 and int8."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from answer import answer

BUFFER_BYTES = 1 << 29  # many times any cache
SIDE = 2048  # of the square matrices
PASSES = 15  # the first few after standing still are slower


def pass_s(work: Callable[[], object]) -> float:
    """Seconds of the median of some passes: what can be kept up, as an engine must."""
    took = []
    for _ in range(PASSES):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def reader(threads: int) -> Callable[[], object]:
    """Read a buffer in huge pages once, by all threads. Raises CalledProcessError or FileNotFoundError without a C compiler."""
    memory = mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.int64).fill_(1)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "read_rate.so")
        compiler = shutil.which("cc") or "gcc"
        source = Path(__file__).with_name("read_rate.c")
        subprocess.run([compiler, "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        read_all = ctypes.CDLL(str(library)).read_all
    read_all.restype = ctypes.c_longlong
    buffer = (ctypes.c_char * BUFFER_BYTES).from_buffer(memory)

    def read() -> None:
        if read_all(buffer, ctypes.c_longlong(BUFFER_BYTES // 64), threads) != BUFFER_BYTES // 8:
            raise RuntimeError("not every byte was read")

    return read


def open_peer(settings: dict[str, Any]) -> Callable[..., dict[str, float]]:
    """settings: threads."""
    torch.set_num_threads(settings["threads"])
    read = reader(settings["threads"])
    wide = torch.randn(SIDE, SIDE, dtype=torch.bfloat16)
    small = torch.randint(-9, 9, (SIDE, SIDE), dtype=torch.int8)

    rates: dict[str, tuple[int, Callable[[], object]]] = {
        "read_bytes_s": (BUFFER_BYTES, read),
        "bf16_ops_s": (2 * SIDE**3, lambda: wide @ wide),
        "int8_ops_s": (2 * SIDE**3, lambda: torch._int_mm(small, small)),
    }

    def run(only: str | None = None, **nothing: Any) -> dict[str, float]:
        return {name: size / pass_s(work) for name, (size, work) in rates.items() if only in (None, name)}

    return run


if __name__ == "__main__":
    answer(open_peer)
