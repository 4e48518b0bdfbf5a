"""ERNIE 4.5's mixtures: experts chosen by corrected shares, beside some that every token has; some layers are dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import glm4_moe, llama
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import refuse
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules

__all__ = ["IGNORE", "PREFIX", "arch", "further", "layer", "top"]

NUMBERS = ("moe_k", "moe_num_experts", "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
SMALLEST = 1e-6  # the sum of the chosen shares is more, whatever `moe_norm_min` below it says


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    refuse(c, use_bias=True, moe_norm_min=None, **dict.fromkeys(NUMBERS))
    if c["moe_norm_min"] > SMALLEST:
        raise CheckpointError(f"config.json sets moe_norm_min: {c['moe_norm_min']}, which is not supported above {SMALLEST}")
    base = llama.arch(c, max_model_len)
    first, last, every = (c[f"moe_layer_{name}"] for name in ("start_index", "end_index", "interval"))
    last = base.layers - 1 if last == -1 else last
    return replace(
        base, ffn=c["moe_intermediate_size"], dense_ffn=c["intermediate_size"], experts=c["moe_num_experts"], top_k=c["moe_k"],
        dense_layers=tuple(i for i in range(base.layers) if (i + 1) % every or not first <= i <= last), corrections=True,
        shared_ffn=c["moe_num_shared_experts"] * c["moe_intermediate_size"],
    )  # fmt: skip


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    rules = glm4_moe.layer(a, i)
    if i not in a.dense_layers:
        rules["corrections.w"] = ("mlp.moe_statics.e_score_correction_bias", lambda t: t[0])
    return rules


def further(a: Arch) -> tuple[str, ...]:
    """What names begin with that are there and not read: of layers that guess further tokens."""
    return ("model.mtp_",)
