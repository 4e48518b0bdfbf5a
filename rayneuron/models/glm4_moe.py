"""GLM-4.5 to 4.7: a mixture of experts behind the first layers, chosen by corrected sigmoids, beside one that every token has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama, qwen_moe
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules

__all__ = ["IGNORE", "PREFIX", "arch", "further", "layer", "top"]

AHEAD = 4  # layers behind the last that guess further tokens; at most so many


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    if (c["n_group"], c["topk_group"]) != (1, 1):
        said = f"n_group: {c['n_group']}, topk_group: {c['topk_group']}"
        raise CheckpointError(f"config.json sets {said}; experts are not chosen by groups here, so each must be 1")
    base = llama.arch(c, max_model_len)
    return replace(
        base, biased=base.biased[:3], qk_norm=c["use_qk_norm"], ffn=c["moe_intermediate_size"], dense_ffn=c["intermediate_size"],
        dense_layers=tuple(range(min(c["first_k_dense_replace"], base.layers))), experts=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"], renormalise=c["norm_topk_prob"], sigmoid=True, corrections=True,
        routed_scale=c["routed_scaling_factor"], shared_ffn=c["n_shared_experts"] * c["moe_intermediate_size"],
    )  # fmt: skip


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    if i in a.dense_layers:
        return llama.layer(a, i)
    corrections: Rules = {"corrections.w": "mlp.gate.e_score_correction_bias"}
    return llama.attention(a) | qwen_moe.mixture(a, "shared_experts") | corrections


def further(a: Arch) -> tuple[str, ...]:
    """What names begin with that are there and not read: of layers that guess further tokens."""
    return tuple(PREFIX.format(a.layers + i) for i in range(AHEAD))
