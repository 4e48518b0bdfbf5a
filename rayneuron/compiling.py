"""`rayneuron compile`: everything a deployment compiles ahead, listed, built into the cache, and copied to a folder another node loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayneuron.config import Deployment
from rayneuron.errors import ConfigError

Tell = Callable[[str], None]
Count = Callable[[int, int], None]


def compile_ahead(config: Deployment, out: Path | None, tell: Tell, progress: Count) -> Path:
    """Compile what `config` needs and return its folder: `out`, or the cache's entry. Needs no Neuron core, only the SDK.

    `tell` is given the list of graphs before anything is compiled. Raises ConfigError, CheckpointError, CompileError.
    """
    from rayneuron import devices, loading, models, settings
    from rayneuron.engine.buckets import inventory
    from rayneuron.engine.step import step
    from rayneuron.models import decoder, hub

    if out is not None and out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; name a new folder")
    devices.check(config.device)
    path = loading.resolve(config.model.path)
    raw = hub.read_config(path)
    length = loading.model_length(config, raw)
    arch = models.check(raw, tp=config.tensor_parallel, max_model_len=length, dtype=config.dtype, quantization=config.quantization)
    dtype = loading.compute_dtype(config.dtype, raw)
    capacity = loading.capacity_of(config, length)
    made = replace(loading.ahead(config, length), local_ranks=1, artifact=None, required=False)
    device: Any = devices.open(config.device, ahead=made, dtype=dtype, threads=config.threads or settings.threads())
    try:
        weights = loading.rank_weights(config, path, raw, arch, dtype, _silent, made)
        device.load(weights, decoder.kv_shapes(arch, capacity.rows + 1, capacity.length + 1, made.ranks))
        shapes = inventory(capacity)
        found = devices.precompile(device, partial(step, arch), shapes, tell, lambda done, total, shape: progress(done, total))
    finally:
        device.close()
    if out is None:
        return found
    shutil.copytree(found, out, dirs_exist_ok=True)
    return out


def _silent(stage: str, done: int, total: int) -> None:
    return None
