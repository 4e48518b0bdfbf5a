"""config.json and the files beside it: read, with what is missing or unsupported named; no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models.defaults import FIELDS, SECTIONS, SPELLINGS, Maybe

log = logging.getLogger(__name__)


LARGEST = 2**31 - 1
LEAST = {  # of numbers that may be less than 1: "off", "none", "the last"
    ("sliding_window", "qwen2_moe"): 0, ("sliding_window_pattern", "exaone4"): 0, ("first_k_dense_replace", "glm4_moe"): 0,
    ("num_mtp_layers", "glm4_moe"): 0,
    ("moe_layer_start_index", "ernie4_5_moe"): 0, ("moe_layer_end_index", "ernie4_5_moe"): -1,
    ("moe_num_shared_experts", "ernie4_5_moe"): 0,
    **{("max_window_layers", kind): 0 for kind in FIELDS},
}  # fmt: skip
DTYPES = ("float64", "float32", "bfloat16", "float16")
WORDS = {int: "an integer", float: "a number with a point", bool: "true or false", str: "a string", dict: "an object", list: "a list"}


def complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with every key of its model type, which must be a known one, in the spelling of that type.

    Absent is the class default of transformers; null is "none" or "derived" where the type allows it, else refused, as transformers does.
    Raises CheckpointError naming a key that is missing or of a wrong type.
    """
    kind = raw["model_type"]
    if raw.get("per_layer_config") is not None:
        raise CheckpointError("config.json sets per_layer_config, which is not supported; the layers of a model are alike here")
    if not isinstance(raw.get("quantization_config") or {}, dict):
        raise CheckpointError(f"config.json sets quantization_config: {_short(raw['quantization_config'])}, where an object is needed")
    dtype_of(raw)
    out, spelled = dict(raw), SPELLINGS.get(kind, {})
    for other in spelled.keys() & raw.keys():
        own, value = spelled[other], raw[other]
        if (other == "n_embed" and value is None) or type(raw.get(own, 0)) is not int:
            continue  # the other is no number, and refused below
        if own in raw and raw[own] != value:
            log.warning("config.json says %s: %r and %s: %r, two spellings of one thing; %s counts", own, raw[own], other, value, other)
        out[own] = value
    return _filled(out, FIELDS[kind], kind)


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object within config.json, completed alike."""
    return _filled(dict(config[name]), SECTIONS[name], config["model_type"], name + ".")


def _filled(out: dict[str, Any], fields: Mapping[str, Any], kind: str, prefix: str = "") -> dict[str, Any]:
    for name, default in fields.items():
        needed, maybe = isinstance(default, type), isinstance(default, Maybe)
        if name not in out and needed:
            raise CheckpointError(f"config.json of a {kind} model lacks {name!r}")
        if name not in out:
            out[name] = default.default if maybe else default
        elif out[name] is not None or not maybe or not default.null:
            of_type(out[name], default if needed else default.kind if maybe else type(default), prefix + name, kind)
    return out


def of_type(value: Any, kind: type | tuple[type, ...], name: str, model_type: str) -> None:
    """Raise CheckpointError unless `value` is exactly of one of `kind`, and if a number, one that a model can have."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        wanted = " or ".join(WORDS[k] for k in kinds)
        raise CheckpointError(f"config.json sets {name}: {_short(value)}, but {name} of a {model_type} model is {wanted}")
    if type(value) is int and not LEAST.get((name, model_type), 1) <= value <= LARGEST:
        raise CheckpointError(f"config.json sets {name}: {_short(value)}, which no {model_type} model can have")
    if type(value) is float and not 0 <= value < inf:
        raise CheckpointError(f"config.json sets {name}: {value!r}, which no {model_type} model can have")


def _short(value: Any) -> str:
    """A value of config.json in an error: as JSON writes it, and not all of it."""
    text = json.dumps(value) if not isinstance(value, int) or abs(value) <= LARGEST**2 else "a number of many digits"
    return text if len(text) <= 60 else text[:60] + "..."


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype the weights are stored in, in either spelling; float32 where config.json says none. Raises CheckpointError."""
    name = config.get("dtype") if config.get("dtype") is not None else config.get("torch_dtype")
    found = "float32" if name is None else str(name).removeprefix("torch.")
    if found not in DTYPES:
        raise CheckpointError(f"config.json sets dtype: {_short(name)}, which is not supported; supported: {', '.join(DTYPES)}")
    return found


def head_size(hidden: int, heads: int) -> int:
    """The size of a head where the heads share the hidden size; `models.check` refuses what does not divide."""
    return hidden // heads


def refuse(config: Mapping[str, Any], **settings: Any) -> None:
    """Raise CheckpointError where config.json has one of these values, which nothing here computes."""
    for name, value in settings.items():
        if config.get(name) == value:
            raise CheckpointError(f"config.json sets {name}: {value!r}, which is not supported for {config.get('model_type')} models")


def read_json(path: Path, kind: type = dict) -> Any:
    """JSON of a kind. Raises CheckpointError naming the file."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (ValueError, OSError, RecursionError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON: {e}") from None
    if not isinstance(found, kind):
        raise CheckpointError(f"{path} holds no JSON {'object' if kind is dict else 'array'}")
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """The raw config.json of a model directory."""
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a model directory; give a local folder with config.json and safetensors files")
    config: dict[str, Any] = read_json(directory / "config.json")
    return config


def generation_config(path: str | Path) -> dict[str, Any]:
    """generation_config.json, {} where there is none."""
    file = Path(path) / "generation_config.json"
    return read_json(file) if file.exists() else {}


def pooling(path: str | Path) -> tuple[str, bool]:
    """How its vectors are made by sentence-transformers' files: of the last token or the mean, or their word for another way; and whether
    they have length 1. Where there are none: last, True."""
    folder = Path(path)
    modules = read_json(folder / "modules.json", list) if (folder / "modules.json").is_file() else []
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    at = next((str(module.get("path")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"), "1_Pooling")
    said = read_json(folder / at / "config.json") if (folder / at / "config.json").is_file() else {}
    modes = [key.removeprefix("pooling_mode_") for key, on in said.items() if key.startswith("pooling_mode_") and on is True]
    mode = modes[0] if modes else "lasttoken"
    return {"lasttoken": "last", "mean_tokens": "mean"}.get(mode, mode), "Normalize" in kinds or not modules
