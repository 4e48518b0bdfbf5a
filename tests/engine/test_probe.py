"""Weights that are none, or are not numbers: refused before anything is served, alone, in groups and in stages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayneuron import LLM
from rayneuron.errors import CheckpointError


def spoiled(source: Path, folder: Path, *names: str, value: float) -> Path:
    """A copy of a model whose tensors, or those of `names`, hold one value."""
    shutil.copytree(source, folder)
    held = load_file(folder / "model.safetensors")
    save_file({n: torch.full_like(t, value) if not names or n in names else t for n, t in held.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("names", "value", "options", "message"),
    [
        ((), 0.0, {}, "all 512 logits of the model are 0: its weights are zero or constant"),
        ((), 0.0, {"tensor_parallel": 2}, "all 512 logits of the model are 0"),
        (("model.layers.0.mlp.up_proj.weight",), float("nan"), {}, "logits are not finite: its weights hold NaN or infinity"),
        pytest.param(("model.layers.0.mlp.up_proj.weight",), float("inf"), {"pipeline_parallel": 2}, "not finite", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_without_weights_does_not_start(
    tiny: Path, tmp_path: Path, names: tuple[str, ...], value: float, options: dict[str, Any], message: str
) -> None:
    path = spoiled(tiny, tmp_path / "model", *names, value=value)
    with pytest.raises(CheckpointError, match=message):
        LLM(path, dtype="fp32", max_model_len=64, max_num_seqs=2, threads=1, **options)
    children = [pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    assert not [pid for pid in children if "rayneuron.group.worker" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_generation_config_is_read_before_any_rank_starts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayneuron.group import group

    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text("[]")
    monkeypatch.setattr(group.Group, "start", lambda self: pytest.fail("a rank was started"))
    with pytest.raises(CheckpointError, match="generation_config.json holds no JSON object"):
        LLM(tmp_path / "model", dtype="fp32", max_model_len=64, max_num_seqs=2, tensor_parallel=2)
