"""Rotary positions: settings of every known kind, their frequencies, and the cos/sin tables of one step.

B rows, T new tokens, R rotated half (dim / 2). Formulas: the papers of each kind as transformers' `modeling_rope_utils` writes them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rayneuron.errors import CheckpointError
from rayneuron.models.arch import Arch, Rope

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


def frequencies(rope: Rope) -> Tensor:
    """Radians a position, float32 [R]. For `dynamic` those of the trained length."""
    steps = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    freq = 1.0 / rope.theta**steps
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**steps)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, freq)
    return _llama3_frequencies(rope, freq) if rope.kind == "llama3" else freq


def _yarn_frequencies(rope: Rope, freq: Tensor) -> Tensor:
    def turns(count: float) -> float:  # the dimension that makes `count` turns over the trained length
        return rope.dim * math.log(rope.original / (count * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = turns(rope.beta_fast), turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return freq / rope.factor * ramp + freq * (1 - ramp)


def _llama3_frequencies(rope: Rope, freq: Tensor) -> Tensor:
    wave = 2 * math.pi / freq
    smooth = ((rope.original / wave - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return (1 - smooth) * freq / rope.factor + smooth * freq


def tables(arch: Arch, freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B,T,1,R] of one step. positions int32 [B,T]; freq of `frequencies`, a constant among the weights.

    `dynamic` scales by each token's own position, so a token's rotation never depends on its neighbours or on chunking:
    the numbers of transformers fed one token at a time.
    """
    rope, at = arch.rope, positions.float()[..., None]
    if rope.kind == "dynamic":
        length = (at + 1).clamp(min=rope.original)
        grown = rope.theta * ((rope.factor * length / rope.original) - (rope.factor - 1)) ** (rope.dim / (rope.dim - 2))
        freq = 1.0 / grown ** (torch.arange(0, rope.dim, 2, dtype=torch.float32, device=freq.device) / rope.dim)
    angle = (at * freq)[:, :, None]
    return (angle.cos() * rope.scale).to(dtype), (angle.sin() * rope.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool = False) -> Tensor:
    """Turn the first 2R of every head of x [B,T,H,D] by cos, sin [B,T,1,R]; the rest passes."""
    half = cos.shape[-1]
    turn = x if x.shape[-1] == 2 * half else x[..., : 2 * half]
    if pairs:
        a, b = turn[..., ::2], turn[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turn[..., :half], turn[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return out if turn is x else torch.cat((out, x[..., 2 * half :]), -1)
