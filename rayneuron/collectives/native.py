"""C sources of this folder as libraries: compiled once a machine and source, kept in the cache, absent where there is no compiler."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from rayneuron import settings

log = logging.getLogger(__name__)

_POINTER, _SIZE, _WHOLE, _LONG = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int64
_TAKES: dict[str, list[Any]] = {  # of shared_memory.c
    "rn_wait": [_POINTER, _WHOLE, _WHOLE, _SIZE, _WHOLE, _LONG],
    "rn_post": [_POINTER, _WHOLE, _SIZE],
    "rn_sum": [_POINTER, _WHOLE, _SIZE, _POINTER, _SIZE, _WHOLE],
    "rn_reduce": [_POINTER, _POINTER, _WHOLE, _WHOLE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _WHOLE, _WHOLE, _LONG],
    "rn_ring": [_POINTER, _WHOLE, _SIZE],
    "rn_break": [_POINTER],
    "rn_read": [_POINTER, _WHOLE, _SIZE, _LONG],
    "rn_answer": [_POINTER, _WHOLE, _SIZE, ctypes.c_double, _WHOLE, _WHOLE],
    "rn_collect": [_POINTER, _SIZE, _WHOLE, _WHOLE, _LONG],
}

_FLAGS = ("-O3", "-shared", "-fPIC", "-std=gnu11")  # no -march: the cache may be shared by machines of several kinds
_LONGEST_S = 60.0


@lru_cache
def library(name: str) -> ctypes.CDLL | None:
    """The library of `name`.c, None where it cannot be built (said once in the log); whoever asks has another way."""
    source = Path(__file__).with_name(f"{name}.c")
    text = source.read_bytes()
    key = hashlib.sha256(text + repr((_FLAGS, platform.machine(), platform.libc_ver())).encode()).hexdigest()[:16]
    target = settings.cache_dir() / "native" / f"{name}-{key}.so"
    try:
        if not target.is_file():
            _build(source, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as problem:
        log.warning("%s could not be built (%s); the slower form in Python is used", source.name, problem)
        return None


def shared_memory() -> ctypes.CDLL | None:
    """What ranks of one host have in common, None where it cannot be built."""
    built = library("shared_memory")
    for name, takes in _TAKES.items() if built is not None else ():
        getattr(built, name).argtypes = takes
    return built


def _build(source: Path, target: Path) -> None:
    """Build aside and move into place, so that processes which start together never load half a file."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler; install gcc")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        ran = subprocess.run([compiler, *_FLAGS, "-o", draft, str(source)], capture_output=True, text=True, timeout=_LONGEST_S, check=False)
        if ran.returncode != 0:
            raise OSError(f"{compiler} failed: {ran.stderr.strip()[:300]}")
        os.replace(draft, target)
    finally:
        Path(draft).unlink(missing_ok=True)
