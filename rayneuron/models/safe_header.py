"""The header of a safetensors file: made and read in one place, and checked whole by the format's rules before it is believed; no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from rayneuron.errors import CheckpointError

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
MAX_BYTES = 100_000_000  # of a header: the format's own limit
MAX_DIMS = 64  # of a tensor: torch's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: of a dtype of WIDTHS, bytes [start, stop) after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """`said`: the metadata; `digest`: of the text; `start`: the byte behind it, from which the entries count. They cover the file."""

    said: dict[str, str]
    digest: str
    start: int
    entries: dict[str, Entry]


def laid_out(entries: Mapping[str, tuple[str, Sequence[int]]], said: Mapping[str, str]) -> dict[str, Any]:
    """The header of tensors by name, a dtype of WIDTHS and a shape each, that follow one another; `said`: the metadata."""
    header: dict[str, Any] = {"__metadata__": dict(said)}
    at = 0
    for name, (dtype, shape) in entries.items():
        stop = at + prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    return header


def encoded(header: Mapping[str, Any], align: int) -> bytes:
    """As it stands in a file, its length before it and padded so that the tensors begin at a multiple of `align` behind that."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % align)
    return len(text).to_bytes(8, "little") + text


def read(path: Path, rest: Callable[[], None] = lambda: None) -> Header:
    """The header of a file, `rest` called on the way. Raises CheckpointError: no such file, no header, bytes that do not fit it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            count = int.from_bytes(file.read(8), "little")
            if size < 8 or count > min(size - 8, MAX_BYTES):
                raise CheckpointError(
                    f"{path} is truncated or no safetensors file: {size} bytes, a header of {count}; download it again"
                )
            text = file.read(count)
        found = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, rest))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, but the index names it; download it again") from None
    except (ValueError, OSError, RecursionError) as damage:
        raise CheckpointError(f"{path} has a damaged safetensors header: {damage}; download it again") from None
    said = found.pop("__metadata__", None) if isinstance(found, dict) else 0
    said = {} if said is None else said
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise CheckpointError(f"{path} has a damaged safetensors header: it is no JSON object of tensors, or its metadata are no words")
    start = 8 + count
    entries = {name: _entry(path, name, entry, size - start, rest) for name, entry in found.items()}
    _covered(path, entries, size - start)
    return Header(said, checksum(text), start, entries)


def checksum(data: Any) -> str:
    """Of bytes: as fast as memory is read. It finds damage, not forgery."""
    return xxhash.xxh3_128(data).hexdigest()


def _once(pairs: list[tuple[str, Any]], rest: Callable[[], None]) -> dict[str, Any]:
    rest()
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _entry(path: Path, name: str, said: Any, room: int, rest: Callable[[], None]) -> Entry:
    rest()
    try:
        dtype, shape, (start, stop) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
        width, listed = WIDTHS[dtype], isinstance(said["shape"], list) and len(shape) <= MAX_DIMS
        known = listed and all(type(n) is int and 0 <= n < 2**48 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise CheckpointError(f"{path}: tensor {name!r:.80} has a header this reader does not know: {said!r:.200}")
    if stop - start != prod(shape) * width:
        raise CheckpointError(f"{path}: tensor {name!r:.80} of shape {shape} does not fit its {stop - start} bytes")
    if stop > room:
        raise CheckpointError(f"{path} is truncated: tensor {name!r:.80} ends at byte {stop} of {room}; download it again")
    return Entry(dtype, shape, start, stop)


def _covered(path: Path, entries: dict[str, Entry], room: int) -> None:
    """Every byte belongs to one tensor, as the format demands."""
    at, before = 0, "the header"
    for name, e in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if e.start != at:
            how = "overlaps" if e.start < at else "leaves bytes uncovered behind"
            raise CheckpointError(f"{path} is damaged: tensor {name!r:.80} at byte {e.start} {how} {before}, which ends at {at}")
        at, before = e.stop, f"tensor {name!r:.80}"
    if at != room:
        raise CheckpointError(f"{path} is damaged: {room - at} bytes behind {before} belong to no tensor")
