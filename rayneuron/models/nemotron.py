"""Nemotron and Arcee: a plain feed-forward with the square of ReLU; Nemotron's layer norms count from 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama, starcoder2
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    if c["model_type"] == "arcee":
        return replace(llama.arch(c, max_model_len), gated=False)
    base = llama.arch({**c, "rms_norm_eps": c["norm_eps"]}, max_model_len)
    return replace(base, gated=False, norm="layer", norm_offset=True)


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return starcoder2.top(a) if a.norm == "layer" else llama.top(a)


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    norms = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
    return llama.products(a) | both(norms, None if a.norm == "layer" else ())
