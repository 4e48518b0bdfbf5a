"""DBRX: clipped q, k, v; layer norms without bias; all experts of a layer in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayneuron.errors import CheckpointError
from rayneuron.models import rope
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import head_size, refuse, section
from rayneuron.models.rules import Convert, Rules, stacked

if TYPE_CHECKING:
    from torch import Tensor

BASE = "transformer."
PREFIX = "transformer.blocks.{}."


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json; attention and experts have a section each."""
    attn, ffn = section(c, "attn_config"), section(c, "ffn_config")
    refuse(c, tie_word_embeddings=True)
    norm, act, clip = ffn["moe_normalize_expert_weights"], (ffn["ffn_act_fn"] or {}).get("name", "silu"), attn["clip_qkv"]
    if norm not in (None, 1.0) or not clip or not isinstance(act, str):
        raise CheckpointError(
            f"config.json sets ffn_config.moe_normalize_expert_weights: {norm!r}, attn_config.clip_qkv: {clip!r}, ffn_config.ffn_act_fn: "
            f"{act!r:.60}; possible are null or 1.0, a number above 0, and an object with the name of an activation"
        )
    head_dim, positions = head_size(c["d_model"], c["n_heads"]), c["max_seq_len"]
    trained = {"rope_theta": attn["rope_theta"]} if "rope_theta" in attn else {}  # the hub's file has it there, transformers 5 elsewhere
    found = rope.read({**trained, **c}, head_dim, positions, max_model_len=max_model_len)
    if trained and trained["rope_theta"] != found.theta:
        raise CheckpointError(f"config.json contradicts itself: attn_config.rope_theta {trained['rope_theta']!r}, rope_theta {found.theta}")
    return Arch(
        c["model_type"], c["vocab_size"], c["d_model"], c["n_layers"], c["n_heads"], attn["kv_n_heads"], head_dim, ffn["ffn_hidden_size"],
        positions, act, norm="layer", rope=found, clip_qkv=float(clip), experts=ffn["moe_num_experts"], top_k=ffn["moe_top_k"],
        renormalise=norm is not None,
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
