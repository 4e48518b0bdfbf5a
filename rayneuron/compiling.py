"""`rayneuron compile`: everything a deployment compiles ahead, listed, built into the cache, and copied to a folder another node loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rayneuron.aside import aside
from rayneuron.config import Deployment
from rayneuron.models import Progress

if TYPE_CHECKING:
    from rayneuron.group.opening import Runnable

Tell = Callable[[str], None]


def compile_ahead(config: Deployment, out: Path | None, tell: Tell, progress: Progress) -> Path:
    """Compile what `config` needs and return its folder: `out`, or the cache's entry. Needs no Neuron core, only the SDK.

    `tell` is given the list of graphs before anything is compiled. Raises ConfigError, CheckpointError, CompileError.
    """
    with aside(out) if out is not None else nullcontext() as partial:
        found = _compile(config, partial, tell, progress)
    return out or found


def _compile(config: Deployment, out: Path | None, tell: Tell, progress: Progress) -> Path:
    from rayneuron import loading
    from rayneuron.group.ahead import stage_folder

    (model, fitted), stages = loading.check(config, opens=False), config.pipeline_parallel
    for stage in range(stages):
        if stages > 1:
            tell(f"stage {stage} of {stages}:")
        found = _compile_stage(model, stage, fitted.layout.nodes_per_stage, tell, progress)
        if out is not None:
            shutil.copytree(found, stage_folder(out, stage, stages), dirs_exist_ok=True)
    return found if stages == 1 else found.parent


def _compile_stage(model: Runnable, stage: int, nodes: int, tell: Tell, progress: Progress) -> Path:
    """The cache's entry of one stage, whose ranks lie on so many nodes."""
    from rayneuron import devices, settings
    from rayneuron.engine.buckets import inventory
    from rayneuron.group.opening import open_rank

    threads = model.config.threads or settings.threads()  # nothing else runs here
    with closing(open_rank(model, threads, lambda done, total: None, stage=stage, workers=nodes, compiling=True)) as runner:
        return devices.precompile(model.config.device, runner.device, runner.program, inventory(model.capacity), tell, progress)
