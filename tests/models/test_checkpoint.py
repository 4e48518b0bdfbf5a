"""Model directories that are incomplete, damaged, stale or unsafe: a clear refusal each, and never wrong weights."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayneuron import models
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.models import hub, weights
from rayneuron.models.collectives import Solo
from tests.models import cases
from tests.models.cases import Runner, Saved


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return cases.save(cases.CONFIGS["llama"](), tmp_path_factory.mktemp("llama"), tokens=8)


@pytest.fixture
def folder(saved: Saved, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved.path, tmp_path / "model"))


def load(folder: Path, **options: Any) -> dict[str, Any]:
    config = hub.read_config(folder)
    allow = options.pop("allow_pickle", False)
    return weights.load(models.architecture(config), models.family(config), hub.Checkpoint(folder, allow), dtype=torch.float32, **options)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def into_shards(folder: Path, files: int = 3) -> dict[str, str]:
    """Split the checkpoint into files with an index, as the hub does."""
    held = tensors(folder)
    (folder / "model.safetensors").unlink()
    where = {n: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, n in enumerate(held)}
    for file in set(where.values()):
        save_file({n: t for n, t in held.items() if where[n] == file}, folder / file)
    (folder / hub.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


def logits_equal(folder: Path, saved: Saved) -> bool:
    with torch.no_grad():
        return bool((Runner.open(folder, Solo()).chunk(saved.ids, 0, 8, 8, 32) - saved.logits).abs().max() < 1e-4)


def test_shards_by_index_and_stray_files(saved: Saved, folder: Path) -> None:
    """Only indexed files are read: a stray file with other values of the same names changes nothing (BR-91)."""
    into_shards(folder)
    stray = {n: t + 1 for n, t in tensors(saved.path).items()}
    save_file(stray, folder / "consolidated.safetensors")
    assert logits_equal(folder, saved)


def test_shards_without_index_are_all_read(saved: Saved, folder: Path) -> None:
    into_shards(folder)
    (folder / hub.INDEX).unlink()
    assert logits_equal(folder, saved)


def test_missing_shard_is_named(folder: Path) -> None:
    file = sorted(set(into_shards(folder).values()))[1]
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file} does not exist, but the index names it"):
        load(folder)


def test_truncated_file_names_file_and_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated: tensor '\S+' ends at byte"):
        load(folder)


@pytest.mark.parametrize("size", [0, 5, 200])
def test_file_cut_within_its_header(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)
    with pytest.raises(CheckpointError, match="truncated"):
        load(folder)


def test_header_that_lies_about_sizes(folder: Path) -> None:
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    head = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + head])
    header["model.norm.weight"]["shape"] = [63]
    new = json.dumps(header).encode()
    file.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + head :])
    with pytest.raises(CheckpointError, match=r"tensor 'model.norm.weight' of shape \(63,\) does not fit its 256 bytes"):
        load(folder)


def test_the_index_decides(folder: Path, saved: Saved) -> None:
    """A tensor it puts where it is not is an error, one it leaves out is as not there, and what else a file holds is nobody's."""
    where = into_shards(folder)
    moved = dict(where)
    moved["model.norm.weight"] = next(f for f in where.values() if f != where["model.norm.weight"])
    (folder / hub.INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match="'model.norm.weight'.*the index is stale"):
        load(folder)
    del moved["model.norm.weight"]
    (folder / hub.INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match="tensor 'model.norm.weight' is missing from the checkpoint"):
        load(folder)
    (folder / hub.INDEX).write_text(json.dumps({"weight_map": where}))
    for file in set(where.values()):
        more = {n: torch.ones(3) for n in ("extra", *(n for n, f in where.items() if f != file))}
        save_file({**load_file(folder / file), **more}, folder / file)
    assert logits_equal(folder, saved)


def test_one_file_counts_before_an_index(folder: Path, saved: Saved, caplog: pytest.LogCaptureFixture) -> None:
    """As in transformers: what was saved again as one file is not replaced by the shards it was made of."""
    shutil.copy(folder / "model.safetensors", folder / "kept")
    into_shards(folder)
    for file in folder.glob("model-*"):
        save_file({n: t + 1 for n, t in load_file(file).items()}, file)
    (folder / "kept").rename(folder / "model.safetensors")
    assert logits_equal(folder, saved) and cases.reference(folder, 8).logits.equal(saved.logits)
    assert "the former is used" in caplog.text


@pytest.mark.parametrize("names", [None, [], {"a": 1}, {"a": "../x.safetensors"}, {"a": "/etc/passwd"}])
def test_index_that_names_no_files_beside_it(folder: Path, names: Any) -> None:
    into_shards(folder)
    (folder / hub.INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="has no weight_map of tensors to files beside it"):
        load(folder)


def test_duplicate_tensors_name_both_files(folder: Path) -> None:
    into_shards(folder)
    (folder / hub.INDEX).unlink()
    name = next(iter(hub.SafeFile(folder / "model-00001-of-00003.safetensors").entries))
    save_file({name: torch.zeros(1)}, folder / "z.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is in both .*safetensors and z.safetensors"):
        load(folder)


def test_missing_and_unread_tensors(folder: Path) -> None:
    held = tensors(folder)
    save_file({n: t for n, t in held.items() if n != "model.layers.1.mlp.up_proj.weight"}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'model.layers.1.mlp.up_proj.weight' is missing"):
        load(folder)
    save_file({**held, "model.layers.2.mlp.up_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"nothing in a llama model reads model.layers.2.mlp.up_proj.weight"):
        load(folder)


def test_wrong_shape_is_named(folder: Path) -> None:
    save_file({**tensors(folder), "model.layers.0.self_attn.k_proj.weight": torch.zeros(16, 64)}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"'model.layers.0.self_attn.k_proj.weight' gives k.w of shape \(16, 64\).* promises \(32, 64\)"
    ):
        load(folder)


def test_bias_that_the_config_does_not_announce_is_refused(folder: Path) -> None:
    """A bias silently left out would be silently wrong text."""
    save_file({**tensors(folder), "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="reads model.layers.0.self_attn.q_proj.bias"):
        load(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_four_cases_of_the_head(folder: Path, saved: Saved, tied: bool, head: bool, caplog: pytest.LogCaptureFixture) -> None:
    """BR-87: tied uses the embedding whatever the file holds (and says so where they differ); untied without a head is an error."""
    held = tensors(folder)
    if not head:
        del held["lm_head.weight"]
    save_file(held, folder / "model.safetensors")
    config = {**hub.read_config(folder), "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    if not tied and not head:
        with pytest.raises(CheckpointError, match="'lm_head.weight' is missing"):
            load(folder)
        return
    with caplog.at_level(logging.WARNING):
        top = load(folder)["top"]
    assert torch.equal(top["head.w"], held["model.embed_tokens.weight" if tied else "lm_head.weight"])
    assert ("the embedding is used" in caplog.text) == (tied and head)


def test_pickles_need_leave(folder: Path, saved: Saved) -> None:
    held = tensors(folder)
    (folder / "model.safetensors").unlink()
    torch.save(held, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only pickled weights .*convert them to safetensors, or set allow_pickle: true"):
        load(folder)
    got = load(folder, allow_pickle=True)
    assert torch.equal(got["top"]["embed.w"], held["model.embed_tokens.weight"])


def test_pickles_in_shards(folder: Path) -> None:
    held = tensors(folder)
    (folder / "model.safetensors").unlink()
    where = {n: f"pytorch_model-{i % 2 + 1:05}-of-00002.bin" for i, n in enumerate(held)}
    for file in set(where.values()):
        torch.save({n: t for n, t in held.items() if where[n] == file}, folder / file)
    (folder / hub.PICKLE_INDEX).write_text(json.dumps({"weight_map": where}))
    assert torch.equal(load(folder, allow_pickle=True)["top"]["norm.w"], held["model.norm.weight"])


def test_crafted_pickle_does_not_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {marker}",)

    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be read as plain weights"):
        load(folder, allow_pickle=True)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        load(folder, allow_pickle=True)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "gptj"])
def test_names_without_their_first_part(name: str, tmp_path: Path) -> None:
    """The hub's gpt2 and bloom files were saved from the bare model: `h.0.` and not `transformer.h.0.`."""
    saved = cases.save(cases.CONFIGS[name](), tmp_path, tokens=8)
    base = models.family(hub.read_config(tmp_path)).BASE
    held = {n.removeprefix(base): t.clone() for n, t in tensors(tmp_path).items()}
    assert not any(n.startswith(base) for n in held)
    save_file(held, tmp_path / "model.safetensors")
    assert logits_equal(tmp_path, saved)


def test_buffers_of_old_checkpoints_are_ignored(folder: Path, saved: Saved) -> None:
    save_file({**tensors(folder), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, folder / "model.safetensors")
    assert logits_equal(folder, saved)


def test_reads_what_safetensors_writes(folder: Path) -> None:
    """Every dtype, an empty tensor and a scalar, against the library itself."""
    from safetensors import safe_open

    kinds = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    ]
    held = {str(k): torch.arange(6).view(2, 3).to(k) for k in kinds} | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.0)}
    held |= {str(k): torch.arange(6).float().to(k) for k in (torch.float8_e4m3fn, torch.float8_e5m2)}
    save_file(held, folder / "x.safetensors")
    file = hub.SafeFile(folder / "x.safetensors")
    with safe_open(folder / "x.safetensors", "pt") as theirs:
        for name in theirs.keys():  # noqa: SIM118  safe_open is no mapping
            want = theirs.get_tensor(name)
            assert file.tensor(name).dtype == want.dtype and torch.equal(file.tensor(name).float(), want.float())


REFUSED = [
    ({"model_type": "lama"}, {}, "'lama' is not supported; did you mean 'llama'"),
    ({"model_type": None}, {}, "model_type None is not supported"),
    ({"num_attention_heads": None}, {}, "num_attention_heads"),
    ({"hidden_act": "tanhshrink"}, {}, "activation 'tanhshrink' is not supported"),
    ({}, {"tp": 64}, "tensor_parallel 64 is more than the model's 4 attention heads; write tensor_parallel: 4"),
    ({}, {"max_model_len": 4096}, "max_model_len 4096 is beyond the model's 128 positions; write max_model_len: 128 or less"),
    ({}, {"dtype": "bf61"}, "dtype 'bf61' is unknown; write bf16"),
    ({}, {"quantization": "int3"}, "quantization dtype 'int3' is unknown; one of int8, f8e4m3, f8e5m2"),
    ({}, {"kv_dtype": "int8"}, "kv_dtype int8 is not available; write f8e4m3"),
    ({"quantization_config": {"quant_method": "gguf"}}, {}, "quantised by 'gguf'.*Supported: awq .*rayneuron quantize"),
    ({}, {"capacity_factor": 1.5}, "capacity_factor 1.5 needs a mixture of experts"),
    ({}, {"shard_over_sequence": True}, "shard_over_sequence does not go with tensor parallel degree 1"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "options", "message"), REFUSED)
def test_refused_before_any_weight_is_read(folder: Path, config: dict[str, Any], options: dict[str, Any], message: str) -> None:
    raw = {k: v for k, v in {**hub.read_config(folder), **config}.items() if v is not None}
    (folder / "model.safetensors").unlink()  # so nothing can be read
    with pytest.raises((CheckpointError, ConfigError), match=message):
        models.check(raw, **{"tp": 1, "max_model_len": 64, **options})


def test_missing_keys_are_named_for_every_family() -> None:
    for name in models.FAMILIES:
        with pytest.raises(CheckpointError, match=f"config.json of a {name} model lacks '"):
            models.architecture({"model_type": name})


def test_rope_scaling_reaches_further(folder: Path) -> None:
    raw = {**hub.read_config(folder), "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
    assert models.check(raw, tp=1, max_model_len=512).rope.factor == 4.0
    with pytest.raises(ConfigError, match="beyond the model's 512 positions"):
        models.check(raw, tp=1, max_model_len=513)


def test_no_directory_and_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a model directory"):
        hub.read_config(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="config.json does not exist"):
        hub.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json cannot be read as JSON"):
        hub.read_config(tmp_path)
    with pytest.raises(CheckpointError, match="holds no .*safetensors file"):
        hub.Checkpoint(tmp_path)
