"""Weights cut once and kept: one file a rank (`weights/tp{r}_sharded_checkpoint.safetensors`, NxD's names) and a manifest.

Loading them maps files: nothing is cut, converted or fused again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from rayneuron import models
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import Progress, dequantised, hub, weights, words
from rayneuron.models.arch import Arch
from rayneuron.models.quantization import dtype_name, parse, stored

log = logging.getLogger(__name__)

MANIFEST, FOLDER, FORMAT = "rayneuron_shards.json", "weights", 2
# What of an Arch decides which tensors a rank holds and of what shape; the rest is read from config.json at every start.
SHAPES = (
    "vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "gated", "norm", "parallel", "position", "qk_norm", "embed",
    "norm_weights", "final_norm", "post_norm", "experts", "dense_layers", "dense_ffn", "tied", "biased",
    "norms", "one_norm", "whole_qk_norm", "sinks", "shared_ffn", "shared_gate", "expert_bias", "corrections",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the files of a presharded directory are. `convert_s`: seconds that cutting the slowest rank took; `shapes`: of SHAPES;
    `headers`: the checksum of every file's header, which in turn holds the rank and a checksum of every tensor."""

    format: int
    model_type: str
    tp: int
    dtype: str
    quantization: str | None
    scheme: str | None
    fused_qkv: bool
    group_query_attention: str
    sequence_shards: int
    shapes: dict[str, Any]
    file_bytes: list[int]
    headers: list[str]
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
    group_query_attention: str | None = None,
    shard_over_sequence: bool = False,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Cut a model directory for `tp` ranks into `out`, one rank in memory at a time. progress(layers done, layers of all ranks)."""
    config = hub.read_config(path)
    how = None if quantization is None else parse(quantization, scheme)
    heads = {"group_query_attention": group_query_attention, "shard_over_sequence": shard_over_sequence}
    arch = models.check(config, tp=tp, max_model_len=1, dtype=dtype, quantization=quantization, **heads)  # type: ignore[arg-type]
    word = words.compute(dtype, config)
    kind, target = models.compute_type(word), hub.new_directory(out)
    source = dequantised.checkpoint(path, config, kind, allow_pickle)
    (target / FOLDER).mkdir()
    files, slowest = [], 0.0
    for rank in range(tp):
        started = time.perf_counter()

        def report(done: int, total: int, rank: int = rank) -> None:
            if progress is not None:
                progress(rank * total + done, tp * total)

        held = weights.load(
            arch, models.family(config), source, dtype=kind, rank=rank, ranks=tp, fused=fused_qkv, progress=report, quantization=how
        )
        slowest = max(slowest, time.perf_counter() - started)
        files.append(write(weights.cut_for(arch, rank, tp), held, file_of(target, rank)))
    hub.copy_side_files(path, target)
    kept = how or stored(config)
    manifest = Manifest(
        format=FORMAT,
        model_type=arch.model_type,
        tp=tp,
        dtype=word,
        quantization=dtype_name(kept.dtype) if kept else None,
        scheme=kept.scheme if kept else None,
        fused_qkv=fused_qkv,
        group_query_attention=weights.cut_for(arch, 0, tp).plan.strategy,
        sequence_shards=arch.sequence_shards,
        shapes=shapes(arch),
        file_bytes=[file.path.stat().st_size for file in files],
        headers=[file.digest for file in files],
        convert_s=round(slowest, 3),
    )
    hub.write_json(target / MANIFEST, asdict(manifest))  # last: a directory without it is not whole
    return manifest


def write(cut: weights.Cut, held: Mapping[str, Any], path: Path) -> hub.SafeFile:
    """One rank's weights into one file. A tied head is the embedding, and not stored twice; constants follow from config.json."""
    left_out = {*weights.constants(cut, held["top"]), *(["head.w"] if cut.arch.tied else [])}
    flat = {f"top.{n}": t for n, t in held["top"].items() if n not in left_out}
    flat |= {f"layers.{i}.{n}": t for i, w in enumerate(held["layers"]) for n, t in w.items()}
    said = {"rank": str(cut.rank), "ranks": str(cut.ranks)}
    with hub.writer(path, {n: (t.dtype, tuple(t.shape)) for n, t in flat.items()}, said) as put:
        for name, t in flat.items():
            put(name, t)
    return hub.SafeFile(path)


def shapes(arch: Arch) -> dict[str, Any]:
    """What of an Arch the files depend on, as JSON has it."""
    found = {name: getattr(arch, name) for name in SHAPES}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def is_presharded(path: str | Path) -> bool:
    """Whether a directory was written by `shard`."""
    return (Path(path) / MANIFEST).exists()


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a presharded directory, checked against its files. Raises CheckpointError."""
    found = hub.read_json(Path(path) / MANIFEST)
    if found.get("format") != FORMAT:
        raise CheckpointError(
            f"{Path(path) / MANIFEST} has format {found.get('format')!r}, this version reads {FORMAT}; run `rayneuron shard` again"
        )
    try:
        manifest = msgspec.convert(found, Manifest)
    except msgspec.ValidationError as e:
        raise CheckpointError(f"{Path(path) / MANIFEST} is damaged ({e}); run `rayneuron shard` again") from None
    if not len(manifest.file_bytes) == len(manifest.headers) == manifest.tp or manifest.dtype not in words.COMPUTE:
        raise CheckpointError(f"{Path(path) / MANIFEST} is damaged: its tp, dtype, file_bytes and headers do not fit")
    for rank, size in enumerate(manifest.file_bytes):
        file = file_of(path, rank)
        if not file.exists() or file.stat().st_size != size:
            has = f"has {file.stat().st_size} bytes" if file.exists() else "does not exist"
            raise CheckpointError(f"{file} {has}, the manifest says {size}; run `rayneuron shard` again")
    return manifest


def check(manifest: Manifest, arch: Arch, *, ranks: int, dtype: torch.dtype, fused: bool, quantization: str | None) -> None:
    """Refuse files cut for another deployment or config.json. Raises ConfigError saying which key to change, or CheckpointError."""
    if manifest.tp != ranks:
        raise ConfigError(f"the weights are cut for {manifest.tp} ranks, not {ranks}; write tensor_parallel: {manifest.tp}, or shard again")
    if models.compute_type(manifest.dtype) != dtype:
        raise ConfigError(f"the weights are stored in {manifest.dtype}; write dtype: {manifest.dtype}, or shard again")
    if manifest.fused_qkv != fused:
        raise ConfigError(f"the weights were cut with fused_qkv: {str(manifest.fused_qkv).lower()}; write the same, or shard again")
    if quantization is not None and dtype_name(parse(quantization).dtype) != manifest.quantization:
        raise ConfigError(f"the weights are stored with quantization {manifest.quantization}; leave quantization out, or shard again")
    cut, wanted = (manifest.group_query_attention, manifest.sequence_shards), weights.cut_for(arch, 0, ranks).plan.strategy
    if cut != (wanted, arch.sequence_shards):
        raise ConfigError(
            f"the weights are cut with group_query_attention {cut[0]} and KV over {cut[1]} ranks, the deployment asks for {wanted} over "
            f"{arch.sequence_shards}; change group_query_attention and shard_over_sequence, or shard again with them"
        )
    ours = shapes(arch)
    changed = [name for name in ours if manifest.shapes.get(name) != ours[name]]
    if manifest.model_type != arch.model_type or changed:
        said = ", ".join(f"{name} {ours[name]!r} (cut with {manifest.shapes.get(name)!r})" for name in changed)
        raise CheckpointError(f"config.json is not the one the {manifest.model_type} weights were cut with: {said}; shard again")


def load(path: str | Path, manifest: Manifest, arch: Arch, rank: int, progress: Progress | None = None) -> dict[str, Any]:
    """One rank's weights as `weights.load` gives them, mapped from its file, every tensor held against its checksum."""
    file = hub.SafeFile(file_of(path, rank))
    is_of = tuple(file.said.get(name) for name in ("rank", "ranks"))
    if is_of != (str(rank), str(manifest.tp)):
        raise CheckpointError(f"{file.path} says it holds rank {is_of[0]} of {is_of[1]}, not {rank} of {manifest.tp}; were files swapped?")
    if file.digest != manifest.headers[rank]:
        raise CheckpointError(f"{file.path} is not the file of {MANIFEST}: its header differs; run `rayneuron shard` again")
    top: dict[str, Tensor] = {}
    layers: list[dict[str, Tensor]] = [{} for _ in range(arch.layers)]
    for name in file.entries:
        file.verify(name)
        part, _, rest = name.partition(".")
        if part == "top":
            top[rest] = file.tensor(name)
            continue
        index, _, ours = rest.partition(".")
        if not layers[int(index)] and progress is not None:
            progress(int(index), arch.layers)
        layers[int(index)][ours] = file.tensor(name)
    if arch.tied:
        top["head.w"] = top["embed.w"]
    progress and progress(arch.layers, arch.layers)
    return {"top": top | weights.constants(weights.cut_for(arch, rank, manifest.tp), top), "layers": layers, "first": 0}


def check_directory(
    path: str | Path, arch: Arch, *, ranks: int, dtype: torch.dtype, fused: bool, quantization: str | None, stages: int
) -> Manifest:
    """The manifest of a presharded directory that this deployment can run, known without reading a weight."""
    if stages > 1:
        raise ConfigError("presharded weights hold whole models; leave pipeline_parallel out, or give the original checkpoint")
    manifest = read_manifest(path)
    check(manifest, arch, ranks=ranks, dtype=dtype, fused=fused, quantization=quantization)
    return manifest


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
    progress: Progress | None = None,
) -> dict[str, Any]:
    """One rank's weights from a model directory of either kind: presharded files are mapped, a checkpoint is read and cut."""
    started = time.perf_counter()
    if is_presharded(path):
        manifest = check_directory(path, arch, ranks=ranks, dtype=dtype, fused=fused, quantization=quantization, stages=stages)
        held = load(path, manifest, arch, rank, progress)
        took = time.perf_counter() - started
        log.info("presharded weights mapped in %.2f s, checksums included; cutting them took %.2f s", took, manifest.convert_s)
        return held
    held = weights.load(
        arch, models.family(config), dequantised.checkpoint(path, config, dtype, allow_pickle), dtype=dtype, rank=rank, ranks=ranks,
        fused=fused, progress=progress, quantization=quantization, stage=stage, stages=stages,
    )  # fmt: skip
    log.info("rank %d of %d: %.0f MiB of weights in %.2f s", rank, ranks, weights.held_bytes(held) / 2**20, time.perf_counter() - started)
    return held
