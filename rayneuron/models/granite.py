"""Granite: Llama with factors on embeddings, scores, summands and logits; granitemoe a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import refuse
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, all_experts

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json.

    Summands are not multiplied: the residual is held divided by that factor instead, which every norm takes out again if its eps is of
    that size too. So a layer is Llama's.
    """
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        if not (c[name] or 0) > 0:
            raise CheckpointError(f"config.json sets {name}: {c[name]!r}, where a number above 0 is needed")
    if moe := c["model_type"] == "granitemoe":
        refuse(c, num_local_experts=None, num_experts_per_tok=None)
    base, factor = llama.arch(c, max_model_len), float(c["residual_multiplier"])
    mixture = {"experts": c["num_local_experts"], "top_k": c["num_experts_per_tok"]} if moe else {}
    return replace(
        base, eps=base.eps / factor**2, embed_scale=c["embedding_multiplier"] / factor, attention_scale=float(c["attention_multiplier"]),
        logits_scale=float(c["logits_scaling"]), **mixture,
    )  # fmt: skip


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    if not a.experts:
        return llama.layer(a, i)
    e = "block_sparse_moe."
    return llama.attention(a) | {
        "router.w": e + "router.layer.weight", "gate.w up.w": (e + "input_linear.weight", lambda t: t.chunk(2, 1)),
        "down.w": (e + "output_linear.weight", all_experts),
    }  # fmt: skip
