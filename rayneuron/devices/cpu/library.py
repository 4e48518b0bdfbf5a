"""The C++ of this folder as a library: compiled when the package is installed, else once for a source, compiler and processor and kept
in the cache; loaded by every process."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from rayneuron import settings
from rayneuron.compile_cache import cache
from rayneuron.devices.cpu import isa
from rayneuron.devices.cpu.isa import processor_flags
from rayneuron.errors import RayNeuronError

log = logging.getLogger(__name__)

FLAGS = ("-O2", "-std=c++17", "-ffp-contract=off", "-fPIC", "-pthread", "-w")  # contraction off: the same source rounds the same everywhere
NEEDED = frozenset({"avx2", "fma", "f16c"})
AVX512, BF16, INT8, TILES = 1, 2, 4, 8  # bits of rn_features
KERNELS = "kernels-"  # how the names of installed files begin
_LONGEST_S = 300.0
_P, _I, _F, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64
SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "rn_features": (_I, []),
    "rn_sizes": (None, [_P]),
    "rn_tiles_work": (_I, []),
    "rn_pool_open": (_P, [_I]),
    "rn_pool_close": (None, [_P]),
    "rn_linear": (None, [_P, _P, _P, _I, _I, _P, _I]),
    "rn_best": (None, [_P, _P, _P, _I, _I, _I, _P, _P]),
    "rn_norm": (None, [_P, _P, _I, _I, _I, _P, _P, _I, _F, _P]),
    "rn_draw": (None, [_P, _P, _I, _I, _P, _P, _P]),
    "rn_describe": (None, [_P, _I, _I, _P, _I, _P, _P, _P, _P]),
    "rn_attend": (None, [_P, _P, _P, _I]),
    "rn_stack_open": (_P, [_P, _P]),
    "rn_stack_close": (None, [_P]),
    "rn_carry": (None, [_P, _P, _L, _I, _P]),
    "rn_stack_run": (_I, [_P, _P, _I, _I, _I]),
}


@lru_cache
def library(name: str | None = None, extra: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The kernels, None where they cannot be had (said once in the log). `name`: an instruction set of `isa`, None: the best here."""
    missing = NEEDED - processor_flags()
    if missing:
        log.info("this processor lacks %s: torch's own CPU ops are used", ", ".join(sorted(missing)))
        return None
    try:
        found = declared(ctypes.CDLL(str(built(name or best(), extra))))
    except (OSError, subprocess.SubprocessError, RayNeuronError) as problem:
        log.warning("the CPU kernels could not be built (%s): torch's own CPU ops are used, at a third of the speed", problem)
        return None
    if not found.rn_tiles_work():
        log.warning("the AMX tiles of this processor give wrong products (please report it): the kernels do without them")
        return library(isa.NATIVE, extra)
    return found


@lru_cache
def present() -> ctypes.CDLL | None:
    """The kernels if they were built before; nothing is compiled here, for whoever has another way and no time."""
    if NEEDED - processor_flags():
        return None
    try:
        there = _installed(best()).is_file() or _cache().get(_key(best())) is not None
    except OSError:
        return None
    return library() if there else None


@lru_cache
def best() -> str:
    """The instruction set for this processor, operating system and compiler; said in the log where tiles are part of the question."""
    if not isa.has_tiles():
        return isa.NATIVE
    if _installed(isa.AMX).is_file():
        return isa.AMX
    try:
        _run([_compiler(), *isa.flags(isa.AMX), "-fsyntax-only", "-x", "c++", "/dev/null"])
    except (OSError, subprocess.SubprocessError) as problem:
        log.info("this processor has AMX, but the compiler does not know it (%s): the kernels do without", problem)
        return isa.NATIVE
    log.info("bf16 and int8 products and attention use AMX")
    return isa.AMX


def declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions set."""
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def built(name: str, extra: tuple[str, ...] = ()) -> Path:
    """The library's file: what was installed, or of the cache's entry. Raises OSError where there is no compiler or it fails."""
    if not extra and (installed := _installed(name)).is_file():
        return installed
    return entry(name, extra) / "kernels.so"


def entry(name: str, extra: tuple[str, ...] = ()) -> Path:
    """The cache's folder of a library, compiled at most once a machine kind, a file a core. Raises as `built`."""

    def build(target: Path) -> None:
        flags = [_compiler(), *FLAGS, *extra, *isa.flags(name)]
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = [str(Path(folder) / f"{source.stem}.o") for source in _sources()]
            by_size = sorted(zip(_sources(), objects, strict=True), key=lambda pair: -pair[0].stat().st_size)  # the longest first
            list(pool.map(lambda pair: _run([*flags, "-c", "-o", pair[1], str(pair[0])]), by_size))
            _run([*flags, "-shared", "-o", str(target / "kernels.so"), *objects])

    return _cache().get_or_build(_key(name, extra), build)


def install(folder: Path) -> str:
    """Put the kernels of this machine into `folder`, that of this module in a package that is being built; what was done, in words."""
    try:
        target = folder / _installed(best()).name
        shutil.copy(built(best()), draft := target.with_suffix(".draft"))
    except (OSError, subprocess.SubprocessError, RayNeuronError) as problem:
        return f"the CPU kernels are left to the first start ({problem})"
    for old in folder.glob(f"{KERNELS}*.so"):
        old.unlink()
    os.replace(draft, target)
    return f"the CPU kernels are in {target}"


def version(kernels: ctypes.CDLL) -> str:
    """What a loaded library was made of, as a name."""
    file = Path(kernels._name)
    return file.stem if file.stem.startswith(KERNELS) else file.parent.name


def _installed(name: str) -> Path:
    """Where the kernels would be if they came with the package. They hold on machines without a compiler, so theirs does not count."""
    return Path(__file__).with_name(f"{KERNELS}{cache.key('cpu-kernels', **_made_of(name, ())).digest}.so")


def _key(name: str, extra: tuple[str, ...] = ()) -> cache.Key:
    return cache.key("cpu-kernels", compiler=_run([_compiler(), "--version"]).splitlines()[0], **_made_of(name, extra))


def _made_of(name: str, extra: tuple[str, ...]) -> dict[str, Any]:
    return {
        "source": cache.source_version(*_sources(), *Path(__file__).parent.glob("*.h")),
        "flags": [*FLAGS, *extra, name, *isa.flags(name)],
        "processor": sorted(processor_flags()) if isa.is_native(name) else name,
        "libc": list(platform.libc_ver()),
    }


def _cache() -> cache.Cache:
    return cache.Cache(str(settings.cache_dir() / "native"))


def _sources() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.cpp"))


def _compiler() -> str:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if found is None:
        raise FileNotFoundError("there is no C++ compiler; install g++")
    return found


def _run(command: list[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    if ran.returncode != 0:
        raise OSError(f"{command[0]} failed: {ran.stderr.strip()[:300]}")
    return ran.stdout
