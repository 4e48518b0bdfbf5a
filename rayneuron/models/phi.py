"""Phi-1 to Phi-2: attention and feed-forward side by side, biases everywhere, rope over a part of a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import refuse
from rayneuron.models.llama import IGNORE, PREFIX
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    refuse(c, qk_layernorm=True)
    base = llama.arch({**c, "rms_norm_eps": c["layer_norm_eps"]}, max_model_len)
    return replace(base, norm="layer", gated=False, parallel=True)


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return {"embed.w": "model.embed_tokens.weight"} | both({"norm": "model.final_layernorm", "head": "lm_head"})


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    products = {n: f"self_attn.{n}_proj" for n in "qkv"} | {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}
    return both(products | {"ln1": "input_layernorm"})
