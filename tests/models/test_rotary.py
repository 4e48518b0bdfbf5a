"""Rotary tables of every kind and spelling equal transformers', near and far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rayneuron import models
from rayneuron.errors import CheckpointError
from rayneuron.models import rotary

HEAD = 64
BASE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
SHORT, LONG = [1.0 + i / 50 for i in range(HEAD // 2)], [2.0 + i / 3 for i in range(HEAD // 2)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 4096},
    "yarn_deepseek": {"factor": 8.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16},
    "yarn_untruncated": {"factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": 4096, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "factor": 8.0, "original_max_position_embeddings": 4096},
}
POSITIONS = (0, 1000, 9000, 40000)


def kind_of(name: str) -> str:
    return name.split("_")[0]


def spelled(name: str, spelling: str, theta: float) -> dict[str, Any]:
    """config.json with the rope settings in one of the ways found on the hub."""
    given, kind = KINDS[name], kind_of(name)
    if spelling == "rope_parameters":
        return {**BASE, "rope_parameters": {"rope_type": kind, "rope_theta": theta, **given}}
    key = {"rope_type": "rope_type", "type": "type"}[spelling]
    scaling = None if kind == "default" else {key: kind, **given}
    return {**BASE, "rope_theta": theta, "rope_scaling": scaling}


def theirs(name: str, theta: float, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [D/2] of transformers; a fresh module each, since it keeps state between calls."""
    config = tf.LlamaConfig(
        **{k: v for k, v in BASE.items() if k != "model_type"},
        rope_parameters={"rope_type": kind_of(name), "rope_theta": theta, **KINDS[name]},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[position]]))
    return cos[0, 0, : HEAD // 2], sin[0, 0, : HEAD // 2]


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters"])
@pytest.mark.parametrize("name", list(KINDS))
def test_tables_equal_transformers(name: str, spelling: str) -> None:
    for position in POSITIONS:
        longest = 4096 if position < 4096 else 65536  # longrope takes the table that the deployment's length needs
        arch = models.architecture(spelled(name, spelling, 50000.0), longest)
        cos, sin = rotary.tables(arch, rotary.frequencies(arch.rope), torch.tensor([[position]], dtype=torch.int32), torch.float32)
        want = theirs(name, 50000.0, position)
        # 40,000 radians in float32 have steps of 0.004, so one bit of the frequency shows; dynamic computes a power of float32 there.
        assert (cos[0, 0, 0] - want[0]).abs().max() < 1e-3 and (sin[0, 0, 0] - want[1]).abs().max() < 1e-3


@pytest.mark.parametrize("name", list(KINDS))
def test_kinds_differ(name: str) -> None:
    """A kind that were ignored would pass nothing here: its table is not the default one."""
    if name == "default":
        return
    arch, plain = (models.architecture(spelled(n, "rope_type", 50000.0), 65536) for n in (name, "default"))
    at = torch.tensor([[9000]], dtype=torch.int32)
    tables = [rotary.tables(a, rotary.frequencies(a.rope), at, torch.float32)[0] for a in (arch, plain)]
    assert (tables[0] - tables[1]).abs().max() > 0.1


def test_dynamic_does_not_depend_on_neighbours() -> None:
    arch = models.architecture(spelled("dynamic", "type", 10000.0))
    alone = rotary.tables(arch, rotary.frequencies(arch.rope), torch.tensor([[500]], dtype=torch.int32), torch.float32)
    beside = rotary.tables(arch, rotary.frequencies(arch.rope), torch.tensor([[500], [40000]], dtype=torch.int32), torch.float32)
    assert torch.equal(alone[0][0], beside[0][0])


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="'ntk_magic' is unknown; known: default, linear, dynamic, yarn, llama3, longrope"):
        models.architecture({**BASE, "rope_scaling": {"rope_type": "ntk_magic", "factor": 2.0}})


def test_missing_setting_is_named() -> None:
    with pytest.raises(CheckpointError, match="'llama3' needs 'low_freq_factor'"):
        models.architecture({**BASE, "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8192}})


def test_pairs_rotate_neighbours() -> None:
    """By hand: (1, 0) turned by a right angle is (0, 1), on neighbours or on halves."""
    cos, sin = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 2)
    x = torch.tensor([1.0, 0.0, 3.0, 0.0, 9.0]).view(1, 1, 1, 5)
    assert rotary.rotate(x, cos, sin, pairs=True).flatten().tolist() == [0.0, 1.0, 0.0, 3.0, 9.0]
    assert rotary.rotate(x, cos, sin).flatten().tolist() == [-3.0, 0.0, 1.0, 0.0, 9.0]
