"""Quantised checkpoints of other tools: what `quantization_config` of a config.json says of them, or why they are refused; no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayneuron.errors import CheckpointError

SUPPORTED = {
    "awq": "4 bits with zero points, version gemm",
    "compressed-tensors": "pack-quantized with 4 or 8 bits, int-quantized with 8, float-quantized and naive-quantized with 8",
    "fp8": "e4m3, in blocks or with one scale",
    "gptq": "2, 4 or 8 bits",
    "rayneuron": "written by `rayneuron quantize`",
}
TRANSPOSED = ("gpt2",)  # model types whose checkpoints store products as [in, out], which these formats do not say


@dataclass(frozen=True, slots=True)
class Format:
    """How products are stored. `main`: what of a product makes it one of these; `beside`: what else it has, `maybe`: or may have.

    group: inputs that share a scale, 0 where all do. offset: what is taken from stored values; shift: what is added to stored zero points.
    block: rows and columns that share a scale of float8.
    """

    kind: Literal["awq", "gptq", "packed", "plain"]
    main: str
    beside: tuple[str, ...]
    maybe: tuple[str, ...] = ()
    bits: int = 8
    group: int = 0
    offset: int = 0
    shift: int = 0
    block: tuple[int, int] | None = None


def read(config: Mapping[str, Any]) -> Format | None:
    """The Format of a checkpoint that another tool quantised; None where none did. Raises CheckpointError with what is supported."""
    found = config.get("quantization_config") or {}
    method = str(found.get("quant_method"))
    if not found or method == "rayneuron":
        return None
    if method not in _READ:
        near = difflib.get_close_matches(method, SUPPORTED, 1)
        _refuse(f"is quantised by {method!r}" + (f"; the nearest that is read is {near[0]!r}" if near else ""))
    if config.get("model_type") in TRANSPOSED:
        _refuse(f"of a {config['model_type']} model is quantised by {method!r}, which is not read for this model type")
    return _READ[method](found)


def small(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Dtype and scheme in our words where weights can stay as small as another tool stored them: int8, a scale an output or a tensor."""
    found = config.get("quantization_config") or {}
    if found.get("quant_method") != "compressed-tensors" or found.get("format") != "int-quantized":
        return None
    read(config)
    return "int8", "per_tensor" if _weights(found)["strategy"] == "tensor" else "per_channel"


def _refuse(what: str) -> None:
    known = "; ".join(f"{name} ({form})" for name, form in SUPPORTED.items())
    raise CheckpointError(
        f"the checkpoint {what}. Supported: {known}. Or take the unquantised checkpoint, with quantization: int8 or `rayneuron quantize`"
    )


def _need(found: Mapping[str, Any], method: str, **allowed: tuple[Any, ...]) -> None:
    """Refuse a setting that is not one of the allowed values; the first stands for one that is not there."""
    for name, values in allowed.items():
        value = found.get(name, values[0])
        if not any(value is v or (type(value) is type(v) and value == v) for v in values):
            _refuse(f"is quantised by {method} with {name}: {value!r:.60}, which is not one of {', '.join(map(repr, values))}")


def _group(found: Mapping[str, Any], method: str) -> int:
    size = found.get("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        _refuse(f"is quantised by {method} with group_size: {size!r:.60}, which is no number of inputs (-1: all)")
    return max(size, 0)


def _awq(found: Mapping[str, Any]) -> Format:
    version = str(found.get("version", "gemm")).lower()
    _need({**found, "version": version}, "awq", bits=(4,), version=("gemm",), zero_point=(True,))
    return Format("awq", "qweight", ("qzeros", "scales"), bits=4, group=_group(found, "awq"))


def _gptq(found: Mapping[str, Any]) -> Format:
    _need(found, "gptq", bits=(None, 2, 4, 8), checkpoint_format=("gptq", "gptq_v2"))
    if found.get("bits") is None:
        _refuse("is quantised by gptq and says no bits")
    shift = int(found.get("checkpoint_format", "gptq") == "gptq")  # the first version stores zero points less one
    return Format("gptq", "qweight", ("qzeros", "scales"), ("g_idx",), found["bits"], _group(found, "gptq"), shift=shift)


def _block(size: Any, method: str) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        _refuse(f"is quantised by {method} in blocks of {size!r:.60}, which is no pair of rows and columns")
    return size[0], size[1]


def _fp8(found: Mapping[str, Any]) -> Format:
    _need(found, "fp8", fmt=("e4m3", "float8_e4m3fn"), activation_scheme=("dynamic", "static"))
    block = _block(found.get("weight_block_size"), "fp8")
    scale = "weight_scale_inv" if block else "weight_scale"
    return Format("plain", "weight", (scale,), ("input_scale", "activation_scale"), block=block)


def _weights(found: Mapping[str, Any]) -> dict[str, Any]:
    """What config_groups say of weights, which must be one thing."""
    groups = found.get("config_groups")
    said = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    if not said or any(one != said[0] or not isinstance(one, dict) for one in said):
        _refuse("is quantised by compressed-tensors with config_groups that quantise no weights, or weights in several ways")
    weights = {name: value for name, value in (said[0] or {}).items() if value is not None}
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group" if "group_size" in weights else "tensor", **weights}


def _compressed(found: Mapping[str, Any]) -> Format:
    method, form = "compressed-tensors", str(found.get("format"))
    _need(found, method, format=(None, "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"))
    _need(found, method, kv_cache_scheme=(None,), quantization_status=("compressed", "frozen"), transform_config=(None, {}))
    sparse = found.get("sparsity_config") or {}
    if form == "None" or not isinstance(sparse, dict) or sparse.get("format", "dense") != "dense":
        _refuse(f"is quantised by compressed-tensors with format: {form} and sparsity_config: {sparse!r:.60}")
    weights, float8 = _weights(found), form in ("float-quantized", "naive-quantized")
    said = f"compressed-tensors ({form})"
    _need(weights, said, num_bits=(4, 8) if form == "pack-quantized" else (8,), type=("float",) if float8 else ("int",))
    strategies: dict[str, tuple[str, ...]] = {"pack-quantized": ("group", "channel"), "int-quantized": ("channel", "tensor")}
    _need(weights, said, strategy=strategies.get(form, ("tensor", "channel", "block")))
    _need(weights, said, symmetric=(True, False) if form == "pack-quantized" else (True,))
    _need(weights, said, actorder=(None, False, True, "weight", "static", "group", "dynamic"), dynamic=(False,))
    if form != "pack-quantized":
        block = _block(weights.get("block_structure") or [128, 128], said) if weights["strategy"] == "block" else None
        return Format("plain", "weight", ("weight_scale",), ("input_scale",), block=block)
    group = _group(weights, said) if weights["strategy"] == "group" else 0
    beside = ("weight_scale", "weight_shape", *(() if weights["symmetric"] else ("weight_zero_point",)))
    return Format("packed", "weight_packed", beside, ("weight_g_idx",), weights["num_bits"], group, offset=1 << (weights["num_bits"] - 1))


_READ = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
