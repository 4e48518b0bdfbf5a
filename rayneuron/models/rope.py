"""The rope settings of a config.json, of every known kind and in every spelling; no torch.

Formulas: the papers of each kind as transformers' `modeling_rope_utils` writes them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models.arch import Rope
from rayneuron.models.config_json import LARGEST, of_type
from rayneuron.models.defaults import ANY_ROPE_THETA, ROPE_THETA

log = logging.getLogger(__name__)


KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
# Model types that may rotate a part of a head, and how much where nothing is said; and those that rotate neighbours.
PARTIAL = {"glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "gpt_neox": 0.25, "nemotron": 0.5, "phi": 0.5, "phi3": 1.0, "stablelm": 0.25}
PAIRS = ("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium")
BLOCKS = ("rope_scaling", "rope_parameters")
BY_KIND = ("full_attention", "sliding_attention")  # where layers with a window have a rope of their own


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a config in any spelling: `rope_parameters`, or `rope_theta` with `rope_scaling` (`type` or `rope_type`).

    Of two blocks `rope_scaling` counts, as in transformers; where it would drop what `rope_parameters` says, that is refused.
    """
    blocks = {name: _block(config, name) for name in BLOCKS if config.get(name) not in (None, {})}
    found = dict(next(iter(blocks.values()), {"rope_type": "default"}))
    if len(blocks) == 2:
        _agree(config, blocks)
    if found["rope_type"] not in KINDS:
        raise CheckpointError(f"rope type {found['rope_type']!r} is unknown; known: {', '.join(KINDS)}")
    kind = str(config.get("model_type"))
    neox, part = kind == "gpt_neox", PARTIAL.get(kind, 1.0)  # NeoX has names of its own, and is not asked by the usual ones
    for key, own, default in (("rope_theta", "rotary_emb_base", _any_theta(config)), ("partial_rotary_factor", "rotary_pct", part)):
        found.setdefault(key, config.get(own if neox else key, default))
        if neox and config.get(key) not in (None, found[key]):
            raise CheckpointError(f"config.json sets {key}: {config[key]!r:.60}, which a gpt_neox model calls {own}")
    if config.get("original_max_position_embeddings") is not None and found["rope_type"] in ("yarn", "llama3", "longrope"):
        found["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return found


def of_kind(config: Mapping[str, Any], kind: str, theta: Any) -> dict[str, Any]:
    """A config with the rope of one of BY_KIND: the block of transformers 5, or the hub's `theta` and scaling, which is for full layers."""
    found, scaling = ({} if config.get(name) is None else config[name] for name in ("rope_parameters", "rope_scaling"))
    if not isinstance(found, dict) or found.keys() - set(BY_KIND) or not isinstance(scaling, dict):
        raise CheckpointError(
            f"config.json sets rope_parameters: {found!r:.60}, rope_scaling: {scaling!r:.60}; rope_parameters of a {config['model_type']} "
            f"model has an object for each of {' and '.join(BY_KIND)}"
        )
    own = found.get(kind) or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json sets rope_parameters of {kind}: {own!r:.60}, where an object is needed")
    block = {"rope_theta": theta, **own, **(scaling if kind == "full_attention" else {})}
    return {**config, "rope_scaling": None, "rope_parameters": block}


def _block(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config[name]
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise CheckpointError(f"config.json sets {name}: {found!r:.60}, but one object with the settings of all layers is needed")
    kind = found.get("rope_type", found.get("type", "default"))
    return {**found, "rope_type": "longrope" if kind == "su" else kind}  # the first name of longrope


def _agree(config: Mapping[str, Any], blocks: Mapping[str, dict[str, Any]]) -> None:
    """Of two blocks, one pasted beside the other, the one not read must say nothing of its own."""
    scaling, parameters = (blocks[name] for name in BLOCKS)
    dropped = {k: v for k, v in parameters.items() if k not in ("type", "rope_type") and v is not None}
    taken = {"rope_theta": config.get("rope_theta", _any_theta(config)), **scaling}
    if parameters["rope_type"] in ("default", scaling["rope_type"]) and all(taken.get(k) == v for k, v in dropped.items()):
        log.warning("config.json has rope_parameters and rope_scaling; the latter counts: %s", scaling)
        return
    raise CheckpointError(
        f"config.json contradicts itself: rope_scaling {scaling} and rope_parameters {parameters}; write one of them, with rope_theta in it"
    )


def _any_theta(config: Mapping[str, Any]) -> float:
    return ROPE_THETA.get(str(config.get("model_type")), ANY_ROPE_THETA)


def read(config: Mapping[str, Any], head_dim: int, max_positions: int, *, max_model_len: int | None = None) -> Rope:
    """The Rope of a config. `max_model_len` decides between longrope's two tables (None: the model's own maximum)."""
    found = settings(config)
    kind, part = found["rope_type"], _number(found, "partial_rotary_factor")
    dim = int(head_dim * part)
    if part > 1 or (part < 1 and config.get("model_type") not in PARTIAL):
        raise CheckpointError(f"partial_rotary_factor {part} of config.json is not supported for {config.get('model_type')} models")
    base = {"kind": kind, "dim": dim, "theta": _number(found, "rope_theta"), "pairs": config.get("model_type") in PAIRS}
    if dim < 2 or base["theta"] <= 1:
        raise CheckpointError(
            f"config.json asks for rope over {dim} channels of head_dim {head_dim} (hidden_size through num_attention_heads where it has "
            f"none), with rope_theta {base['theta']}"
        )
    if kind == "default":
        return Rope(**base)
    return Rope(**base, **_SETTINGS[kind](found, dim, max_positions, max_model_len or max_positions))


def _number(found: dict[str, Any], name: str, default: float | None = None) -> float:
    """A setting that must be a positive number. `default` stands for absent or null, where there is one."""
    value: Any = found.get(name)
    if value is None and default is not None:
        return default
    if name not in found:
        raise CheckpointError(f"rope type {found['rope_type']!r} needs {name!r} in rope_scaling (or rope_parameters) of config.json")
    if type(value) not in (int, float) or not 0 < value < LARGEST:
        raise CheckpointError(f"config.json sets {name}: {value!r:.60} for rope, which is no positive number")
    return float(value)


def _original(found: dict[str, Any], top: int) -> int:
    value = found.get("original_max_position_embeddings", top)
    of_type(value, int, "original_max_position_embeddings", "rope-scaled")
    if value < 2:
        raise CheckpointError(f"config.json sets original_max_position_embeddings: {value}, which no rope-scaled model can have")
    return int(value)


def _linear(found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    return {"factor": _number(found, "factor")}


def _dynamic(found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    if dim == 2:
        raise CheckpointError("rope type 'dynamic' needs more than 2 rotated channels a head")
    return {"factor": _number(found, "factor"), "original": top}


def _llama3(found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    low, high = _number(found, "low_freq_factor"), _number(found, "high_freq_factor")
    if low == high:
        raise CheckpointError(f"rope type 'llama3' needs low_freq_factor and high_freq_factor that differ, both are {low}")
    return {"factor": _number(found, "factor"), "original": _original(found, top), "low": low, "high": high}


def _mscale(scale: float, by: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0


def _yarn(found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    original = _original(found, top)
    factor = top / original if found.get("factor", 0) is None else _number(found, "factor")
    up, down = found.get("mscale"), found.get("mscale_all_dim")
    scale = _mscale(factor)
    if up and down:
        scale = _mscale(factor, _number(found, "mscale")) / _mscale(factor, _number(found, "mscale_all_dim"))
    truncate = found.get("truncate", True)
    of_type(truncate, bool, "truncate", "yarn")
    return {
        "factor": factor,
        "original": original,
        "scale": _number(found, "attention_factor", scale),
        "beta_fast": _number(found, "beta_fast", 32.0),
        "beta_slow": _number(found, "beta_slow", 1.0),
        "truncate": truncate,
    }


def _longrope(found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    original = _original(found, top)
    factor = _number(found, "factor", top / original)
    scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    tables = {}
    for name in ("long_factor", "short_factor"):
        if name not in found:
            _number(found, name)
        table = tables[name] = found[name]
        if not isinstance(table, list) or len(table) != dim // 2 or not all(type(f) in (int, float) and 0 < f < LARGEST for f in table):
            raise CheckpointError(
                f"longrope needs {dim // 2} positive numbers as {name}, config.json holds {table!r:.60}; a head has hidden_size / "
                "num_attention_heads channels, and half as many numbers as it rotates"
            )
    chosen = tables["long_factor" if wanted > original else "short_factor"]
    factors = tuple(float(f) for f in chosen)
    return {"factor": factor, "original": original, "scale": _number(found, "attention_factor", scale), "factors": factors}


_SETTINGS = {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
