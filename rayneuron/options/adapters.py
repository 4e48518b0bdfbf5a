"""Words of adapters: NxD Inference's LoraServingConfig, and LMI's folder of them, as `lora` here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rayneuron.errors import ConfigError
from rayneuron.options.shared import OFF
from rayneuron.options.words import Args, Said, Table, Translation, Word, flag, literal, tell, whole

MODULES: Final = "lora.lora_modules"
FOLDER: Final = "adapters"  # LMI's, beside serving.properties
_FIXED = "adapters lie in the device from the start on; write all in lora_ckpt_paths, or on device cpu lora.allow_runtime_updating"
_FORM = "directories as PEFT writes them, with safetensors; NxD's single files are not read"
_MERGE = "adapters with biases are not served; merge the adapter into the weights"


def _paths(value: Any, args: Args | None = None) -> dict[str, str]:
    """lora_ckpt_paths: a mapping, or a list of `id : path`."""
    found = literal(value)
    if isinstance(found, Mapping):
        return {str(name): str(path) for name, path in found.items()}
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) and ":" in each for each in found):
        raise ValueError(f"must be {{id: directory}} or a list of 'id : directory', got {value!r:.80}")
    pairs = [[part.strip() for part in each.split(":", 1)] for each in found]
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError(f"names one adapter twice: {value!r:.80}")
    return {name: path for name, path in pairs}


def _from_json(value: Any, args: Args | None = None) -> dict[str, str]:
    """lora_ckpt_json: a file with paths below a directory."""
    try:
        said = json.loads(Path(value).expanduser().read_text("utf-8"))
        root = Path(said.get("lora-ckpt-dir", "."))
        if said.get("lora-ckpt-paths-cpu") and args is not None and args.get("dynamic_multi_lora") not in OFF:
            raise ValueError(f"{value} has lora-ckpt-paths-cpu, and {_FIXED}")
        return {str(name): str(root / path) for name, path in said["lora-ckpt-paths"].items()}
    except (OSError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as wrong:
        raise ValueError(f"{value} cannot be read as an object with lora-ckpt-paths: {wrong}") from None


def _all(args: Args) -> dict[str, str]:
    """Both ways to name them, as NxD joins them."""
    found = {} if args.get("lora_ckpt_json") in OFF else _from_json(args["lora_ckpt_json"], args)
    named = {} if args.get("lora_ckpt_paths") in OFF else _paths(args["lora_ckpt_paths"])
    if twice := found.keys() & named.keys():
        raise ValueError(f"names the adapter {min(twice)!r} both in lora_ckpt_json and in lora_ckpt_paths")
    return {**found, **named}


def _slots(value: Any, args: Args) -> int:
    """NxD raises it to the number of checkpoints."""
    return max(whole(value), len(_all(args)))


def _targets(value: Any, args: Args) -> list[str]:
    found = literal(value)
    if not isinstance(found, list | tuple | set) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"must be a list of names of modules here, as [q_proj, v_proj], got {value!r:.80}")
    return sorted(found) if isinstance(found, set) else list(found)


def words_of(value: Any) -> dict[str, Any]:
    """Those of a LoraServingConfig, as an object or as the mapping it is written as."""
    config = literal(value)
    return dict(config) if isinstance(config, Mapping) else dict(vars(config))


def serving(value: Any, args: Args) -> Said:
    """A LoraServingConfig."""
    told = Translation()
    tell(told, LORA, words_of(value), lambda name: f"lora_config.{name}", "LoraServingConfig")
    return Said({MODULES: {}, **told.assigned})


def beside(folder: Path | None, said: str | None) -> dict[str, str]:
    """The adapters LMI loads at start: folders in `adapters`, or in a place that is `said`. Raises ConfigError where none is there."""
    place = (folder or Path()) / (said or FOLDER)
    found = {each.name: str(each) for each in sorted(place.iterdir()) if each.is_dir()} if place.is_dir() else {}
    if said is not None and not found:
        raise ConfigError(f"adapters: {place} holds no folders with adapters; write where they are, or lora.lora_modules", param=FOLDER)
    return found


def _enabled(value: Any, args: Args) -> Said:
    if literal(args.get("enable_lora")) is not True:
        raise ValueError(f"{value} says where adapters are, and enable_lora is not true; write option.enable_lora=true")
    return Said()


LORA: Final[Table] = {
    "max_loras": Word("lora.max_loras", _slots, (None,), there="1, or as many as there are"),
    "max_lora_rank": Word("lora.max_lora_rank", whole, (None,), note="a larger one of an adapter is an error", there="16"),
    "max_cpu_loras": Word(note="it counts with dynamic_multi_lora", there="100"),
    "batch_size": Word(note="rows are max_num_seqs", there="1"),
    "target_modules": Word("lora.target_modules", _targets, (None,), note="an adapter of others is refused", there="the adapters' own"),
    "lora_bias": Word(refused=_MERGE, same=("none", None), there="none"),
    "lora_ckpt_paths": Word(MODULES, lambda value, args: _all(args), OFF, note=_FORM),
    "lora_ckpt_paths_cpu": Word(refused=_FIXED, same=({}, [], *OFF)),
    "lora_ckpt_json": Word(MODULES, lambda value, args: _all(args), OFF, note=_FORM),
    "lora_memory_transpose": Word(note="how a table lies is the compiler's to say", there="true"),
    "lora_shard_linear_layer": Word(
        note="of A and B each rank has one whole, the one that ranks do not share; `rayneuron plan` says what they take", there="true"
    ),
    "is_context_encoding": Word(note="each graph knows what it is for", there="false"),
    "dynamic_multi_lora": Word(refused=_FIXED, same=OFF, there="false"),
    "eviction_policy": Word(note="it counts with dynamic_multi_lora", there="lru"),
    "lfu_decay_period": Word(note="it counts with dynamic_multi_lora", there="128"),
    "base_model_quantized": Word(note="quantization says it", there="false"),
    "enable_base_model_only": Word(note="rows without an adapter need no slot", there="false"),
}
LMI: Final[Table] = {
    "enable_lora": Word("lora.enabled", flag, OFF, there="false"),
    "max_loras": Word("lora.max_loras", whole, there="4"),
    "max_lora_rank": Word("lora.max_lora_rank", whole, there="16"),
    "max_cpu_loras": Word("lora.max_cpu_loras", whole),
    "adapters": Word(MODULES, _enabled, OFF, note="each folder in it is one, by its name", there="adapters, beside the file"),
}
