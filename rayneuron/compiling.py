"""`rayneuron compile`: everything a deployment compiles ahead, listed, built into the cache, and copied to a folder another node loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayneuron.aside import aside
from rayneuron.config import Deployment

if TYPE_CHECKING:
    from rayneuron.loading import Checked

Tell = Callable[[str], None]
Count = Callable[[int, int], None]


def compile_ahead(config: Deployment, out: Path | None, tell: Tell, progress: Count) -> Path:
    """Compile what `config` needs and return its folder: `out`, or the cache's entry. Needs no Neuron core, only the SDK.

    `tell` is given the list of graphs before anything is compiled. Raises ConfigError, CheckpointError, CompileError.
    """
    with aside(out) if out is not None else nullcontext() as partial:
        found = _compile(config, partial, tell, progress)
    return out or found


def _compile(config: Deployment, out: Path | None, tell: Tell, progress: Count) -> Path:
    from rayneuron import loading
    from rayneuron.group.ahead import stage_folder

    checked, stages = loading.check(config), config.pipeline_parallel
    for stage in range(stages):
        if stages > 1:
            tell(f"stage {stage} of {stages}:")
        found = _compile_stage(checked, stage, tell, progress)
        if out is not None:
            shutil.copytree(found, stage_folder(out, stage, stages), dirs_exist_ok=True)
    return found if stages == 1 else found.parent


def _compile_stage(checked: Checked, stage: int, tell: Tell, progress: Count) -> Path:
    """The cache's entry of one stage."""
    from rayneuron import devices, loading, models, settings
    from rayneuron.engine.buckets import inventory
    from rayneuron.group.ahead import ahead
    from rayneuron.models.memory import kv_shape

    config, arch, capacity = checked.config, checked.arch, checked.capacity
    made = ahead(config, capacity.length, 0, checked.layout.nodes_per_stage, stage, arch.hidden, checked.raw)
    made = replace(made, artifact=None, required=False)
    threads = config.threads or settings.threads()
    device: Any = devices.open(
        config.device, ahead=made, dtype=checked.dtype, kv_dtype=models.kv_type(config.kv_dtype), threads=threads
    )  # fmt: skip
    try:
        weights = loading.rank_weights(checked, replace(made, local_ranks=1), _silent, stage)
        device.load(weights, kv_shape(arch, capacity.space, device.comm.ranks, len(weights["layers"])))
        program = loading.program(config, arch, checked.dtype, stage)
        return devices.precompile(device, program, inventory(capacity), tell, lambda done, total, shape: progress(done, total))
    finally:
        device.close()


def _silent(stage: str, done: int, total: int) -> None:
    return None
