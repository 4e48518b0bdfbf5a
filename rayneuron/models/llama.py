"""Llama, Mistral, Ministral, Qwen2, Qwen3, Seed-OSS, ERNIE 4.5, Helium."""

from __future__ import annotations

from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import rope
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import head_size, of_type
from rayneuron.models.defaults import FIELDS
from rayneuron.models.rules import Rules, both

PREFIX = "model.layers.{}."
IGNORE = ("rotary_emb.inv_freq",)


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    heads, positions, size = c["num_attention_heads"], c["max_position_embeddings"], head_dim(c)
    return Arch(
        c["model_type"], c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], heads, c["num_key_value_heads"] or heads, size,
        c["intermediate_size"], positions, c["hidden_act"], eps=c["rms_norm_eps"],
        rope=rope.read(c, size, positions, max_model_len=max_model_len), windows=windows(c),
        qk_norm=c["model_type"].startswith("qwen3"), tied=c["tie_word_embeddings"], biased=biased(c),
    )  # fmt: skip


def head_dim(c: dict[str, Any]) -> int:
    """The size of a head. Qwen2 and Qwen3 MoE have no such key among their own, but one in the file counts."""
    found: Any = c.get("head_dim")
    if found is None and ("head_dim" not in c or "head_dim" in FIELDS[c["model_type"]]):
        return head_size(c["hidden_size"], c["num_attention_heads"])
    of_type(found, int, "head_dim", c["model_type"])
    return found


def biased(c: dict[str, Any]) -> tuple[str, ...]:
    """Which products have a bias: Qwen2's q, k, v always; of other types the keys that they have say."""
    if c["model_type"] == "qwen2" or c.get("qkv_bias", False) and c["model_type"] == "qwen2_moe":
        return ("q", "k", "v")
    known = FIELDS[c["model_type"]]
    every, attention, mlp = (bool(name in known and c[name]) for name in ("use_bias", "attention_bias", "mlp_bias"))
    out = c["attention_out_bias"] if "attention_out_bias" in known else attention
    return ("q", "k", "v") * (every or attention) + ("o",) * (every or out) + ("gate", "up", "down") * (every or mlp)


def windows(c: dict[str, Any]) -> tuple[int, ...]:
    """A sliding window a layer, where the type has one. Qwen's is off unless `use_sliding_window`; `layer_types`, or else
    `max_window_layers`, say which layers of Qwen2 and Qwen3 slide."""
    known, layers = FIELDS[c["model_type"]], c["num_hidden_layers"]
    on = "sliding_window" in known and ("use_sliding_window" not in known or c["use_sliding_window"])
    size, kinds = (c["sliding_window"] or 0) if on else 0, c["layer_types"] if "layer_types" in known else None
    if kinds is None:
        first = c["max_window_layers"] if "max_window_layers" in known else 0
        return tuple(size if i >= first else 0 for i in range(layers)) if size else ()
    possible = {"full_attention": 0, "sliding_attention": size} if size else {"full_attention": 0}
    if len(kinds) != layers or any(not isinstance(kind, str) or kind not in possible for kind in kinds):
        raise CheckpointError(
            f"config.json sets layer_types: {kinds!r:.60}; with use_sliding_window: {c.get('use_sliding_window')} and sliding_window: "
            f"{c['sliding_window']} it needs {' or '.join(possible)} for each of num_hidden_layers: {layers}"
        )
    return tuple(possible[kind] for kind in kinds) if size else ()


def kinds(c: dict[str, Any], every: int) -> list[str]:
    """The kinds of layers of which one in so many is full, the last of them."""
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(c["num_hidden_layers"])]


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return {"embed.w": "model.embed_tokens.weight", "norm.w": "model.norm.weight", "head.w": "lm_head.weight"}


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return attention(a) | products(a)


def products(a: Arch) -> Rules:
    """The products of attention and of a dense feed-forward."""
    feed = ("gate", "up", "down") if a.gated else ("up", "down")
    return both({n: f"self_attn.{n}_proj" for n in "qkvo"} | {n: f"mlp.{n}_proj" for n in feed}, a.biased)


def attention(a: Arch) -> Rules:
    """The attention half and both norms."""
    qk = {"q_norm.w": "self_attn.q_norm.weight", "k_norm.w": "self_attn.k_norm.weight"} if a.qk_norm else {}
    return both({n: f"self_attn.{n}_proj" for n in "qkvo"}, a.biased) | qk | {
        "ln1.w": "input_layernorm.weight", "ln2.w": "post_attention_layernorm.weight"}  # fmt: skip
