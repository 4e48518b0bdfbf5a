"""OLMoE: a mixture of experts in every layer, queries and keys normalised over all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama, qwen_moe
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    if c["clip_qkv"] is not None:  # behind the norms, unlike elsewhere
        raise CheckpointError(f"config.json sets clip_qkv: {c['clip_qkv']}, which is not supported for olmoe models")
    mixture = {"experts": c["num_experts"], "top_k": c["num_experts_per_tok"], "renormalise": c["norm_topk_prob"]}
    return replace(llama.arch(c, max_model_len), whole_qk_norm=True, **mixture)


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return qwen_moe.layer(a, i) | both({"q_norms": "self_attn.q_norm", "k_norms": "self_attn.k_norm"}, ())
