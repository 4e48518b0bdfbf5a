"""Qwen3 mixture of experts; some layers may be dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json. Its window, unlike Qwen3's, is that of every layer."""
    base, step, only = llama.arch(c, max_model_len), c["decoder_sparse_step"], c["mlp_only_layers"] or ()
    if not all(type(i) is int for i in only):
        raise CheckpointError(f"config.json sets mlp_only_layers: {only!r:.60}, where numbers of layers are needed")
    dense = tuple(i for i in range(base.layers) if i in only or (i + 1) % step)
    return replace(
        base, ffn=c["moe_intermediate_size"], dense_ffn=c["intermediate_size"], dense_layers=dense, experts=c["num_experts"],
        top_k=c["num_experts_per_tok"], renormalise=c["norm_topk_prob"],
    )  # fmt: skip


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    if i in a.dense_layers:
        return llama.layer(a, i)
    return (
        llama.attention(a)
        | {"router.w": "mlp.gate.weight"}
        | {f"{n}.w": "mlp.experts.{e}." + n + "_proj.weight" for n in ("gate", "up", "down")}
    )
