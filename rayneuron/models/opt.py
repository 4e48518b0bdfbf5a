"""OPT, OPT-IML, and the 350m form: normalised after the residual, embeddings narrower than the model."""

from __future__ import annotations

from typing import Any

from rayneuron.models.arch import Arch
from rayneuron.models.rules import Rules, both

BASE = "model."
PREFIX = "model.decoder.layers.{}."


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    heads = c["num_attention_heads"]
    biased = ("q", "k", "v", "o", "up", "down") if c.get("enable_bias", True) else ()
    return Arch(
        c["model_type"], c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], heads, heads, c["hidden_size"] // heads,
        c["ffn_dim"], c["max_position_embeddings"], c.get("activation_function", "relu"), gated=False, norm="layer",
        post_norm=not c.get("do_layer_norm_before", True), position="learned", position_offset=2,
        embed=c.get("word_embed_proj_dim") or c["hidden_size"], tied=c.get("tie_word_embeddings", True),
        norm_weights=c.get("layer_norm_elementwise_affine", True), final_norm=not c.get("_remove_final_layer_norm", False), biased=biased,
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
