"""StableLM 2 and StableLM 3B: layer norms, rope over a part of a head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import refuse
from rayneuron.models.llama import IGNORE, PREFIX
from rayneuron.models.rules import Rules, both
from rayneuron.models.starcoder2 import top

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    refuse(c, qk_layernorm=True)
    base = llama.arch({**c, "rms_norm_eps": c["layer_norm_eps"]}, max_model_len)
    return replace(base, norm="layer", parallel=c["use_parallel_residual"], biased=("q", "k", "v") if c["use_qkv_bias"] else ())


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    norms = {"ln1": "input_layernorm"} | ({} if a.parallel else {"ln2": "post_attention_layernorm"})
    return llama.products(a) | both(norms)
