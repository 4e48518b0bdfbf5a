"""Qwen2 and Qwen3 mixtures of experts; some layers may be dense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json. The window of Qwen3's mixtures, unlike Qwen3's, is that of every layer."""
    if c["model_type"] == "qwen2_moe":
        c = {**c, "layer_types": alternating(c) if c["layer_types"] is None else c["layer_types"]}
    base, step, only = llama.arch(c, max_model_len), c["decoder_sparse_step"], c["mlp_only_layers"] or ()
    if not all(type(i) is int for i in only):
        raise CheckpointError(f"config.json sets mlp_only_layers: {only!r:.60}, where numbers of layers are needed")
    dense = tuple(i for i in range(base.layers) if i in only or (i + 1) % step)
    return replace(
        base, ffn=c["moe_intermediate_size"], dense_ffn=c["intermediate_size"], dense_layers=dense, experts=c["num_experts"],
        top_k=c["num_experts_per_tok"], renormalise=c["norm_topk_prob"],
        shared_ffn=c.get("shared_expert_intermediate_size", 0) if c["model_type"] == "qwen2_moe" else 0,
        shared_gate=c["model_type"] == "qwen2_moe",
    )  # fmt: skip


def alternating(c: dict[str, Any]) -> list[str]:
    """The kinds of layers of Qwen2's mixtures where none are said: of the first `max_window_layers` every other one slides."""
    first = c["max_window_layers"] if c["use_sliding_window"] else 0
    return ["full_attention" if i % 2 or i >= first else "sliding_attention" for i in range(c["num_hidden_layers"])]


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    if i in a.dense_layers:
        return llama.layer(a, i)
    gate = both({"shared_router": "mlp.shared_expert_gate"}, ()) if a.shared_gate else {}
    return llama.attention(a) | mixture(a, "shared_expert") | gate


def mixture(a: Arch, shared: str) -> Rules:
    """A router, its experts, and the one that every token has, by the name of that."""
    names = ("gate", "up", "down")
    beside = both({f"shared_{n}": f"mlp.{shared}.{n}_proj" for n in names}, ()) if a.shared_ffn else {}
    return {"router.w": "mlp.gate.weight"} | beside | {f"{n}.w": "mlp.experts.{e}." + n + "_proj.weight" for n in names}
