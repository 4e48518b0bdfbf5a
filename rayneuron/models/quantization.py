"""Quantised weights: int8 and float8, symmetric, one scale a tensor or an output channel.

W [out, in] or [experts, out, in]; scale float32 [1], or [out, 1] / [experts, out, 1]; W ~ q * scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rayneuron.errors import CheckpointError, ConfigError

Scheme = Literal["per_tensor", "per_channel"]
DTYPES = {"int8": torch.int8, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 240.0, torch.float8_e5m2: 57344.0}  # Neuron's e4m3 ends at 240, not 448
METHOD = "rayneuron"  # quant_method of a checkpoint written by `rayneuron quantize`
_SAYS = ("quant_method", "dtype", "scheme")
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
    """The Quantization of two words (NxD's spellings accepted). Raises ConfigError with the known words."""
    name = {"s8": "int8", "f8e4m3fn": "f8e4m3", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}.get(dtype, dtype)
    kind = scheme.removesuffix("_symmetric")
    if name not in DTYPES:
        raise ConfigError(f"quantization dtype {dtype!r} is unknown; one of {', '.join(DTYPES)}")
    if kind not in ("per_tensor", "per_channel"):
        raise ConfigError(f"quantization scheme {scheme!r} is unknown; one of per_tensor, per_channel")
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
    dtype = parse(name).dtype
    if dtype == torch.int8:
        raise ConfigError("kv_dtype int8 is not available; write f8e4m3 or f8e5m2, or leave it out")
    return dtype


def stored(config: Mapping[str, Any]) -> Quantization | None:
    """How a checkpoint written by `rayneuron quantize` is quantised; None where it is not."""
    found = config.get("quantization_config") or {}
    if found.get("quant_method") == METHOD and not all(isinstance(found.get(k), str) for k in _SAYS):
        raise CheckpointError(f"config.json sets quantization_config: {found!r:.80}, where an object with {', '.join(_SAYS)} is needed")
    return parse(found["dtype"], found["scheme"]) if found.get("quant_method") == METHOD else None


def check_stored(config: Mapping[str, Any], wanted: Quantization | None = None) -> None:
    """Refuse a checkpoint quantised in a way nothing here reads, or otherwise than `wanted`. Raises CheckpointError, ConfigError."""
    has = stored(config)
    if has is not None and wanted is not None and has.dtype != wanted.dtype:
        raise ConfigError(f"the checkpoint is quantised to {has.dtype} already; leave quantization out, or take the unquantised checkpoint")
    found = config.get("quantization_config") or {}
    method = found.get("quant_method")
    if found and method != METHOD:
        raise CheckpointError(
            f"the checkpoint is quantised by {method!r}, which is not readable here; take the unquantised checkpoint and "
            "run `rayneuron quantize MODEL --dtype int8 --out DIR`, or set quantization: int8"
        )


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
