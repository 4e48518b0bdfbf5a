"""Checkpoints of AWQ, GPTQ, compressed-tensors and FP8: equal to the formats' own arithmetic, written here in numpy, value by value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayneuron import models
from rayneuron.errors import CheckpointError
from rayneuron.models import dequantised, hub, presharded
from tests.models import cases

GROUP = 16
Stored = dict[str, Tensor]
Draw = np.random.Generator


def words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R,C] -> int32 [R, C x bits / 32], value i of a word at bit i x bits, or that of column order[i]."""
    per = 32 // bits
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % per)))
    out = np.zeros((values.shape[0], values.shape[1] // per), np.uint32)
    for i in range(per):
        out |= values[:, (order or range(per))[i] :: per].astype(np.uint32) << np.uint32(i * bits)
    return torch.from_numpy(out.view(np.int32).copy())


def half(rows: int, columns: int, draw: Draw) -> np.ndarray:
    return draw.uniform(0.001, 0.02, (rows, columns)).astype(np.float16)


def awq(o: int, i: int, draw: Draw) -> tuple[Stored, np.ndarray]:
    q, z, s = draw.integers(0, 16, (i, o)), draw.integers(0, 16, (i // GROUP, o)), half(i // GROUP, o, draw)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": words(q, 4, order), "qzeros": words(z, 4, order), "scales": torch.from_numpy(s)}
    return stored, (q - z.repeat(GROUP, 0)).T * s.repeat(GROUP, 0).T.astype(np.float64)


def gptq(bits: int, shift: int, shuffled: bool) -> Callable[[int, int, Draw], tuple[Stored, np.ndarray]]:
    def make(o: int, i: int, draw: Draw) -> tuple[Stored, np.ndarray]:
        q, z = draw.integers(0, 1 << bits, (i, o)), draw.integers(1, 1 << bits, (i // GROUP, o))
        s, group = half(i // GROUP, o, draw), np.arange(i) // GROUP
        if shuffled:
            draw.shuffle(group)
        stored = {"qweight": words(q.T, bits).T.contiguous(), "qzeros": words(z - shift, bits), "scales": torch.from_numpy(s)}
        stored["g_idx"] = torch.from_numpy(group.astype(np.int32))
        return stored, ((q - z[group]) * s[group].astype(np.float64)).T

    return make


def packed(bits: int, symmetric: bool, group: int = GROUP) -> Callable[[int, int, Draw], tuple[Stored, np.ndarray]]:
    def make(o: int, i: int, draw: Draw) -> tuple[Stored, np.ndarray]:
        size, low = group or i, 1 << (bits - 1)
        q, z, s = draw.integers(-low, low, (o, i)), draw.integers(-low, low, (o, i // size)), half(o, i // size, draw)
        stored = {"weight_packed": words(q + low, bits), "weight_scale": torch.from_numpy(s), "weight_shape": torch.tensor([o, i])}
        if symmetric:
            z[:] = 0
        else:
            stored["weight_zero_point"] = words((z + low).T, bits).T.contiguous()
        return stored, (q - z.repeat(size, 1)) * s.repeat(size, 1).astype(np.float64)

    return make


def float8(scale: str, rows: int, columns: int, alone: bool = False) -> Callable[[int, int, Draw], tuple[Stored, np.ndarray]]:
    def make(o: int, i: int, draw: Draw) -> tuple[Stored, np.ndarray]:
        q = torch.from_numpy(draw.uniform(-448, 448, (o, i))).to(torch.float8_e4m3fn)
        s = draw.uniform(1e-5, 1e-4, (-(-o // rows), -(-i // columns))).astype(np.float32)
        stored = {"weight": q, scale: torch.from_numpy(s.reshape(-1) if alone else s), "input_scale": torch.ones(1)}
        return stored, q.double().numpy() * s[np.arange(o) // rows][:, np.arange(i) // columns]

    return make


def int8(o: int, i: int, draw: Draw) -> tuple[Stored, np.ndarray]:
    q, s = draw.integers(-128, 128, (o, i)).astype(np.int8), torch.from_numpy(half(o, 1, draw)).bfloat16()
    return {"weight": torch.from_numpy(q), "weight_scale": s}, q * s.double().numpy()


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, "observer": "minmax", **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "quantization_status": "compressed"}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
INT4, F8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "float"}
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": (AWQ, awq),
    "gptq4": (GPTQ, gptq(4, 1, True)),
    "gptq8_v2": ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, 0, False)),
    "gptq2": ({**GPTQ, "bits": 2}, gptq(2, 1, False)),
    "w4a16": (compressed("pack-quantized", **INT4, strategy="group", group_size=GROUP), packed(4, True)),
    "w4a16_asym": (compressed("pack-quantized", **INT4, strategy="group", group_size=GROUP, symmetric=False), packed(4, False)),
    "w8a16_channel": (compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), packed(8, True, 0)),
    "fp8_channel": (compressed("float-quantized", **F8, strategy="channel"), float8("weight_scale", 1, 1000)),
    "fp8_tensor": (compressed("float-quantized", **F8, strategy="tensor"), float8("weight_scale", 1000, 1000, alone=True)),
    "fp8_blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 16]},
        float8("weight_scale_inv", 24, 16),
    ),
    "w8a8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8),
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.save(cases.CONFIGS["llama"](), tmp_path_factory.mktemp("llama"), tokens=4).path


def write(llama: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """The model with its products in a format, and the same numbers as plain float32."""
    said, make = FORMATS[name]
    draw, there, plain = np.random.default_rng(0), {}, {}
    for key, t in load_file(llama / "model.safetensors").items():
        there[key], plain[key] = t, t
        if key.endswith("proj.weight"):
            stored, weight = make(*t.shape, draw)
            del there[key]
            there |= {f"{key.removesuffix('weight')}{part}": value for part, value in stored.items()}
            plain[key] = torch.from_numpy(weight.astype(np.float32, order="C"))
    for target, held, more in ((folder / "quantised", there, {"quantization_config": said}), (folder / "plain", plain, {})):
        shutil.copytree(llama, target)
        save_file(held, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps({**hub.read_config(llama), **more}))
    return folder / "quantised", folder / "plain"


def opened(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> list[dict[str, Tensor]]:
    config = hub.read_config(folder)
    arch = models.check(config, tp=options.get("ranks", 1), max_model_len=32)
    held = presharded.open_weights(folder, config, arch, dtype=dtype, **options)
    return [held["top"], *held["layers"]]


def values(w: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    scale = w.get(name.removesuffix("w") + "scale")
    return w[name] if scale is None else (w[name].float() * scale).to(dtype)


@pytest.mark.parametrize("name", list(FORMATS))
def test_equals_the_formats_own_arithmetic(llama: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of a rank, in float32 and in bfloat16, dequantised in parts of 32 outputs."""
    monkeypatch.setattr(dequantised, "PART", 1)
    quantised, plain = write(llama, tmp_path, name)
    for dtype, where in ((torch.float32, {}), (torch.bfloat16, {"rank": 1, "ranks": 2})):
        for ours, theirs in zip(opened(quantised, dtype, **where), opened(plain, dtype, **where), strict=True):
            small = {n for n in ours if n.endswith("scale")}
            assert ours.keys() - small == theirs.keys()
            for key, want in theirs.items():
                assert torch.equal(values(ours, key, dtype), want), key
    assert any(t.dtype == torch.int8 for w in opened(quantised) for t in w.values()) == (name == "w8a8")


def test_many_outputs_are_dequantised_in_parts(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _ = write(llama, tmp_path, "gptq4")
    held = dequantised.checkpoint(quantised, hub.read_config(quantised), torch.float32)
    parts, one = [], held._parts
    held._parts = lambda stem, part: parts.append(part.stop - part.start) or one(stem, part)  # type: ignore[union-attr]
    monkeypatch.setattr(dequantised, "PART", 64 * 32)
    whole = held["model.layers.0.mlp.up_proj.weight"]
    assert parts == [32, 32, 32, 16] and whole.shape == (112, 64)


@pytest.mark.parametrize("name", ["awq", "w8a8"])
def test_presharded_and_int8_while_loading(llama: Path, tmp_path: Path, name: str) -> None:
    quantised, plain = write(llama, tmp_path, name)
    for word in (None, "int8"):
        out = tmp_path / f"out_{word}"
        presharded.shard(quantised, 2, out, quantization=word)
        for rank in (0, 1):
            where = {"rank": rank, "ranks": 2, "quantization": word}
            for ours, theirs, kept in zip(opened(out, **where), opened(quantised, **where), opened(plain, **where), strict=True):
                assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], t) for key, t in theirs.items())
                assert name == "w8a8" or all(torch.equal(ours[key], t) for key, t in kept.items())


def test_every_tensor_is_read_once_or_named(llama: Path, tmp_path: Path) -> None:
    quantised, _ = write(llama, tmp_path, "awq")
    file, stem = quantised / "model.safetensors", "model.layers.1.mlp.down_proj"
    held = load_file(file)
    for changed, message in (
        ({n: t for n, t in held.items() if n != stem + ".scales"}, rf"tensor '{stem}.scales' is missing"),
        ({n: t for n, t in held.items() if n != stem + ".qweight"}, rf"'{stem}.weight' is missing"),
        ({**held, "model.layers.0.x.scales": torch.ones(2)}, "nothing in a llama model reads model.layers.0.x.scales"),
        ({**held, stem + ".g_idx": torch.ones(2)}, f"reads {stem}.g_idx"),
        ({**held, stem + ".weight": torch.ones(64, 112)}, "one product is stored once"),
        ({**held, stem + ".scales": torch.ones(3, 64)}, f"tensors of '{stem}' do not fit each other or quantization_config: qweight"),
        ({**held, stem + ".qweight": torch.ones(112, 7, dtype=torch.int32)}, "do not fit|promises"),
    ):
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=message):
            opened(quantised)


REFUSED: tuple[tuple[Any, str], ...] = (
    ({"quant_method": "awqq"}, r"quantised by 'awqq'; the nearest that is read is 'awq'\. Supported: awq \(4 bits"),
    ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'.*Supported: awq.*compressed-tensors .*fp8 .*gptq .*rayneuron"),
    ({"quant_method": None, "bits": 4}, "quantised by 'None'"),
    ({**AWQ, "version": "gemv"}, "awq with version: 'gemv', which is not one of 'gemm'"),
    ({**AWQ, "bits": 3}, "awq with bits: 3"),
    ({**AWQ, "zero_point": False}, "awq with zero_point: False"),
    ({**AWQ, "group_size": 0}, "awq with group_size: 0"),
    ({**GPTQ, "bits": 3}, "gptq with bits: 3, which is not one of None, 2, 4, 8"),
    ({"quant_method": "gptq"}, "gptq and says no bits"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"in blocks of \[128\]"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt: 'e5m2'"),
    (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format: 'nvfp4-pack-quantized'"),
    (compressed("pack-quantized", num_bits=3, type="int", strategy="group", group_size=8), "num_bits: 3"),
    (compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), "symmetric: False"),
    (compressed("float-quantized", **F8, strategy="tensor_group"), "strategy: 'tensor_group'"),
    ({**compressed("float-quantized", **F8), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ({**compressed("float-quantized", **F8), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ({**compressed("pack-quantized"), "config_groups": {k: {"weights": {"num_bits": n}} for k, n in (("a", 4), ("b", 8))}}, "several ways"),
    ({**compressed("pack-quantized"), "config_groups": None}, "quantise no weights"),
)  # fmt: skip


@pytest.mark.parametrize(("said", "message"), REFUSED, ids=lambda part: str(part)[:50])
def test_variants_that_are_not_read_are_refused_by_name(llama: Path, said: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        models.check({**hub.read_config(llama), "quantization_config": said}, tp=1, max_model_len=32)


def test_a_model_type_that_stores_products_turned_is_refused(llama: Path) -> None:
    raw = cases.CONFIGS["gpt2"]().to_dict()
    with pytest.raises(CheckpointError, match="gpt2 model is quantised by 'awq', which is not read for this model type"):
        models.check({**raw, "quantization_config": AWQ}, tp=1, max_model_len=32)
