"""A rank's device with its weights and its step: the one way to open it, alone, as one of a group, or only to compile for it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayneuron import devices, hashing, models, sources
from rayneuron.config import Deployment
from rayneuron.config_features import Lora
from rayneuron.devices.base import Reweighs
from rayneuron.engine import draft_step, head_step
from rayneuron.engine.buckets import Capacity
from rayneuron.engine.neuron_sampling import rule_of
from rayneuron.engine.runner import Runner
from rayneuron.engine.shelf import Resident, Shelf
from rayneuron.engine.swap import Swap
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.group import pipeline
from rayneuron.group.ahead import ahead
from rayneuron.models import Progress, adaptable, head_layers, hub, presharded, weights, words
from rayneuron.models.adaptable import Module
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import read_config
from rayneuron.models.shard import stage_layers
from rayneuron.sources import drafts
from rayneuron.sources.drafts import DraftModel

if TYPE_CHECKING:
    from rayneuron.models.collectives import Collectives


@dataclass(frozen=True, slots=True)
class Runnable:
    """A deployment and the model directory it runs, held against each other. `raw`: config.json; `dtype`: our word of the compute dtype;
    `source`: what gives another node the very same directory."""

    config: Deployment
    path: Path
    raw: dict[str, Any]
    arch: Arch
    capacity: Capacity
    dtype: str
    source: str
    draft: DraftModel | None = None


def open_rank(
    model: Runnable, threads: int, progress: Progress, *, stage: int = 0, worker: int = 0, workers: int = 1,
    comm: Collectives | None = None, compiling: bool = False,
) -> Runner:  # fmt: skip
    """Open the device of the `worker`-th of the `workers` processes that share the ranks of a stage, and load their weights.

    compiling: to compile for it without its cores: one rank stands for all, and nothing is looked for among what is compiled already.
    Raises CheckpointError, ConfigError, CompileError or what the device raises, and nothing is left of it.
    """
    config, dtype = model.config, models.compute_type(model.dtype)
    made = ahead(config, model.capacity.length, worker, workers, stage, model.arch.hidden, model.raw)
    if compiling:
        made = replace(made, artifact=None, required=False)
    program, draft = pipeline.program(model.arch, pipeline.stage_of(config, dtype, stage), rule_of(config)), model.draft
    if draft is not None:
        by = partial(draft_step.step, model.arch, draft.arch) if draft.heads is None else partial(head_step.step, model.arch, draft.heads)
        program = partial(by, rule=rule_of(config))
    with ExitStack() as undo:
        kv_dtype = models.kv_type(config.kv_dtype)
        shared = config.pools is not None
        device = devices.open(config.device, ahead=made, dtype=dtype, kv_dtype=kv_dtype, threads=threads, comm=comm, shared_kv=shared)
        undo.callback(device.close)
        runner = Runner(model.arch, device, model.capacity, program, None if draft is None else draft.heads or draft.arch)
        held = _weights(model, replace(made, local_ranks=1) if compiling else made, stage, progress)
        if draft is not None:
            try:
                for i, one in enumerate(held.get("ranks") or [held]):
                    one["draft"] = _draft_weights(draft, made, i, config)
            except CheckpointError as wrong:
                raise CheckpointError(f"{drafts.KEY} {draft.path}: {wrong.message}", param=drafts.KEY) from None
        if config.lora is not None and config.few_graphs:
            runner.shelf = _resident(model, config.lora, held, made, stage, compiling)
        runner.load(held)
        if config.lora is not None and runner.shelf is None:
            (modules, layers), how = _adaptable(model, config.lora, stage), weights.cut_for(model.arch, made.start_rank, made.ranks)
            room = {"slots": config.lora.slots(), "rank": config.lora.max_lora_rank}
            runner.shelf = Shelf(device, model.arch, modules, how, layers, dtype, **room)
        if isinstance(device, Reweighs):
            named = lambda path: hashing.fingerprint(_alike(model, path).path)  # noqa: E731
            runner.swap = Swap(device, named, lambda path, progress: _weights(_alike(model, path), made, stage, progress))
        undo.pop_all()
    return runner


def _adaptable(model: Runnable, lora: Lora, stage: int) -> tuple[dict[str, Module], range]:
    """What adapters may have of a model, and the layers of a stage."""
    modules = adaptable.modules_of(model.arch, models.family(model.raw), lora.target_modules)
    return modules, stage_layers(model.arch.layers, stage, model.config.pipeline_parallel)


def _resident(model: Runnable, lora: Lora, held: dict[str, Any], made: devices.Ahead, stage: int, compiling: bool) -> Resident:
    """The adapters of the file in the weights of all local ranks; to compile for them, room alone. Raises CheckpointError by name."""
    ranks, (modules, layers) = held.get("ranks") or [held], _adaptable(model, lora, stage)
    hows = [weights.cut_for(model.arch, made.start_rank + i, made.ranks) for i in range(len(ranks))]
    room = {"slots": lora.slots(resident=True), "rank": lora.max_lora_rank}
    shelf = Resident(ranks, model.arch, modules, hows, layers, models.compute_type(model.dtype), **room)
    for name, path in () if compiling else lora.modules.items():
        with sources.named(f"{sources.ADAPTERS}.{name}"):
            shelf.fill(path)
    shelf.filled()
    return shelf


def _alike(model: Runnable, path: Path) -> Runnable:
    """The same deployment on the weights of another directory. Raises CheckpointError where they are another model's."""
    config, raw = model.config, read_config(path)
    try:
        arch = models.check(raw, tp=config.tensor_parallel, max_model_len=model.capacity.length, **config.model_options())
        dtype = words.compute(config.dtype, raw)
    except ConfigError as wrong:
        raise CheckpointError(f"{path}: {wrong.message}") from None
    other = [field.name for field in fields(arch) if getattr(arch, field.name) != getattr(model.arch, field.name)]
    if other or dtype != model.dtype:
        said = ", ".join([*other, *(["dtype"] if dtype != model.dtype else [])])
        raise CheckpointError(f"{path} is another model than the one that is served: it has another {said}; start a replica of it")
    return replace(model, path=path, raw=raw, arch=arch, source=str(path))


def _draft_weights(draft: DraftModel, made: devices.Ahead, local: int, config: Deployment) -> dict[str, Any]:
    """What drafts, cut as the model's own are for the `local`-th rank of this process."""
    kind, rank = models.compute_type(draft.dtype), made.start_rank + local
    if draft.heads is not None:
        held = hub.Checkpoint(draft.path, config.model.allow_pickle)
        found, said = head_layers.load(draft.heads, held, dtype=kind, rank=rank, ranks=made.ranks), config.speculative_config
        return {**found, "layers": found["layers"][: said.num_speculative_tokens if said else 0]}  # heads beyond those draft nothing
    return presharded.open_weights(
        draft.path, draft.raw, draft.arch, dtype=kind, rank=rank, ranks=made.ranks,
        fused=config.fused_qkv, quantization=draft.quantization, allow_pickle=config.model.allow_pickle,
    )  # fmt: skip


def _weights(model: Runnable, made: devices.Ahead, stage: int, progress: Progress) -> dict[str, Any]:
    """Weights of the ranks this process drives: those of the first, and under "ranks" all of them where there are several."""
    config, local = model.config, made.local_ranks or made.ranks
    loaded = [
        presharded.open_weights(
            model.path,
            model.raw,
            model.arch,
            dtype=models.compute_type(model.dtype),
            rank=made.start_rank + i,
            ranks=made.ranks,
            fused=config.fused_qkv,
            quantization=config.quantization,
            allow_pickle=config.model.allow_pickle,
            stage=stage,
            stages=config.pipeline_parallel,
            progress=lambda done, total, i=i: progress(i * total + done, local * total),  # type: ignore[misc]
        )
        for i in range(local)
    ]
    return loaded[0] if local == 1 else {**loaded[0], "ranks": loaded}
