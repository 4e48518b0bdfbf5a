"""Words for activations and dtypes, and which go together: what can be said of them without torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import formats
from rayneuron.models.config_json import dtype_of

ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish")
COMPUTE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # our words for what is computed in -> those of torch, config.json
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes
SMALL = ("int8", "f8e4m3", "f8e5m2")
SCHEMES = ("per_tensor", "per_channel")
METHOD = "rayneuron"  # quant_method of a checkpoint written by `rayneuron quantize`
_SAYS = ("quant_method", "dtype", "scheme")
_SPELLINGS = {"s8": "int8", "f8e4m3fn": "f8e4m3", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}  # NxD's


def compute(name: str, config: Mapping[str, Any]) -> str:
    """The compute dtype of `dtype`. auto: the checkpoint's, except that fp16 becomes bf16, which CPUs compute hundreds of times faster.

    Raises ConfigError with the nearest known word.
    """
    if name != "auto" and name not in COMPUTE:
        known = ("auto", *COMPUTE)
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError(f"dtype {name!r} is unknown; write {near[0] if near else 'one of ' + ', '.join(known)}", param="dtype")
    return name if name != "auto" else "bf16" if dtype_of(config) in ("bfloat16", "float16") else "fp32"


def quantised(dtype: str, scheme: str = "per_channel", key: str = "quantization") -> tuple[str, str]:
    """Dtype and scheme in our words. Raises ConfigError with the known ones."""
    name, kind = _SPELLINGS.get(dtype, dtype), scheme.removesuffix("_symmetric")
    if name.removesuffix("_marlin") in formats.SUPPORTED and key == "quantization":  # vLLM's words
        said = "is what config.json says of a checkpoint that is quantised so; leave it out"
        raise ConfigError(f"{key} {dtype!r} {said}, or write one of {', '.join(SMALL)} to have weights quantised here", param=key)
    if name not in SMALL:
        raise ConfigError(f"{key} dtype {dtype!r} is unknown; one of {', '.join(SMALL)}", param=key)
    if kind not in SCHEMES:
        raise ConfigError(f"{key} scheme {scheme!r} is unknown; one of {', '.join(SCHEMES)}", param=key)
    return name, kind


def kv(name: str) -> str:
    """The dtype of a KV cache that is stored small. Raises ConfigError with the known words."""
    found, _ = quantised(name, key="kv_dtype")
    if found == "int8":
        raise ConfigError("kv_dtype int8 is not available; write f8e4m3 or f8e5m2, or leave it out", param="kv_dtype")
    return found


def stored(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """How a checkpoint is quantised that stays so: of `rayneuron quantize`, or another tool's int8; None where it is not."""
    found = config.get("quantization_config") or {}
    if found.get("quant_method") != METHOD:
        return formats.small(config)
    if not all(isinstance(found.get(key), str) for key in _SAYS):
        raise CheckpointError(f"config.json sets quantization_config: {found!r:.80}, where an object with {', '.join(_SAYS)} is needed")
    return quantised(found["dtype"], found["scheme"])


def check_stored(config: Mapping[str, Any], wanted: str | None = None) -> None:
    """Refuse a checkpoint quantised in a way nothing here reads, or otherwise than `wanted`. Raises CheckpointError, ConfigError."""
    has = stored(config)
    if has is not None and wanted is not None and has[0] != quantised(wanted)[0]:
        raise ConfigError(
            f"the checkpoint is quantised to {has[0]} already; leave quantization out, or take the unquantised checkpoint",
            param="quantization",
        )
    formats.read(config)
