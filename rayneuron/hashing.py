"""What full blocks of a prefix are called: a chain of hashes over token ids, from a root that says of which model and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

_SIZE, _FORMAT = 16, b"rayneuron kv 1"  # bytes of a hash; what every root begins with
_HEAD, _PAGE, _PAGES = 65_536, 4096, 16


@lru_cache(maxsize=256)  # asked for with every block that is filled
def root(model: str, adapter: str = "", salt: str = "") -> bytes:
    """Where the chains of one model (`fingerprint`), one adapter's content and one salt begin: others never share a block with them."""
    return _hashed(_FORMAT, *(part.encode("utf-8", "surrogatepass") for part in (model, adapter, salt)))


def chain(ids: Sequence[int], block: int, start: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """The hashes of all full blocks of `ids`, each of the one before it and its own ids; `known`: those of the first blocks."""
    made = list(known)
    first, last = len(made) * block, len(ids) // block * block
    size, numbers = 4 * block, np.array(ids[first:last], "<i4").tobytes()
    for at in range(0, len(numbers), size):
        made.append(blake2b((made[-1] if made else start) + numbers[at : at + size], digest_size=_SIZE).digest())
    return made


def fingerprint(folder: Path) -> str:
    """What a model directory holds, without reading all of it: config.json, and the size, head and some pages of every weight file."""
    parts = [(folder / "config.json").read_bytes()]
    for file in sorted(file for file in folder.rglob("*") if file.suffix in (".safetensors", ".bin")):
        size = file.stat().st_size
        with file.open("rb") as opened:
            parts += [str(file.relative_to(folder)).encode(), str(size).encode(), opened.read(_HEAD)]
            for page in range(_PAGES):
                opened.seek(size * page // _PAGES)
                parts.append(opened.read(_PAGE))
    return _hashed(*parts).hex()


def _hashed(*parts: bytes) -> bytes:
    """Of the parts, each told from the next by its length."""
    made = blake2b(digest_size=_SIZE)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()
