"""Instruction sets the kernels are built for: what the processor has, what the operating system lets this process use, compiler flags.

AMX has run on hardware, where it gave the bits of the emulation that the tests use elsewhere.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)

NATIVE, AMX, EMULATED = "native", "amx", "amx-emulated"  # any other name is the compiler's own, for -march
TILE_FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
_TILES: dict[str, tuple[str, ...]] = {
    AMX: ("-DRN_TILES=1", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    EMULATED: ("-DRN_TILES=2",),
}
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


def flags(name: str) -> tuple[str, ...]:
    """What the compiler is told."""
    return (f"-march={NATIVE if is_native(name) else name}", *_TILES.get(name, ()))


def is_native(name: str) -> bool:
    """Whether a build is for the processor of this machine."""
    return name == NATIVE or name in _TILES


@lru_cache
def has_tiles() -> bool:
    """Whether this process may use AMX for bf16 and int8; where only the operating system refuses, the log says so."""
    if not processor_flags() >= TILE_FLAGS:
        return False
    if not permitted():
        log.info("this processor has AMX, but the operating system does not let this process use it: the kernels do without")
        return False
    return True


def permitted() -> bool:
    """Ask Linux (5.16 or later) for the tile registers, for all threads of this process and its forks."""
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def processor_flags() -> frozenset[str]:
    """What the processor can do, in the kernel's words; empty where that is not told (or the processor is no x86)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
