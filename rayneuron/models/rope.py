"""The rope settings of a config.json, of every known kind and in every spelling; no torch.

Formulas: the papers of each kind as transformers' `modeling_rope_utils` writes them.
"""

from __future__ import annotations

import math
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models.arch import Rope

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """The rope settings of a config in any spelling: `rope_parameters`, or `rope_theta` with `rope_scaling` (`type` or `rope_type`)."""
    found: dict[str, Any] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if config.get(name) is not None:
            found[name] = config[name]
    for name in ("rope_scaling", "rope_parameters"):
        found.update(config.get(name) or {})
    found["rope_type"] = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    if found["rope_type"] == "su":  # the first name of longrope
        found["rope_type"] = "longrope"
    if found["rope_type"] not in KINDS:
        raise CheckpointError(f"rope type {found['rope_type']!r} is unknown; known: {', '.join(KINDS)}")
    return found


def read(config: dict[str, Any], head_dim: int, max_positions: int, *, max_model_len: int | None = None, pairs: bool = False) -> Rope:
    """The Rope of a config. `max_model_len` decides between longrope's two tables (None: the model's own maximum)."""
    found = settings(config)
    kind = found["rope_type"]
    dim = int(head_dim * found.get("partial_rotary_factor", 1.0))
    base = {"kind": kind, "dim": dim, "theta": float(found.get("rope_theta", 10000.0)), "pairs": pairs}
    if kind == "default":
        return Rope(**base)
    return Rope(**base, **_SETTINGS[kind](config, found, dim, max_positions, max_model_len or max_positions))


def _need(found: dict[str, Any], name: str) -> Any:
    if found.get(name) is None:
        raise CheckpointError(f"rope type {found['rope_type']!r} needs {name!r} in rope_scaling (or rope_parameters) of config.json")
    return found[name]


def _linear(config: dict[str, Any], found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    return {"factor": float(_need(found, "factor"))}


def _dynamic(config: dict[str, Any], found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    return {"factor": float(_need(found, "factor")), "original": int(found.get("original_max_position_embeddings") or top)}


def _llama3(config: dict[str, Any], found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    return {
        "factor": float(_need(found, "factor")),
        "original": int(_need(found, "original_max_position_embeddings")),
        "low": float(_need(found, "low_freq_factor")),
        "high": float(_need(found, "high_freq_factor")),
    }


def _mscale(scale: float, by: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0


def _yarn(config: dict[str, Any], found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    original = int(found.get("original_max_position_embeddings") or top)
    factor = float(found.get("factor") or top / original)
    scale = found.get("attention_factor")
    if scale is None:
        up, down = found.get("mscale"), found.get("mscale_all_dim")
        scale = _mscale(factor, up) / _mscale(factor, down) if up and down else _mscale(factor)
    return {
        "factor": factor,
        "original": original,
        "scale": float(scale),
        "beta_fast": float(found.get("beta_fast") or 32),
        "beta_slow": float(found.get("beta_slow") or 1),
        "truncate": bool(found.get("truncate", True)),
    }


def _longrope(config: dict[str, Any], found: dict[str, Any], dim: int, top: int, wanted: int) -> dict[str, Any]:
    original = int(config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings") or top)
    factor = float(found.get("factor") or top / original)
    scale = found.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = tuple(float(f) for f in _need(found, "long_factor" if wanted > original else "short_factor"))
    if len(factors) != dim // 2:
        raise CheckpointError(f"longrope needs {dim // 2} factors, config.json holds {len(factors)}")
    return {"factor": factor, "original": original, "scale": float(scale), "factors": factors}


_SETTINGS = {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
