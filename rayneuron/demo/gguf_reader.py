"""What a GGUF file holds: metadata as plain values, tensors as they lie there. The package's reader makes arrays of strings: seconds."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_HEAD = struct.Struct("<4sIQQ")  # magic, version, tensors, values


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor: `kind` is gguf's number of its format, `data` a NumPy array of its bytes, its rows as the first dimensions say."""

    name: str
    kind: int
    data: Any


def read(path: Path) -> tuple[dict[str, Any], list[RawTensor]]:
    """Metadata by name, and all tensors, of a little-endian file of version 2 or 3 whose checksum somebody has verified."""
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    data = bytearray(path.read_bytes())
    cursor = _Cursor(data, _HEAD.size)
    _, _, tensors, values = _HEAD.unpack_from(data)
    meta = {cursor.text(): cursor.value(cursor.scalar("I")) for _ in range(values)}
    listed = [(cursor.text(), [cursor.scalar("Q") for _ in range(cursor.scalar("I"))], *cursor.scalars("IQ")) for _ in range(tensors)]
    align = meta.get("general.alignment", 32)
    start, found = -(-cursor.at // align) * align, []
    for name, sizes, kind, at in listed:
        shape = quant_shape_to_byte_shape(tuple(reversed(sizes)), GGMLQuantizationType(kind))
        size = 1
        for n in shape:
            size *= n
        found.append(RawTensor(name, kind, torch.frombuffer(data, dtype=torch.uint8, count=size, offset=start + at).view(*shape).numpy()))
    return meta, found


class _Cursor:
    def __init__(self, data: bytearray, at: int) -> None:
        self.data, self.at = data, at

    def scalars(self, codes: str) -> tuple[Any, ...]:
        packed = struct.Struct(f"<{codes}")
        self.at += packed.size
        return packed.unpack_from(self.data, self.at - packed.size)

    def scalar(self, code: str) -> Any:
        return self.scalars(code)[0]

    def text(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalars("IQ")
        if item in _SCALARS:
            return list(self.scalars(f"{count}{_SCALARS[item]}"))
        return [self.value(item) for _ in range(count)]
