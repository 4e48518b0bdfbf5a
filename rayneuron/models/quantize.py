"""A quantised copy of a model directory, written tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rayneuron import models
from rayneuron.errors import CheckpointError
from rayneuron.models import Progress, hub
from rayneuron.models.arch import Arch
from rayneuron.models.quantization import METHOD, dtype_name, parse, quantise, scale_name, spread, stored_scale
from rayneuron.models.rules import PRODUCTS, same
from rayneuron.models.stored import stored_shape


def quantize(path: str | Path, dtype: str, scheme: str, out: str | Path, *, progress: Progress | None = None) -> None:
    """Write a quantised copy of a model directory that loads as it is: `<layer>.weight` small, `<layer>.scale` float32 beside it.

    The products of the layers are quantised; router, embedding, head and norms stay. progress(tensors done, tensors in all).
    """
    how = parse(dtype, scheme)
    config = hub.read_config(path)
    if config.get("quantization_config"):
        raise CheckpointError(f"{path} is quantised already; quantise the original checkpoint")
    arch, family = models.architecture(config), models.family(config)
    source, target = hub.Checkpoint(path), hub.new_directory(out)
    if arch.expert_bias:
        raise CheckpointError(f"a {arch.model_type} checkpoint cannot be written quantised; set quantization: {dtype} where it is loaded")
    ways = scale_shapes(arch, family)
    prefix = getattr(family, "BASE", "") if not any(n.startswith(getattr(family, "BASE", "")) for n in source) else ""
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, t in source.meta().items():
        way = ways.get(prefix + name)
        entries[name] = (how.dtype if way else t.dtype, tuple(t.shape))
        if way:
            entries[scale_name(name)] = (torch.float32, (1,) if how.scheme == "per_tensor" else way)
    with hub.writer(target / hub.SINGLE, entries) as write:
        for done, name in enumerate(source):
            way, t = ways.get(prefix + name), source[name]
            if way:
                scale = stored_scale(t, way, how)
                write(scale_name(name), scale)
                t = quantise(t, spread(scale, t.shape), how)
            write(name, t)
            source.release(name)
            if progress is not None:
                progress(done + 1, len(source))
    hub.copy_side_files(path, target)
    said = {"quant_method": METHOD, "dtype": dtype_name(how.dtype), "scheme": how.scheme}
    hub.write_json(target / "config.json", {**config, "quantization_config": said})


def scale_shapes(arch: Arch, family: ModuleType) -> dict[str, tuple[int, ...]]:
    """Every stored tensor that is quantised, with the shape of its scale per channel, as stored: one number an output channel.

    Output channels lie along rows, along columns (GPT-2), or so for every expert (DBRX, GPT-OSS); the family's own converter tells.
    """
    found: dict[str, tuple[int, ...]] = {}
    for i in range(arch.layers):
        ffn = arch.dense_ffn if i in arch.dense_layers else arch.ffn
        for ours, rule in family.layer(arch, i).items():
            names = ours.split()
            if not set(names) <= PRODUCTS:
                continue
            theirs, convert = rule if isinstance(rule, tuple) else (rule, same)
            shape = stored_shape(arch, names, ffn, convert)
            ways = ((*shape[:-1], 1), (*shape[:-2], 1, shape[-1]), (arch.experts, shape[1]))
            way = next(s for s in ways if _is_scale(s, shape, convert))
            for e in range(arch.experts if "{e}" in theirs else 1):
                found[family.PREFIX.format(i) + theirs.replace("{e}", str(e))] = way
    return found


def _is_scale(scale: tuple[int, ...], shape: tuple[int, ...], convert: Any) -> bool:
    """Whether `convert` brings a stored scale to [..., out, 1] where it brings the weight to [..., out, in]."""
    try:
        made, whole = (convert(torch.empty(s, device="meta")) for s in (scale, shape))
    except (RuntimeError, IndexError):
        return False
    pairs = zip(made, whole, strict=True) if isinstance(made, tuple) else ((made, whole),)
    return all(tuple(m.shape) == (*w.shape[:-1], 1) for m, w in pairs)
