"""GPT-NeoX (Pythia, Dolly, StableLM alpha): partial rotary, attention and feed-forward side by side."""

from __future__ import annotations

from typing import Any

from rayneuron.models import bloom, rope
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import head_size
from rayneuron.models.rules import Rules, both

BASE = "gpt_neox."
PREFIX = "gpt_neox.layers.{}."
IGNORE = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    hidden, heads, positions = c["hidden_size"], c["num_attention_heads"], c["max_position_embeddings"]
    head_dim = head_size(hidden, heads)
    return Arch(
        c["model_type"], c["vocab_size"], hidden, c["num_hidden_layers"], heads, heads, head_dim, c["intermediate_size"], positions,
        c["hidden_act"], gated=False, norm="layer", eps=c["layer_norm_eps"],
        rope=rope.read(c, head_dim, positions, max_model_len=max_model_len), parallel=c["use_parallel_residual"],
        tied=c["tie_word_embeddings"], biased=("qkv", "o") if c["attention_bias"] else (),
    )  # fmt: skip


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    names: Rules = {"embed.w": BASE + "embed_in.weight", "head.w": "embed_out.weight"}
    return names | both({"norm": BASE + "final_layer_norm"})


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return bloom.rules(a, "attention", a.biased)
