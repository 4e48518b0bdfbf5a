"""adapter_config.json of a LoRA adapter as PEFT writes it: what is added where, and what is not served; no torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayneuron.errors import CheckpointError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MERGE = "merge the adapter into the weights instead (merge_and_unload)"
# Of adapter_config.json: what changes more than a product by B (A x), and why it is not served.
REFUSED = {
    "use_dora": "DoRA scales the base's own weights", "use_qalora": "QALoRA pools the input", "use_bdlora": "BD-LoRA is blockwise",
    "lora_bias": "it has biases of its own", "modules_to_save": "it brings whole modules (embeddings, head)",
    "layer_replication": "it repeats layers of the base", "alora_invocation_tokens": "an aLoRA begins within a prompt",
    "target_parameters": "it adapts single parameters, as experts are", "trainable_token_indices": "it changes embeddings",
    "arrow_config": "it routes between adapters",
}  # fmt: skip
CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # inits that move the base's own weights
READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "bias"),
    *("layers_to_transform", "init_lora_weights", "base_model_name_or_path"),
}
TRAINING = {  # what says how it was trained, or where it came from, and nothing of what it adds
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out", "layers_pattern"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying"),
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says."""

    path: Path
    rank: int
    alpha: float
    root: bool  # divided by the rank's root, not by the rank
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def of(self, module: str) -> tuple[int, float]:
        """The rank and the scale of one module."""
        rank, alpha = self._first(self.ranks, module, self.rank), self._first(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.root else rank)

    def wants(self, module: str, layer: int) -> bool:
        """Whether `target_modules` and what narrows it mean this module."""
        chosen = self.targets == "all-linear" or self._meant(self.targets, module)
        return chosen and not self._meant(self.excluded, module) and (self.layers is None or layer in self.layers)

    def _meant(self, names: str | tuple[str, ...], module: str) -> bool:
        if isinstance(names, str):
            return self._matches(names, module)
        return any(module == name or module.endswith("." + name) for name in names)

    def _first(self, pattern: Mapping[str, Any], module: str, default: Any) -> Any:
        return next((value for name, value in pattern.items() if self._matches(rf"(.*\.)?({name})", module)), default)

    def _matches(self, pattern: str, module: str) -> bool:
        try:
            return re.fullmatch(pattern, module) is not None
        except re.error as wrong:
            raise CheckpointError(f"{self.path / CONFIG}: {pattern!r} is no regular expression: {wrong}") from None


def read_config(path: Path) -> tuple[AdapterConfig, Any]:
    """adapter_config.json, and a hash that has begun with it. Raises CheckpointError."""
    file = path / CONFIG
    try:
        data = file.read_bytes() if file.stat().st_size <= MAX_CONFIG_BYTES else b""
        raw = json.loads(data)
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_dir():
            write = f"name one that holds {CONFIG} (`hf download org/name` fetches one, and prints where it is)"
            raise CheckpointError(f"{path} is no directory here; {write}") from None
        raise CheckpointError(f"{path} is no adapter: it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as wrong:
        raise CheckpointError(f"{file} cannot be read as JSON: {wrong}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is no JSON object")
    _refuse(file, raw)
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    for name, value in (("r", rank), *ranks.items()):
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{file} sets the rank {name}: {value!r:.60}, where a positive integer is needed")
    for name, value in (("lora_alpha", alpha), *alphas.items()):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not value:
            raise CheckpointError(f"{file} sets {name}: {value!r:.60}, where a number other than 0 is needed")
    targets, excluded = _names(file, raw, "target_modules"), _names(file, raw, "exclude_modules")
    if not targets:
        raise CheckpointError(f"{file} names no target_modules")
    chosen = raw.get("layers_to_transform")
    chosen = [chosen] if type(chosen) is int else chosen or None
    if chosen is not None and not (isinstance(chosen, list) and all(type(i) is int for i in chosen)):
        raise CheckpointError(f"{file} sets layers_to_transform: {chosen!r:.60}, where numbers of layers are needed")
    kept = None if chosen is None else tuple(chosen)
    said = AdapterConfig(path, rank, float(alpha), bool(raw.get("use_rslora")), targets, excluded, kept, ranks, alphas)  # type: ignore[arg-type]
    return said, hashlib.blake2b(data, digest_size=16)


def _refuse(file: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{file} sets peft_type: {raw.get('peft_type')!r:.60}; only LORA is served")
    for name, why in REFUSED.items():
        if raw.get(name):
            raise CheckpointError(f"{file} sets {name}, and {why}, which is not served; {MERGE}")
    if raw.get("bias") not in (None, "none"):
        raise CheckpointError(f"{file} sets bias: {raw['bias']!r:.60}, so it changes the base's biases, which is not served; {MERGE}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGING_INITS):
        said = f"init_lora_weights: {init!r:.60}, which moved the base's weights"
        raise CheckpointError(f"{file} sets {said}; save it with path_initial_model_for_weight_conversion, or {MERGE}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(raw.get(name) or {}, dict):
            raise CheckpointError(f"{file} sets {name}: {raw[name]!r:.60}, where an object is needed")
    for name, value in raw.items():
        if name not in READ | TRAINING | REFUSED.keys() and value not in (None, False, [], {}):
            raise CheckpointError(f"{file} sets {name!r:.60}, which is not known here and may change what the adapter adds; {MERGE}")


def _names(file: Path, raw: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """A regular expression, or names."""
    value = raw.get(key)
    if isinstance(value, str):
        return value
    if not isinstance(value or [], list) or not all(isinstance(name, str) for name in value or ()):
        raise CheckpointError(f"{file} sets {key}: {value!r:.60}, where names or a regular expression are needed")
    return tuple(value or ())
