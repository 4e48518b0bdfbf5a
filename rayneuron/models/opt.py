"""OPT, OPT-IML, and the 350m form: normalised after the residual, embeddings narrower than the model."""

from __future__ import annotations

from typing import Any

from rayneuron.models.arch import Arch
from rayneuron.models.config_json import head_size
from rayneuron.models.rules import Rules, both

BASE = "model."
PREFIX = "model.decoder.layers.{}."


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    biased = ("q", "k", "v", "o", "up", "down") if c["enable_bias"] else ()
    return Arch(
        c["model_type"], c["vocab_size"], hidden, c["num_hidden_layers"], heads, heads, head_size(hidden, heads), c["ffn_dim"],
        c["max_position_embeddings"], c["activation_function"], gated=False, norm="layer", post_norm=not c["do_layer_norm_before"],
        position="learned", position_offset=2, embed=c["word_embed_proj_dim"] or hidden, tied=c["tie_word_embeddings"],
        norm_weights=c["layer_norm_elementwise_affine"], final_norm=not c["_remove_final_layer_norm"], biased=biased,
    )  # fmt: skip


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    d = "model.decoder."
    names: Rules = {"embed.w": d + "embed_tokens.weight", "position.w": d + "embed_positions.weight", "head.w": "lm_head.weight"}
    if a.embed != a.hidden:
        names |= {"project_in.w": d + "project_in.weight", "project_out.w": d + "project_out.weight"}
    if a.final_norm and not a.post_norm:
        names |= both({"norm": d + "final_layer_norm"} if a.norm_weights else {})
    return names


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    norms = {"ln1": "self_attn_layer_norm", "ln2": "final_layer_norm"} if a.norm_weights else {}
    return both({n: f"self_attn.{n}_proj" for n in "qkv"} | {"o": "self_attn.out_proj", "up": "fc1", "down": "fc2"}, a.biased) | both(norms)
