"""StarCoder2: layer norms and a plain feed-forward, biases everywhere or nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    base = llama.arch({**c, "rms_norm_eps": c["norm_epsilon"]}, max_model_len)
    return replace(base, norm="layer", gated=False, biased=("q", "k", "v", "o", "up", "down") if c["use_bias"] else ())


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return llama.top(a) | both({"norm": "model.norm"})


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    products = {n: f"self_attn.{n}_proj" for n in "qkvo"} | {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    return both(products, a.biased) | both({"ln1": "input_layernorm", "ln2": "post_attention_layernorm"})
