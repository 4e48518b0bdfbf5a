"""BLOOM and BLOOMZ: positions by alibi."""

from __future__ import annotations

from typing import Any

from rayneuron.models.arch import Arch
from rayneuron.models.config_json import either, refuse
from rayneuron.models.rules import Rules, both, interleaved

BASE = "transformer."
PREFIX = "transformer.h.{}."


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json, old names (n_embed, num_attention_heads) included."""
    refuse(c, apply_residual_connection_post_layernorm=True)
    hidden, layers, heads = (
        either(c, "hidden_size", "n_embed"),
        either(c, "n_layer", "num_hidden_layers"),
        either(c, "n_head", "num_attention_heads"),
    )
    return Arch(
        c["model_type"], c["vocab_size"], hidden, layers, heads, heads, hidden // heads, 4 * hidden, act="gelu_new", gated=False,
        norm="layer", eps=c.get("layer_norm_epsilon", 1e-5), position="alibi", tied=c.get("tie_word_embeddings", True),
    )  # fmt: skip


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    names: Rules = {"embed.w": BASE + "word_embeddings.weight", "head.w": "lm_head.weight"}
    return names | both({"embed_norm": BASE + "word_embeddings_layernorm", "norm": BASE + "ln_f"})


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return rules(a, "self_attention")


def rules(a: Arch, attn: str, biased: tuple[str, ...] = ("qkv", "o")) -> Rules:
    """The names BLOOM and GPT-NeoX share; `biased`: which attention products have a bias."""
    three, fused = interleaved(a), attn + ".query_key_value"
    names = both({"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h", "ln1": "input_layernorm", "ln2": "post_attention_layernorm"})
    names |= both({"o": attn + ".dense"}, biased) | {"q.w k.w v.w": (fused + ".weight", three)}
    return names | ({"q.b k.b v.b": (fused + ".bias", three)} if "qkv" in biased else {})
