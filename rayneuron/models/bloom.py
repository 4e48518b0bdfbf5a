"""BLOOM and BLOOMZ: positions by alibi."""

from __future__ import annotations

from typing import Any

from rayneuron.models.arch import Arch
from rayneuron.models.config_json import head_size, refuse
from rayneuron.models.rules import Rules, both, interleaved

BASE = "transformer."
PREFIX = "transformer.h.{}."


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    refuse(c, apply_residual_connection_post_layernorm=True)
    hidden, heads = c["hidden_size"], c["n_head"]
    return Arch(
        c["model_type"], c["vocab_size"], hidden, c["n_layer"], heads, heads, head_size(hidden, heads), 4 * hidden, act="gelu_new",
        gated=False, norm="layer", eps=c["layer_norm_epsilon"], position="alibi", tied=c["tie_word_embeddings"],
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
