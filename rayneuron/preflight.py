"""What can be refused before a weight is read or a process started: a deployment against its device, model directory and this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayneuron import devices, keys, models, settings, sources
from rayneuron.api import body, openai
from rayneuron.api.call import Context
from rayneuron.config import Deployment
from rayneuron.deployment_file import DeploymentFile
from rayneuron.devices.neuron.releases import parse_visible
from rayneuron.engine.buckets import Capacity
from rayneuron.errors import CheckpointError, ConfigError, RayNeuronError
from rayneuron.group_config import prefill_of
from rayneuron.models import adapter_config, safe_header
from rayneuron.models.adaptable import modules_of
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import generation_config, read_config, read_json
from rayneuron.placement import cores, hosting
from rayneuron.placement.fitting import Wanted, capacity_of, check_memory, check_together, graphs_of, own_length, stage_memory
from rayneuron.placement.layout import Layout, counted, group_layout, partition
from rayneuron.placement.memory import Memory
from rayneuron.sources.drafts import DraftModel, draft_model
from rayneuron.text import text

log = logging.getLogger(__name__)

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
CUT = "rayneuron_shards.json"  # written by `rayneuron shard`


@dataclass(frozen=True, slots=True)
class Fitted:
    """A deployment and the model it can run: `generation` is generation_config.json."""

    generation: dict[str, Any]
    arch: Arch
    capacity: Capacity
    layout: Layout


class _NoWords:
    """Stands for a tokenizer that is not read yet: what needs its ids is for the replica to check."""

    def bad_words_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return ()


def inspect_file(file: DeploymentFile) -> list[str]:
    """`inspect` for every application of a file; what is wrong is said with its line. Returns what this machine cannot judge."""
    notes = []
    for name, deployment in (*file.deployments.items(), *file.hosted.items()):
        try:
            notes += [f"{name}: {note}" for note in inspect(deployment)]
        except RayNeuronError as wrong:
            raise file.located(name, wrong) from None
    able = any(devices.installed(one.device) for one in (*file.deployments.values(), *file.hosted.values()))
    for name, gateway in file.gateways.items():
        try:
            if able:  # else it is another machine that has them
                keys.by_account(gateway.key_sources)
            if gateway.host is not None:
                hosting.check(gateway.host.instance, gateway.host.nodes, hosting.wanted_of(gateway))
        except RayNeuronError as wrong:
            raise file.located(name, wrong) from None
    check_runtime_env(file)
    return notes


def ask_hubs(file: DeploymentFile) -> None:
    """Raise what fetching would of every model that a hub has to give, as far as it can say, with its line."""
    for name, deployment in (*file.deployments.items(), *file.hosted.items()):
        for key, source in sources.all_of(deployment).items() if devices.installed(deployment.device) else ():
            try:  # else its nodes fetch it, and may reach what this machine does not
                with sources.named(key):
                    sources.ask(source, deployment.model.allow_pickle)
            except RayNeuronError as wrong:
                raise file.located(name, wrong) from None


def check_runtime_env(file: DeploymentFile) -> None:
    """Refuse a deployment file whose runtime_env chooses cores by hand. Raises ConfigError."""
    for entry in file.content["applications"]:
        name = entry.get("name", "default")
        own = [(f"application {name}", entry.get("runtime_env"))]
        for deployment in entry.get("deployments") or ():
            options = deployment.get("ray_actor_options") or {}
            own.append((f"deployment {deployment.get('name')} of application {name}", options.get("runtime_env")))
        for where, found in own:
            cores.refuse_hand_set((found or {}).get("env_vars") or {}, f"{file.path}: runtime_env of {where}")


def inspect(config: Deployment, able: bool | None = None) -> list[str]:
    """Everything a replica would refuse. Returns what cannot be judged here.

    `able`: whether this machine could hold a replica; on one that could not, an absent model or key is only noted. None: where the
    device's software is. Raises ConfigError, CheckpointError.
    """
    devices.check_name(config.device)
    _check_device_keys(config)
    group_layout(config, devices.ranks_per_process(config.device))
    able = devices.installed(config.device) if able is None else able
    path = _directory(config, able)
    try:
        _check_model(config, path)
    except CheckpointError as wrong:
        raise CheckpointError(wrong.message, param=wrong.param or "model.path") from None
    if config.pools is not None:
        _check_prefill(config, path)
    absent = _absent(config, able)
    if able:
        keys.read(config.serving.api_keys or ())
        check_adapters(config)
        return absent
    return [f"no replica can run on this machine, which has nothing for device {config.device}", *absent]


def _check_prefill(config: Deployment, path: Path | None) -> None:
    try:
        there = prefill_of(config)
        for pool in (config, there):
            layout = group_layout(pool, devices.ranks_per_process(pool.device))
            if devices.stages_kv(pool.device) and (len(layout.workers) > 1 or pool.shard_over_sequence):
                said = "KV of this device is copied through the host's memory by one process that drives all ranks, which hold whole heads"
                raise ConfigError(f"{said}; leave nodes, pipeline_parallel and shard_over_sequence out, or pools")
        group_layout(there, devices.ranks_per_process(there.device))
        _check_model(there, path)
    except (ConfigError, CheckpointError) as wrong:
        raise type(wrong)(f"the prefill pool: {wrong.message}", param="pools.prefill") from None


def _check_model(config: Deployment, path: Path | None) -> None:
    raw = read_config(path) if path is not None else config.model.config
    if raw is None:
        return
    fitted = fit(config, raw, path)
    if path is not None:
        _check_weights(path, config.model.allow_pickle)
        _check_words(config, path)
    check_defaults(config, fitted, path)


def fit(config: Deployment, raw: Mapping[str, Any], path: Path | None = None) -> Fitted:
    """Hold a deployment against a config.json. Raises ConfigError or CheckpointError with what to write instead."""
    layout = group_layout(config, devices.ranks_per_process(config.device))
    capacity = capacity_of(config, raw)
    if config.max_model_len is None and (own := own_length(raw)) > capacity.length:
        log.info("max_model_len defaults to %d; the model can do %d: set max_model_len to use more", capacity.length, own)
    graphs_of(config, capacity)
    arch = models.check(dict(raw), tp=config.tensor_parallel, max_model_len=capacity.length, **config.model_options())
    partition(arch.layers, config.pipeline_parallel)
    if config.lora is not None:
        modules_of(arch, models.family(dict(raw)), config.lora.target_modules)
    draft = None if path is None else draft_model(config, path, arch, capacity.length, sources.located)
    _check_memory(config, raw, layout, capacity, draft)
    return Fitted(generation_config(path) if path is not None else {}, arch, capacity, layout)


def check_defaults(config: Deployment, fitted: Fitted, path: Path | None = None) -> None:
    """Refuse defaults with which no request could be answered. Raises ConfigError."""
    if (name := openai.reserved(config.serving.default_chat_template_kwargs)) is not None:
        key = f"serving.default_chat_template_kwargs.{name}"
        raise ConfigError(f"{key} is not for the template; leave it out", param=key)
    said = config.sampling_defaults
    try:
        defaults = body.sampling_defaults(fitted.generation, said)
        context = Context(config.model.served_names, _NoWords(), fitted.capacity.length, fitted.arch.vocab, defaults)  # type: ignore[arg-type]
        body.check_defaults(context)
    except ConfigError as wrong:
        if said and (wrong.param in said or wrong.param is None):
            key = f"sampling_defaults.{wrong.param}" if wrong.param else "sampling_defaults"
            raise ConfigError(f"{key}: {wrong.message.removeprefix('sampling defaults: ')}", param=key) from None
        file = path / "generation_config.json" if path is not None else "generation_config.json"
        raise ConfigError(f"{file}: {wrong.message}; write another value under sampling_defaults", param="model.path") from None


def check_adapters(config: Deployment) -> None:
    """Refuse adapters of the file that could not be read, by their keys. Raises CheckpointError."""
    for name, folder in config.lora.modules.items() if config.lora is not None else ():
        with sources.named(f"{sources.ADAPTERS}.{name}"):
            adapter_config.read_config(Path(folder))


def _absent(config: Deployment, able: bool) -> list[str]:
    """What is not on this machine yet, and need not be. Raises ConfigError for what could be nowhere, where this one is `able`."""
    notes = []
    for key, source in sources.all_of(config).items():
        try:
            with sources.named(key):
                here = sources.located(source) is not None
        except ConfigError:
            if able:
                raise
            here = False
        if not here and not (able and source.startswith("demo:")):
            said = source if key == sources.PATH else f"{key} {source}"
            notes.append(f"{said} is not here yet, so it was not looked at")
    folders = {"serving.weights_directory": config.serving.weights_directory, "lora.directory": config.lora and config.lora.directory}
    notes += [f"{key} {folder} is not here yet" for key, folder in folders.items() if able and folder and not Path(folder).is_dir()]
    return notes


def _check_device_keys(config: Deployment) -> None:
    for key in devices.unheard(config.device):
        if getattr(config.compile, key) != type(config.compile).model_fields[key].default:
            raise ConfigError(f"compile.{key} means nothing on device {config.device}; leave it out", param=f"compile.{key}")
    if counted(config) is not None and (visible := settings.visible_cores()) is not None:
        parse_visible(visible)


def _directory(config: Deployment, able: bool) -> Path | None:
    """The model directory, None where it is not there yet and need not be."""
    try:
        with sources.named(sources.PATH):
            return sources.located(config.model.source)
    except ConfigError:
        if able:
            raise
        return None


def _check_words(config: Deployment, path: Path) -> None:
    said = config.model
    if said.skip_tokenizer_init:
        return
    with sources.named(sources.TOKENIZER):
        words = sources.located(said.tokenizer) if said.tokenizer is not None else path
    if words is None:
        return
    try:
        text.check(words, said.chat_template)
    except (CheckpointError, OSError) as wrong:
        raise CheckpointError(str(wrong), param="model.tokenizer" if said.tokenizer else "model.path") from None
    except ConfigError as wrong:
        within = "model." if wrong.param == "chat_template" else ""
        raise ConfigError(f"{within}{wrong.message}", param=f"{within}{wrong.param}" if wrong.param else None) from None


def _check_memory(config: Deployment, raw: Mapping[str, Any], layout: Layout, capacity: Capacity, draft: DraftModel | None) -> None:
    wanted, instance = Wanted(config, raw, draft=None if draft is None else draft.counted), counted(config)
    if instance is not None:
        check_memory(wanted, layout, capacity, instance)
    elif devices.ranks_per_process(config.device) == 1:  # ranks of one machine share its memory; only what is held for certain counts
        held = stage_memory(wanted, capacity, config.tensor_parallel, config.pipeline_parallel)
        certain = [Memory(one.weights, one.kv, 0, 0) for one in held for _ in range(config.tensor_parallel)]
        check_together(certain, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _check_weights(path: Path, allow_pickle: bool) -> None:
    """Weight files are there, and as long as they say. Raises CheckpointError."""
    if (path / CUT).is_file():
        return
    if (path / INDEX).is_file():
        named = read_json(path / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
            raise CheckpointError(f"{path / INDEX} has no weight_map of tensor names to files; download it again")
        files = [path / name for name in sorted(set(named.values()))]
    elif (path / WHOLE).is_file():
        files = [path / WHOLE]
    elif any((path / name).is_file() for name in PICKLES):
        if allow_pickle:
            return
        raise CheckpointError(f"{path} holds weights as .bin files only; write model.allow_pickle: true, or convert them to safetensors")
    else:
        raise CheckpointError(f"{path} holds neither {WHOLE} nor {INDEX}; name a directory with weights", param="model.path")
    for file in files:
        safe_header.read(file)
