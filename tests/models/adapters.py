"""Adapters as PEFT writes them, made by hand, and transformers' logits with them merged into the weights by hand."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rayneuron import models
from rayneuron.engine.shelf import Resident
from rayneuron.models import adaptable, adapted, hub, lora, weights
from rayneuron.models.kv import Places
from tests.models.runs import Runner

APART = ("lm_head", "embed_out", "project_in", "project_out", "router", "gate", "shared_expert_gate", "layer")  # of routers and the top
SLOTS, RANK = 3, 8


def products(base: Any) -> list[str]:
    """The modules that may be adapted of a model, or a directory, by name, from transformers' own modules."""
    model = load(base) if isinstance(base, Path) else base
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)]
    return [n for n in linear if n.rsplit(".", 1)[-1] not in APART and ".experts" not in n]


def load(path: Path) -> Any:
    return tf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def write(folder: Path, base: Path, modules: list[str] | None = None, r: int = 4, seed: int = 0, size: float = 0.3, **said: Any) -> Path:
    """A random adapter of `modules`, default: all there may be. `said`: more of its config."""
    model, generator, tensors = load(base), torch.Generator().manual_seed(seed), {}
    chosen = products(model) if modules is None else modules
    targets = chosen if modules else sorted({n.rsplit(".", 1)[-1] for n in chosen})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": 6, "bias": "none", "init_lora_weights": True,
        "target_modules": targets, "fan_in_fan_out": False, "lora_dropout": 0.1,
    } | said  # fmt: skip
    for name in chosen:
        module = model.get_submodule(name)
        out, inside = tuple(module.weight.shape)[:: -1 if isinstance(module, Conv1D) else 1]
        rank, _ = scale(config, name)
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inside, generator=generator) * size
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * size
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def scale(config: dict[str, Any], name: str) -> tuple[int, float]:
    """Rank and scale of a module, patterns as suffixes at a dot."""

    def of(pattern: str, default: Any) -> Any:
        found = [value for key, value in (config.get(pattern) or {}).items() if name == key or name.endswith("." + key)]
        return found[0] if found else default

    rank, alpha = of("rank_pattern", config["r"]), of("alpha_pattern", config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def merged(base: Path, adapter: Path, ids: Tensor) -> Tensor:
    """transformers' logits of ids with W + scale B A."""
    model, tensors = load(base), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    with torch.no_grad():
        for key in [k for k in tensors if k.endswith("lora_A.weight")]:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            module = model.get_submodule(name)
            delta = scale(config, name)[1] * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
            module.weight += delta.T if isinstance(module, Conv1D) else delta
        return model(ids.long(), use_cache=False).logits


@dataclass
class Adapted(Runner):
    """A rank whose rows have adapters: `own` is the slot of each."""

    own: Tensor = field(default_factory=lambda: torch.full((3,), -1, dtype=torch.int32))

    def places(self, positions: Tensor, rows: Tensor, length: int) -> Places:
        return replace(super().places(positions, rows, length), adapters=self.own[: len(rows)])


def cut(path: Path, runner: Runner, folders: list[Path], dtype: torch.dtype = torch.float32) -> list[list[adapted.Pairs]]:
    """Some adapters, as a rank of a model holds them."""
    modules = adaptable.modules_of(runner.arch, models.family(hub.read_config(path)))
    how = weights.cut_for(runner.arch, runner.comm.rank, runner.comm.ranks)
    read = [lora.read(folder, runner.arch, modules, max_rank=RANK) for folder in folders]
    return [list(lora.cut(each, how, range(runner.arch.layers), dtype)) for each in read]


def reside(path: Path, held: dict[str, Any]) -> None:
    """Give a rank alone two adapters among its weights, which may be those of a stage."""
    arch = models.architecture(raw := hub.read_config(path))
    layers = range(held.get("first", 0), held.get("first", 0) + len(held["layers"]))
    how = weights.cut_for(arch, 0, 1)
    shelf = Resident([held], arch, adaptable.modules_of(arch, models.family(raw)), [how], layers, torch.float32, slots=SLOTS, rank=RANK)
    for slot in range(2):
        shelf.fill(str(write(path / f"adapter{slot}", path, r=3 + slot, seed=slot)))


def sizes(path: Path, runner: Runner) -> list[dict[str, tuple[int, int]]]:
    """What `lora.sizes` says of a rank of a model."""
    how = weights.cut_for(runner.arch, runner.comm.rank, runner.comm.ranks)
    modules = adaptable.modules_of(runner.arch, models.family(hub.read_config(path)))
    return lora.sizes(modules, how, range(runner.arch.layers))


def with_tables(path: Path, runner: Runner, folders: list[Path], own: list[int]) -> Adapted:
    """A rank with torch's products, and adapters in the first of its slots; own: those of rows 2, 0 and the idle one."""
    room = zip(runner.weights["layers"], sizes(path, runner), strict=True)
    layers = [adapted.tables(w, each, SLOTS, RANK, torch.float32) for w, each in room]
    for slot, made in enumerate(cut(path, runner, folders)):
        adapted.put(layers, slot, RANK, made)
    held = {**runner.weights, "layers": layers, "lora_rank": RANK}
    return Adapted(runner.arch, held, runner.kv, runner.comm, runner.ops, torch.tensor(own, dtype=torch.int32))
