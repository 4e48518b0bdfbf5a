"""What a deployment's `compile` section and a worker's place in its stage say to a device that is compiled ahead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rayneuron.config import Deployment
from rayneuron.devices import Ahead
from rayneuron.devices.neuron.releases import CompilerOptions
from rayneuron.placement import instances
from rayneuron.placement.memory import float8

DECLARED = "declared"  # the family of `instance: cores:N`, which is no chip


def ahead(
    config: Deployment, length: int, worker: int = 0, workers: int = 1, stage: int = 0, hidden: int = 0,
    raw: Mapping[str, Any] = MappingProxyType({}),
) -> Ahead:  # fmt: skip
    """For the `worker`-th of the `workers` processes that share the ranks of a stage evenly.

    `length`: the longest context; `hidden`: the size of what passes between stages; `raw`: config.json.
    """
    said, stages = config.compile, config.pipeline_parallel
    known = instances.instance(config.instance) if config.instance else None
    local = config.tensor_parallel // workers
    artifact = Path(said.artifact) if said.artifact else None
    return Ahead(
        ranks=config.tensor_parallel,
        start_rank=worker * local,
        local_ranks=local,
        length=length,
        chip=known.family if known is not None and known.family != DECLARED else None,
        lnc=known.lnc if known is not None and len(known.lncs) > 1 else None,
        cache=said.cache,
        required=said.required,
        artifact=stage_folder(artifact, stage, stages) if artifact is not None else None,
        async_mode=said.async_mode,
        first=stage == 0,
        last=stage == stages - 1,
        hidden=hidden,
        options=CompilerOptions(
            said.optimization, said.tiling, said.mixed_accumulation, said.flags, said.workers, said.reduce_dtype
        ),
        float8=float8(config, raw),
        model=config.model.served_name,
    )


def stage_folder(folder: Path, stage: int, stages: int) -> Path:
    """Where the graphs of one stage lie in what `rayneuron compile --out` writes."""
    return folder if stages == 1 else folder / f"stage{stage}"
