"""What a GGUF file of version 2 or 3 holds: metadata as plain values, tensors as float32; in NumPy, which is there at once."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayneuron.errors import CheckpointError

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_HEAD = struct.Struct("<4sIQQ")  # magic, version, tensors, values
_LENGTH = struct.Struct("<Q")
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_FORMATS = {_F32: (1, 4), _Q4_1: (32, 20), _Q8_0: (32, 34)}  # values and bytes of a block
_BLOCKS = 1024  # that are computed at once: what is between stays in the processor's caches


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as it lies there: `kind` is the file's number of its format, `blocks` uint8 [blocks, bytes of one]."""

    name: str
    kind: int
    shape: tuple[int, ...]
    blocks: Bytes

    def values(self) -> Floats:
        """Float32 of `shape`: a block's scale times its numbers, plus (Q4_1) its least value; each rounds once, as in llama.cpp."""
        if self.kind == _F32:
            return self.blocks.view(np.float32).reshape(self.shape)
        out = np.empty((len(self.blocks), _FORMATS[self.kind][0]), np.float32)
        of_kind = _q4_1 if self.kind == _Q4_1 else _q8_0
        for at in range(0, len(out), _BLOCKS):
            of_kind(self.blocks[at : at + _BLOCKS], out[at : at + _BLOCKS])
        return out.reshape(self.shape)


def read(path: Path) -> tuple[dict[str, Any], list[RawTensor]]:
    """Metadata by name, and all tensors, of a little-endian file whose checksum somebody has verified.

    Raises CheckpointError where a tensor has a format that nobody reads here.
    """
    data = path.read_bytes()
    cursor = _Cursor(data, _HEAD.size)
    _, _, tensors, values = _HEAD.unpack_from(data)
    meta = {cursor.text(): cursor.value(cursor.scalar("I")) for _ in range(values)}
    listed = [(cursor.text(), [cursor.scalar("Q") for _ in range(cursor.scalar("I"))], *cursor.scalars("IQ")) for _ in range(tensors)]
    align = meta.get("general.alignment", 32)
    start, found = -(-cursor.at // align) * align, []
    for name, sizes, kind, at in listed:
        if kind not in _FORMATS:
            raise CheckpointError(f"{path}: {name} has GGUF's format {kind}; F32, Q4_1 and Q8_0 are read")
        values_of_one, bytes_of_one = _FORMATS[kind]
        count = math.prod(sizes) // values_of_one
        blocks = np.frombuffer(data, np.uint8, count * bytes_of_one, start + at).reshape(count, bytes_of_one)
        found.append(RawTensor(name, kind, tuple(reversed(sizes)), blocks))
    return meta, found


def _q4_1(blocks: Bytes, out: Floats) -> None:
    """Half-precision scale and least value, then 16 bytes: numbers 0 to 15 in their low halves, 16 to 31 in their high ones."""
    scales = blocks[:, :4].copy().view("<f2").astype(np.float32)
    out[:, :16] = blocks[:, 4:] & 15
    out[:, 16:] = blocks[:, 4:] >> 4
    out *= scales[:, :1]
    out += scales[:, 1:]


def _q8_0(blocks: Bytes, out: Floats) -> None:
    """A half-precision scale, then 32 signed bytes."""
    np.multiply(blocks[:, 2:].view(np.int8), blocks[:, :2].copy().view("<f2").astype(np.float32), out=out)


class _Cursor:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def scalars(self, codes: str) -> tuple[Any, ...]:
        packed = struct.Struct(f"<{codes}")
        self.at += packed.size
        return packed.unpack_from(self.data, self.at - packed.size)

    def scalar(self, code: str) -> Any:
        return self.scalars(code)[0]

    def text(self) -> str:
        begin = self.at + _LENGTH.size
        self.at = begin + _LENGTH.unpack_from(self.data, self.at)[0]
        return self.data[begin : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalars("IQ")
        if item in _SCALARS:
            return list(self.scalars(f"{count}{_SCALARS[item]}"))
        return [self.value(item) for _ in range(count)]
