"""GLM-4: rope on the neighbours of half a head, gate and up in one product; glm4 with norms around attention and feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import refuse
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, both, halves

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    refuse(c, head_dim=None)
    base = llama.arch(c, max_model_len)
    return replace(base, biased=base.biased[:3], norms="around" if c["model_type"] == "glm4" else "before")


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    around = {"o_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"} if a.norms == "around" else {}
    feed: Rules = {"gate.w up.w": ("mlp.gate_up_proj.weight", halves), "down.w": "mlp.down_proj.weight"}
    return llama.attention(a) | feed | both(around, ())
