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

from rayneuron import settings

log = logging.getLogger(__name__)

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
