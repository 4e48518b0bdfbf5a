"""OLMo 2: Llama that normalises what is added to the residual, and queries and keys over all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    return replace(llama.arch(c, max_model_len), norms="after", whole_qk_norm=True)


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    norms = {"q_norms": "self_attn.q_norm", "k_norms": "self_attn.k_norm"}
    norms |= {"o_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
    products = {n: f"self_attn.{n}_proj" for n in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    return both(products, a.biased) | both(norms, ())
