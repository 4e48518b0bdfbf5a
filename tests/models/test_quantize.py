"""Quantised weights and KV: arithmetic by hand, written checkpoints, presharded files, and the stated bounds on every family."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from rayneuron import models
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import hub, ops, presharded, quantization, quantize, weights
from rayneuron.models.collectives import Solo
from tests.models import cases
from tests.models.cases import Runner, Saved

DENSE = ("llama", "gpt2", "gpt_bigcode", "bloom", "gpt_neox", "gptj", "opt", "qwen2", "phi3", "gemma2", "olmo2", "falcon_new")
MIXTURES = ("dbrx", "mixtral", "qwen2_moe")
FAST = ("llama", "gpt2", "bloom", "dbrx", "mixtral", "phi3")  # every way to store a product
# Largest change of a logit over its largest value, tiny random models of two layers. int8 keeps 7 bits, e4m3 3, e5m2 2.
BOUNDS = {("int8", "per_channel"): 0.03, ("int8", "per_tensor"): 0.05, ("f8e4m3", "per_channel"): 0.12, ("f8e4m3", "per_tensor"): 0.12,
          ("f8e5m2", "per_channel"): 0.22, ("f8e5m2", "per_tensor"): 0.22}  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in (*DENSE, *MIXTURES)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return cases.save(cases.CONFIGS[request.param](), tmp_path_factory.mktemp(request.param), tokens=16)


def logits(path: Path, saved: Saved, ranks: int = 1, **options) -> torch.Tensor:
    return cases.on_ranks(ranks, lambda comm: Runner.open(path, comm, **options).chunk(saved.ids, 0, 16, 16, 32))[0]


@pytest.mark.parametrize(("dtype", "scheme"), list(BOUNDS))
def test_written_checkpoint_loads_and_equals_quantising_while_loading(saved: Saved, tmp_path: Path, dtype: str, scheme: str) -> None:
    """Two ways to the same numbers at 1 and 4 ranks; per tensor they differ where the hub fuses q, k, v, which then share one scale."""
    quantize.quantize(saved.path, dtype, scheme, tmp_path / "out")
    assert (tmp_path / "out" / hub.SINGLE).stat().st_size < (saved.path / hub.SINGLE).stat().st_size
    how = quantization.parse(dtype, scheme)
    written, loading = logits(tmp_path / "out", saved), logits(saved.path, saved, quantization=how)
    assert (written - logits(tmp_path / "out", saved, 4)).abs().max() < 1e-4
    assert (loading - logits(saved.path, saved, 4, quantization=how)).abs().max() < 1e-4
    if scheme == "per_channel":
        assert (written - loading).abs().max() < 1e-4
    model_type = hub.read_config(saved.path)["model_type"]
    if model_type not in (*MIXTURES, "olmo2"):  # a flipped expert, or the norm of a small summand, moves a logit by more than rounding
        assert 0 < (written - saved.logits).abs().max() / saved.logits.abs().max() < BOUNDS[dtype, scheme]


def test_int8_by_hand() -> None:
    w = torch.tensor([[1.0, -0.5, 0.25], [0.0, 10.0, -20.0]])
    how = quantization.parse("int8", "per_channel_symmetric")
    scale = quantization.scale_of(w, how)
    assert scale.tolist() == [[pytest.approx(1 / 127)], [pytest.approx(20 / 127)]]
    assert quantization.quantise(w, scale, how).tolist() == [[127, -64, 32], [0, 64, -127]] or quantization.quantise(w, scale, how)[
        0, 1
    ] in (
        -63,
        -64,
    )


def test_float8_e4m3_ends_at_240_as_on_neuron() -> None:
    how = quantization.parse("f8e4m3", "per_tensor")
    w = torch.tensor([[480.0, -480.0, 1.0]])
    scale = quantization.scale_of(w, how)
    assert scale.item() == 2.0 and quantization.quantise(w, scale, how).float().tolist() == [[240.0, -240.0, 0.5]]
    assert ops.to_kv(torch.tensor([1e6, -1e6, 3.0]), torch.float8_e4m3fn).float().tolist() == [240.0, -240.0, 3.0]


def test_zero_weights_stay_zero() -> None:
    how = quantization.parse("f8e4m3", "per_channel")
    w = torch.zeros(2, 4)
    assert not quantization.quantise(w, quantization.scale_of(w, how), how).float().any()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_kv_in_float8(kv_dtype: torch.dtype, tmp_path: Path) -> None:
    """Half the bytes of bf16; prefill, decode and verify stay within 15 % of the largest logit, and no NaN comes of outliers."""
    saved = cases.save(cases.CONFIGS["llama"](), tmp_path)
    with torch.no_grad():
        runner = Runner.open(tmp_path, Solo(), kv_dtype=kv_dtype)
        got = cases.run(runner, saved.ids, 16)
    assert runner.kv.layers[0][0].element_size() == 1
    assert 0 < (got - saved.logits).abs().max() < 0.15 * saved.logits.abs().max()


def test_quantising_twice_or_otherwise_is_refused(saved: Saved, tmp_path: Path) -> None:
    quantize.quantize(saved.path, "int8", "per_channel", tmp_path / "a")
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize.quantize(tmp_path / "a", "int8", "per_channel", tmp_path / "b")
    with pytest.raises(ConfigError, match="quantised to int8 already; leave quantization out"):
        models.check(hub.read_config(tmp_path / "a"), tp=1, max_model_len=16, quantization="f8e4m3")
    with pytest.raises(ConfigError, match="not empty; name a new directory"):
        quantize.quantize(saved.path, "int8", "per_channel", tmp_path / "a")


def test_quantised_weight_without_scale_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved = cases.save(cases.CONFIGS["llama"](), tmp_path / "m", tokens=4)
    quantize.quantize(saved.path, "int8", "per_channel", tmp_path / "q")
    held = load_file(tmp_path / "q" / "model.safetensors")
    del held["model.layers.0.self_attn.q_proj.scale"]
    save_file(held, tmp_path / "q" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj.weight' is stored as torch.int8, but the checkpoint holds no scale"):
        Runner.open(tmp_path / "q", Solo())


@pytest.mark.parametrize(("ranks", "quantization"), [(1, None), (2, None), (4, "int8"), (2, "f8e4m3")])
def test_presharded_equals_the_checkpoint(
    saved: Saved, tmp_path: Path, ranks: int, quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    out, seen = tmp_path / "out", []
    manifest = presharded.shard(saved.path, ranks, out, quantization=quantization, progress=lambda done, total: seen.append((done, total)))
    assert sorted(p.name for p in (out / "weights").iterdir()) == [f"tp{r}_sharded_checkpoint.safetensors" for r in range(ranks)]
    assert seen[-1] == (2 * ranks, 2 * ranks) and manifest.tp == ranks and manifest.quantization == quantization
    config = hub.read_config(out)

    def work(comm):
        runner = Runner.open(saved.path, comm, quantization=quantization)
        options = {"dtype": torch.float32, "rank": comm.rank, "ranks": ranks, "quantization": quantization}
        mapped = presharded.open_weights(out, config, runner.arch, **options)
        for ours, theirs in zip([mapped["top"], *mapped["layers"]], [runner.weights["top"], *runner.weights["layers"]], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(ours[n].dtype == t.dtype and torch.equal(ours[n].float(), t.float()) for n, t in theirs.items())

    with caplog.at_level(logging.INFO):
        cases.on_ranks(ranks, work)
    assert "presharded weights mapped in" in caplog.text


def test_presharded_for_another_deployment_is_refused(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    presharded.shard(saved.path, 2, out)
    config = hub.read_config(out)
    arch = models.architecture(config)

    def open_(**options):
        return presharded.open_weights(out, config, arch, **{"dtype": torch.float32, "ranks": 2, **options})

    for options, message in (
        ({"ranks": 4}, "cut for 2 ranks, not 4; write tensor_parallel: 2"),
        ({"dtype": torch.bfloat16}, "stored in fp32; write dtype: fp32"),
        ({"fused": False}, "fused_qkv: true"),
        ({"quantization": "int8"}, "quantization None; leave quantization out"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_(**options)
    file = presharded.file_of(out, 1)
    shutil.copy(file, tmp_path / "kept")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="tp1_sharded_checkpoint.safetensors has .* bytes, the manifest says"):
        open_()
    file.unlink()
    with pytest.raises(CheckpointError, match="does not exist, the manifest says"):
        open_()
    shutil.copy(tmp_path / "kept", file)
    found = json.loads((out / presharded.MANIFEST).read_text())
    (out / presharded.MANIFEST).write_text(json.dumps({**found, "format": 99}))
    with pytest.raises(CheckpointError, match="has format 99"):
        open_()


def test_plain_directory_opens_the_same_way(saved: Saved) -> None:
    config = hub.read_config(saved.path)
    arch = models.architecture(config)
    held = presharded.open_weights(saved.path, config, arch, dtype=torch.float32)
    again = weights.load(arch, models.family(config), hub.Checkpoint(saved.path), dtype=torch.float32)
    assert torch.equal(held["top"]["embed.w"], again["top"]["embed.w"])
