"""DBRX: clipped q, k, v; layer norms without bias; all experts of a layer in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayneuron.models import rope
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import Config
from rayneuron.models.rules import Convert, Rules, stacked

if TYPE_CHECKING:
    from torch import Tensor

BASE = "transformer."
PREFIX = "transformer.blocks.{}."


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json; attention and experts have a section each."""
    attn, ffn = Config(c["attn_config"]), Config(c["ffn_config"])
    head_dim, positions = c["d_model"] // c["n_heads"], c["max_seq_len"]
    return Arch(
        c["model_type"], c["vocab_size"], c["d_model"], c["n_layers"], c["n_heads"], attn.get("kv_n_heads", 1), head_dim,
        ffn.get("ffn_hidden_size", 3584), positions, (ffn.get("ffn_act_fn") or {}).get("name", "silu"), norm="layer",
        rope=rope.read({**c, **attn}, head_dim, positions, max_model_len=max_model_len), clip_qkv=attn.get("clip_qkv") or 0.0,
        experts=ffn.get("moe_num_experts", 4), top_k=ffn.get("moe_top_k", 1),
        renormalise=ffn.get("moe_normalize_expert_weights") is not None, tied=c.get("tie_word_embeddings", False),
    )  # fmt: skip


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return {"embed.w": BASE + "wte.weight", "norm.w": BASE + "norm_f.weight", "head.w": "lm_head.weight"}


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    norms, attn, mlp = "norm_attn_norm.norm_", "norm_attn_norm.attn.", "ffn.experts.mlp."
    return {
        "q.w k.w v.w": (attn + "Wqkv.weight", stacked(a)), "o.w": attn + "out_proj.weight", "ln1.w": norms + "1.weight",
        "ln2.w": norms + "2.weight", "router.w": "ffn.router.layer.weight", "gate.w": (mlp + "w1", by_expert(a)),
        "up.w": (mlp + "v1", by_expert(a)), "down.w": (mlp + "w2", lambda t: by_expert(a)(t).transpose(1, 2)),
    }  # fmt: skip


def by_expert(a: Arch) -> Convert:
    """[experts x F, E] to [experts, F, E]; a view."""

    def split(t: Tensor) -> Tensor:
        return t.unflatten(0, (a.experts, -1))

    return split
