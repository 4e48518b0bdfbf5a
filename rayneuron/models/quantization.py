"""Quantised weights: int8 and float8, symmetric, one scale a tensor or an output channel.

W [out, in] or [experts, out, in]; scale float32 [1], or [out, 1] / [experts, out, 1]; W ~ q * scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rayneuron.models import words

Scheme = Literal["per_tensor", "per_channel"]
DTYPES = {"int8": torch.int8, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}  # Neuron's e4m3 ends at 240, not 448
METHOD = words.METHOD
FLOOR = 1e-5  # the largest value a channel is taken to have at least, so that zeros have a scale


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are stored."""

    dtype: torch.dtype
    scheme: Scheme


def is_quantised(dtype: torch.dtype) -> bool:
    """True for the dtypes weights are quantised to."""
    return dtype in LIMITS


def parse(dtype: str, scheme: str = "per_channel") -> Quantization:
    """The Quantization of two words. Raises ConfigError with the known words."""
    name, kind = words.quantised(dtype, scheme)
    return Quantization(DTYPES[name], kind)  # type: ignore[arg-type]


def scale_of(w: Tensor, how: Quantization) -> Tensor:
    """The scale of a whole weight [..., out, in], float32: [1], or [..., out, 1]."""
    limit = LIMITS[how.dtype]
    top = w.abs().amax().reshape(1) if how.scheme == "per_tensor" else w.abs().amax(-1, keepdim=True)
    return (top.float() / limit).clamp(min=FLOOR / limit)


def quantise(w: Tensor, scale: Tensor, how: Quantization) -> Tensor:
    """w / scale in the small dtype, clamped to its range."""
    limit = LIMITS[how.dtype]
    q = w.float() / scale.clamp(min=FLOOR / limit)  # a padded head's scale is zero
    return (q.round() if how.dtype == torch.int8 else q).clamp(-limit, limit).to(how.dtype)


def parse_kv(name: str) -> torch.dtype:
    """The dtype of a KV cache that is stored small. Raises ConfigError with the known words."""
    return DTYPES[words.kv(name)]


def stored(config: Mapping[str, Any]) -> Quantization | None:
    """How a checkpoint is quantised that stays so; None where it does not."""
    found = words.stored(config)
    return None if found is None else parse(*found)


def scale_name(weight: str) -> str:
    """Where the scale of a weight is stored (NxD's name)."""
    return weight.removesuffix(".weight") + ".scale"


def dtype_name(dtype: torch.dtype) -> str:
    """Our word for a quantised dtype."""
    return next(n for n, d in DTYPES.items() if d == dtype)


def stored_scale(t: Tensor, shape: tuple[int, ...], how: Quantization) -> Tensor:
    """The scale of a tensor as stored: float32 of `shape`, or [1] per tensor."""
    if how.scheme == "per_tensor":
        return scale_of(t, how)
    grouped = t.unflatten(0, (shape[0], -1)).abs().amax(1) if shape[0] not in (1, t.shape[0]) else t.abs().amax(0 if shape[0] == 1 else 1)
    limit = LIMITS[how.dtype]
    return (grouped.float() / limit).clamp(min=FLOOR / limit).reshape(shape)


def spread(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """A stored scale, repeated so that it divides a stored tensor [rows, columns]."""
    if scale.dim() < 2 or scale.shape[0] in (1, shape[0]):
        return scale
    return scale.repeat_interleave(shape[0] // scale.shape[0], 0)
