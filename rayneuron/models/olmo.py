"""OLMo, the first: Llama whose layer norms have no weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX
from rayneuron.models.rules import Rules

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    base = llama.arch({**c, "rms_norm_eps": 1e-5}, max_model_len)
    return replace(base, norm="layer", norm_weights=False, clip_qkv=float(c["clip_qkv"] or 0))


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return {"embed.w": "model.embed_tokens.weight", "head.w": "lm_head.weight"}


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return llama.products(a)
