"""Mixtral: Llama's attention, a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    return replace(llama.arch(c, max_model_len), experts=c["num_local_experts"], top_k=c["num_experts_per_tok"])


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    e = "block_sparse_moe.experts.{e}."
    return llama.attention(a) | {
        "router.w": "block_sparse_moe.gate.weight",
        "gate.w": e + "w1.weight",
        "up.w": e + "w3.weight",
        "down.w": e + "w2.weight",
    }
