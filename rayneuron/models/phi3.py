"""Phi-3, Phi-3.5, Phi-4: Llama with fused products, and rope over a part of a head in some."""

from __future__ import annotations

from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama, rope
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, halves, stacked

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    kind = rope.settings(c)["rope_type"]
    if kind not in ("default", "longrope"):
        raise CheckpointError(f"rope type {kind!r} of config.json is not supported for phi3 models; supported: default, longrope")
    return llama.arch(c, max_model_len)


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return {
        "q.w k.w v.w": ("self_attn.qkv_proj.weight", stacked(a)), "o.w": "self_attn.o_proj.weight",
        "gate.w up.w": ("mlp.gate_up_proj.weight", halves), "down.w": "mlp.down_proj.weight", "ln1.w": "input_layernorm.weight",
        "ln2.w": "post_attention_layernorm.weight",
    }  # fmt: skip
