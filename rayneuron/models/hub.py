"""A model directory as the hub lays it out: configs, and tensors read lazily from mapped safetensors files."""

from __future__ import annotations

import json
import logging
import mmap
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import safe_header
from rayneuron.models.config_json import generation_config as generation_config
from rayneuron.models.config_json import read_config as read_config
from rayneuron.models.config_json import read_json as read_json
from rayneuron.models.safe_header import checksum as checksum

log = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLE_INDEX, PICKLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
NAMES = {d: n for n, d in DTYPES.items()}
ALIGN = 64  # bytes, of the header of a file that is written here
NOTED = "xxh3 of "  # before a tensor's name: its checksum in the metadata of a file


class SafeFile:
    """One safetensors file, mapped, so that a rank reads its share only and gives pages back. `said`, `digest`, `start` and `entries` are
    those of its header."""

    def __init__(self, path: Path, rest: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        found = safe_header.read(path, rest)
        self.said, self.digest, self.start, self.entries = found.said, found.digest, found.start, found.entries

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped bytes; nothing is read until it is used."""
        e = self.entries[name]
        dtype = DTYPES[e.dtype]
        if e.start == e.stop:
            return torch.empty(e.shape, dtype=dtype)
        if self._map is None:
            with self.path.open("rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=e.stop - e.start, offset=self.start + e.start)
        flat = flat.clone() if (self.start + e.start) % dtype.itemsize else flat  # torch wants elements aligned; old files are not
        return flat.view(dtype).view(e.shape)

    def verify(self, name: str) -> None:
        """Hold a tensor against the checksum that `writer` noted. Reads all of it. Raises CheckpointError."""
        if self.said.get(NOTED + name) != checksum(_bytes(self.tensor(name))):
            raise CheckpointError(f"{self.path}: tensor {name!r} is not what was written (its checksum differs)")

    def release(self, name: str) -> None:
        """Drop the tensor's pages from memory; they are read again when used again."""
        e = self.entries[name]
        if self._map is not None and e.stop > e.start:
            start = (self.start + e.start) // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, self.start + e.stop - start)


class Checkpoint(Mapping[str, Tensor]):
    """All tensors of a model directory by name, read lazily.

    model.safetensors, or the files of an index, or all *.safetensors; with an index exactly what it assigns is used. Pickles (`.bin`)
    are refused unless `allow_pickle`, and then read with weights_only.
    """

    def __init__(self, path: str | Path, allow_pickle: bool = False) -> None:
        self.path = Path(path)
        self._where: dict[str, SafeFile] = {}
        self._loaded: dict[str, Tensor] = {}
        if (self.path / SINGLE).exists():
            self._take(SafeFile(self.path / SINGLE))
            if (self.path / INDEX).exists():
                log.warning("%s holds %s and %s; the former is used, as transformers does", self.path, SINGLE, INDEX)
        elif (self.path / INDEX).exists():
            self._indexed()
        else:
            files = sorted(self.path.glob("*.safetensors"))
            for file in files:
                self._take(SafeFile(file))
            if not files:
                self._pickled(allow_pickle)

    def _indexed(self) -> None:
        names = weight_map(self.path / INDEX)
        files = {f: SafeFile(self.path / f) for f in sorted(set(names.values()))}
        for name, file in names.items():
            if name not in files[file].entries:
                raise CheckpointError(f"{self.path / INDEX} puts tensor {name!r} into {file}, which does not hold it: the index is stale")
            self._where[name] = files[file]

    def _take(self, file: SafeFile) -> None:
        for name in file.entries:
            if name in self._where:
                raise CheckpointError(f"tensor {name!r} is in both {self._where[name].path.name} and {file.path.name}; remove one file")
            self._where[name] = file

    def _pickled(self, allow: bool) -> None:
        found = sorted(self.path.glob("*.bin")) or sorted(self.path.glob("medusa_lm_head.pt"))
        if not found:
            raise CheckpointError(f"{self.path} holds no *.safetensors file")
        if not allow:
            raise CheckpointError(
                f"{self.path} holds only pickled weights ({found[0].name}), which can run code when read; "
                "convert them to safetensors, or set allow_pickle: true"
            )
        files = [self.path / PICKLE] if found[0].suffix == ".bin" else found
        if (self.path / PICKLE_INDEX).exists():
            files = [self.path / f for f in sorted(set(weight_map(self.path / PICKLE_INDEX).values()))]
        for file in files:
            self._unpickle(file)

    def _unpickle(self, file: Path) -> None:
        try:
            part = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as e:  # torch raises many kinds; every one means this file is not to be trusted or not whole
            raise CheckpointError(f"{file} cannot be read as plain weights: {type(e).__name__}: {str(e).splitlines()[0]}") from None
        if not isinstance(part, dict) or not all(isinstance(t, Tensor) for t in part.values()):
            raise CheckpointError(f"{file} holds no tensors by name")
        for name, t in part.items():
            if name in self._loaded:
                raise CheckpointError(f"tensor {name!r} is in more than one .bin file")
            self._loaded[name] = t

    def __getitem__(self, name: str) -> Tensor:
        return self._loaded[name] if name in self._loaded else self._where[name].tensor(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._where or self._loaded

    def __len__(self) -> int:
        return len(self._where) or len(self._loaded)

    def release(self, name: str) -> None:
        """Drop a tensor's pages from memory."""
        if name in self._where:
            self._where[name].release(name)

    def meta(self) -> dict[str, Tensor]:
        """The same names with shapes and dtypes only, on torch's meta device."""
        shapes = {n: (f.entries[n].shape, DTYPES[f.entries[n].dtype]) for n, f in self._where.items()}
        shapes |= {n: (tuple(t.shape), t.dtype) for n, t in self._loaded.items()}
        return {n: torch.empty(s, dtype=d, device="meta") for n, (s, d) in shapes.items()}


def weight_map(index: Path) -> dict[str, str]:
    """Which file holds which tensor, by an index. Raises CheckpointError."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) and Path(file).name == file for file in names.values()):
        raise CheckpointError(f"{index} has no weight_map of tensors to files beside it")
    return names


def _bytes(t: Tensor) -> memoryview:
    return t.contiguous().view(-1).view(torch.uint8).numpy().data


def new_directory(path: str | Path) -> Path:
    """A directory to write into; it may exist, but empty. Raises ConfigError otherwise."""
    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not empty; name a new directory")
    target.mkdir(parents=True, exist_ok=True)
    return target


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, readable."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def copy_side_files(source: str | Path, target: Path) -> None:
    """Copy what lies beside the weights: configs, tokenizer, chat template."""
    for file in sorted(Path(source).iterdir()):
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)


@contextmanager
def writer(
    path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], said: Mapping[str, str] | None = None
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write one safetensors file tensor by tensor, in any order, holding none. The file appears under its name once it is whole.

    With `said`, metadata of one's own, the header also notes every tensor's checksum.
    """
    noted = {} if said is None else {NOTED + name: "0" * 32 for name in entries}
    named = {name: (NAMES[dtype], shape) for name, (dtype, shape) in entries.items()}
    header = safe_header.laid_out(named, {"format": "pt", **(said or {}), **noted})
    size = len(safe_header.encoded(header, ALIGN))
    left, partial = set(entries), path.with_name(path.name + ".partial")

    def write(name: str, t: Tensor) -> None:
        dtype, shape = entries[name]
        if t.dtype != dtype or tuple(t.shape) != shape:
            raise ValueError(f"{name} was announced as {dtype} {shape}, but is {t.dtype} {tuple(t.shape)}")
        left.remove(name)
        data = _bytes(t)
        if said is not None:
            header["__metadata__"][NOTED + name] = checksum(data)
        file.seek(size + header[name]["data_offsets"][0])
        file.write(data)

    with partial.open("wb") as file:
        yield write
        if left:
            raise ValueError(f"never written: {sorted(left)[:3]}")
        file.seek(0)
        file.write(safe_header.encoded(header, ALIGN))
    partial.replace(path)
