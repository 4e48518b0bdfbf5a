"""What a deployment's `compile` section and a worker's place in its stage say to a device that is compiled ahead."""

from __future__ import annotations

from pathlib import Path

from rayneuron.config import Deployment
from rayneuron.devices import Ahead
from rayneuron.devices.neuron_sdk import CompilerOptions


def ahead(config: Deployment, length: int, worker: int = 0, workers: int = 1) -> Ahead:
    """For the `worker`-th of the `workers` processes that share the ranks of a stage evenly. `length`: the longest context."""
    said = config.compile
    local = config.tensor_parallel // workers
    return Ahead(
        ranks=config.tensor_parallel,
        start_rank=worker * local,
        local_ranks=local,
        length=length,
        cache=said.cache,
        required=said.required,
        artifact=Path(said.artifact) if said.artifact else None,
        async_mode=said.async_mode,
        options=CompilerOptions(said.optimization, said.tiling, said.mixed_accumulation, said.flags),
    )
