"""Weights cut once and kept: one file a rank (`weights/tp{r}_sharded_checkpoint.safetensors`, NxD's names) and a manifest.

Loading them maps files: nothing is cut, converted or fused again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayneuron import models
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import hub, weights
from rayneuron.models.arch import Arch
from rayneuron.models.quantization import dtype_name, parse, stored

log = logging.getLogger(__name__)

MANIFEST, FOLDER, FORMAT = "rayneuron_shards.json", "weights", 1
WORDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the files of a presharded directory are. `convert_s`: seconds that cutting the slowest rank took."""

    format: int
    model_type: str
    tp: int
    dtype: str
    quantization: str | None
    scheme: str | None
    fused_qkv: bool
    layers: int
    file_bytes: list[int]
    convert_s: float


def file_of(path: str | Path, rank: int) -> Path:
    """The file of one rank."""
    return Path(path) / FOLDER / f"tp{rank}_sharded_checkpoint.safetensors"


def shard(
    path: str | Path,
    tp: int,
    out: str | Path,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    scheme: str = "per_channel",
    fused_qkv: bool = True,
    allow_pickle: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Cut a model directory for `tp` ranks into `out`, one rank in memory at a time. progress(layers done, layers of all ranks)."""
    config = hub.read_config(path)
    how = None if quantization is None else parse(quantization, scheme)
    arch = models.check(config, tp=tp, max_model_len=1, dtype=dtype, quantization=quantization)
    kind, source, target = stored_dtype(dtype, config), hub.Checkpoint(path, allow_pickle), hub.new_directory(out)
    (target / FOLDER).mkdir()
    sizes, slowest = [], 0.0
    for rank in range(tp):
        started = time.perf_counter()

        def report(done: int, total: int, rank: int = rank) -> None:
            if progress is not None:
                progress(rank * total + done, tp * total)

        held = weights.load(
            arch, models.family(config), source, dtype=kind, rank=rank, ranks=tp, fused=fused_qkv, progress=report, quantization=how
        )
        slowest = max(slowest, time.perf_counter() - started)
        sizes.append(write(arch, held, file_of(target, rank)))
    hub.copy_side_files(path, target)
    kept = how or stored(config)
    manifest = Manifest(
        format=FORMAT,
        model_type=arch.model_type,
        tp=tp,
        dtype=word_of(kind),
        quantization=dtype_name(kept.dtype) if kept else None,
        scheme=kept.scheme if kept else None,
        fused_qkv=fused_qkv,
        layers=arch.layers,
        file_bytes=sizes,
        convert_s=round(slowest, 3),
    )
    hub.write_json(target / MANIFEST, asdict(manifest))  # last: a directory without it is not whole
    return manifest


def write(arch: Arch, held: Mapping[str, Any], file: Path) -> int:
    """One rank's weights into one file; returns its bytes. A tied head is the embedding, and not stored twice."""
    flat = {f"top.{n}": t for n, t in held["top"].items() if not (arch.tied and n == "head.w")}
    flat |= {f"layers.{i}.{n}": t for i, w in enumerate(held["layers"]) for n, t in w.items()}
    with hub.writer(file, {n: (t.dtype, tuple(t.shape)) for n, t in flat.items()}) as put:
        for name, t in flat.items():
            put(name, t)
    return file.stat().st_size


def is_presharded(path: str | Path) -> bool:
    """Whether a directory was written by `shard`."""
    return (Path(path) / MANIFEST).exists()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a presharded directory, checked against its files. Raises CheckpointError."""
    found = hub.read_json(Path(path) / MANIFEST)
    try:
        manifest = Manifest(**found)
    except TypeError as e:
        raise CheckpointError(f"{Path(path) / MANIFEST} was written by another version ({e}); run `rayneuron shard` again") from None
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{Path(path) / MANIFEST} has format {manifest.format}, this version reads {FORMAT}; run `rayneuron shard` again"
        )
    for rank, size in enumerate(manifest.file_bytes):
        file = file_of(path, rank)
        if not file.exists() or file.stat().st_size != size:
            has = f"has {file.stat().st_size} bytes" if file.exists() else "does not exist"
            raise CheckpointError(f"{file} {has}, the manifest says {size}; run `rayneuron shard` again")
    return manifest


def check(manifest: Manifest, *, ranks: int, dtype: torch.dtype, fused: bool, quantization: str | None) -> None:
    """Refuse files cut for another deployment. Raises ConfigError saying which key to change."""
    if manifest.tp != ranks:
        raise ConfigError(f"the weights are cut for {manifest.tp} ranks, not {ranks}; write tensor_parallel: {manifest.tp}, or shard again")
    if WORDS[manifest.dtype] != dtype:
        raise ConfigError(f"the weights are stored in {manifest.dtype}; write dtype: {manifest.dtype}, or shard again")
    if manifest.fused_qkv != fused:
        raise ConfigError(f"the weights were cut with fused_qkv: {str(manifest.fused_qkv).lower()}; write the same, or shard again")
    if quantization is not None and dtype_name(parse(quantization).dtype) != manifest.quantization:
        raise ConfigError(f"the weights are stored with quantization {manifest.quantization}; leave quantization out, or shard again")


def load(path: str | Path, arch: Arch, rank: int) -> dict[str, Any]:
    """One rank's weights as `weights.load` gives them, mapped from its file."""
    file = hub.SafeFile(file_of(path, rank))
    top: dict[str, Tensor] = {}
    layers: list[dict[str, Tensor]] = [{} for _ in range(arch.layers)]
    for name in file.entries:
        part, _, rest = name.partition(".")
        if part == "top":
            top[rest] = file.tensor(name)
            continue
        index, _, ours = rest.partition(".")
        layers[int(index)][ours] = file.tensor(name)
    if arch.tied:
        top["head.w"] = top["embed.w"]
    return {"top": top, "layers": layers, "first": 0}


def open_weights(
    path: str | Path,
    config: dict[str, Any],
    arch: Arch,
    *,
    dtype: torch.dtype,
    rank: int = 0,
    ranks: int = 1,
    fused: bool = True,
    quantization: str | None = None,
    allow_pickle: bool = False,
    stage: int = 0,
    stages: int = 1,
    progress: weights.Progress | None = None,
) -> dict[str, Any]:
    """One rank's weights from a model directory of either kind: presharded files are mapped, a checkpoint is read and cut."""
    started = time.perf_counter()
    if is_presharded(path):
        if stages > 1:
            raise ConfigError("presharded weights hold whole models; leave pipeline_parallel out, or give the original checkpoint")
        manifest = read_manifest(path)
        check(manifest, ranks=ranks, dtype=dtype, fused=fused, quantization=quantization)
        held = load(path, arch, rank)
        log.info("presharded weights mapped in %.2f s; cutting them took %.2f s", time.perf_counter() - started, manifest.convert_s)
        return held
    held = weights.load(
        arch, models.family(config), hub.Checkpoint(path, allow_pickle), dtype=dtype, rank=rank, ranks=ranks, fused=fused,
        progress=progress, quantization=quantization, stage=stage, stages=stages,
    )  # fmt: skip
    log.info("rank %d of %d: %.0f MiB of weights in %.2f s", rank, ranks, weights.held_bytes(held) / 2**20, time.perf_counter() - started)
    return held


def stored_dtype(word: str, config: Mapping[str, Any]) -> torch.dtype:
    """The dtype weights are stored in: the word's, or the checkpoint's own for auto."""
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return WORDS[word] if word != "auto" else getattr(torch, own) if own in ("bfloat16", "float16") else torch.float32


def word_of(dtype: torch.dtype) -> str:
    """Our word for a compute dtype."""
    return next(w for w, d in WORDS.items() if d == dtype)
