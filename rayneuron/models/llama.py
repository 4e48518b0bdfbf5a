"""Llama, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from typing import Any

from rayneuron.models import rope
from rayneuron.models.arch import Arch
from rayneuron.models.rules import Rules, both

PREFIX = "model.layers.{}."
IGNORE = ("rotary_emb.inv_freq",)


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    heads, positions = c["num_attention_heads"], c["max_position_embeddings"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    return Arch(
        c["model_type"], c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], heads, c.get("num_key_value_heads") or heads,
        head_dim, c["intermediate_size"], positions, c.get("hidden_act", "silu"), eps=c.get("rms_norm_eps", 1e-6),
        rope=rope.read(c, head_dim, positions, max_model_len=max_model_len), windows=windows(c),
        qk_norm=c["model_type"].startswith("qwen3"), tied=c.get("tie_word_embeddings", False), biased=biased(c),
    )  # fmt: skip


def biased(c: dict[str, Any]) -> tuple[str, ...]:
    """Which products have a bias: Qwen2's q, k, v always; others by `attention_bias` and `mlp_bias`."""
    if c["model_type"] == "qwen2":
        return ("q", "k", "v")
    return ("q", "k", "v", "o") * bool(c.get("attention_bias")) + ("gate", "up", "down") * bool(c.get("mlp_bias"))


def windows(c: dict[str, Any]) -> tuple[int, ...]:
    """A sliding window a layer. `use_sliding_window` false switches it off; `layer_types` or `max_window_layers` say which layers slide."""
    size, layers = c.get("sliding_window") or 0, c["num_hidden_layers"]
    qwen = c["model_type"].startswith("qwen")
    if not size or not c.get("use_sliding_window", c["model_type"] in ("mistral", "mixtral")):
        return ()
    if c.get("layer_types"):
        return tuple(size if kind == "sliding_attention" else 0 for kind in c["layer_types"])
    first = c.get("max_window_layers", 28) if qwen else 0
    return tuple(size if i >= first else 0 for i in range(layers))


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return {"embed.w": "model.embed_tokens.weight", "norm.w": "model.norm.weight", "head.w": "lm_head.weight"}


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return attention(a) | both({n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}, a.biased)


def attention(a: Arch) -> Rules:
    """The attention half and both norms."""
    qk = {"q_norm.w": "self_attn.q_norm.weight", "k_norm.w": "self_attn.k_norm.weight"} if a.qk_norm else {}
    return both({n: f"self_attn.{n}_proj" for n in "qkvo"}, a.biased) | qk | {
        "ln1.w": "input_layernorm.weight", "ln2.w": "post_attention_layernorm.weight"}  # fmt: skip
