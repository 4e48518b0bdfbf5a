"""GPT-NeoX (Pythia, Dolly, StableLM alpha): partial rotary, attention and feed-forward side by side."""

from __future__ import annotations

from typing import Any

from rayneuron.models import bloom, rope
from rayneuron.models.arch import Arch
from rayneuron.models.rules import Rules, both

BASE = "gpt_neox."
PREFIX = "gpt_neox.layers.{}."
IGNORE = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    hidden, heads, positions = c["hidden_size"], c["num_attention_heads"], c["max_position_embeddings"]
    named = {"partial_rotary_factor": c.get("rotary_pct", 0.25), "rope_theta": c.get("rotary_emb_base", 10000.0), **c}
    return Arch(
        c["model_type"], c["vocab_size"], hidden, c["num_hidden_layers"], heads, heads, hidden // heads, c["intermediate_size"], positions,
        c.get("hidden_act", "gelu"), gated=False, norm="layer", eps=c.get("layer_norm_eps", 1e-5),
        rope=rope.read(named, hidden // heads, positions, max_model_len=max_model_len), parallel=c.get("use_parallel_residual", True),
        tied=c.get("tie_word_embeddings", False), biased=("qkv", "o") if c.get("attention_bias", True) else (),
    )  # fmt: skip


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    names: Rules = {"embed.w": BASE + "embed_in.weight", "head.w": "embed_out.weight"}
    return names | both({"norm": BASE + "final_layer_norm"})


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return bloom.rules(a, "attention", a.biased)
