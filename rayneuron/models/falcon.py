"""Falcon, of both generations: attention and feed-forward side by side, few KV heads."""

from __future__ import annotations

from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import rope
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import head_size, refuse
from rayneuron.models.rules import Rules, both, grouped

BASE = "transformer."
PREFIX = "transformer.h.{}."
IGNORE = ("rotary_emb.inv_freq",)


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    refuse(c, alibi=True, layer_norm_epsilon=None, activation=None)  # its alibi is rounded to bfloat16 on the way
    if "head_dim" in c:
        raise CheckpointError("config.json sets head_dim, which no falcon model has; it follows from hidden_size and num_attention_heads")
    hidden, heads, new, norms = c["hidden_size"], c["num_attention_heads"], c["new_decoder_architecture"], c["num_ln_in_parallel_attn"]
    parallel, head_dim, positions = bool(c["parallel_attn"]), head_size(hidden, heads), c["max_position_embeddings"]
    kv_heads = 1 if c["multi_query"] and not new else c["num_kv_heads"] or heads
    if not new and kv_heads not in (1 if c["multi_query"] else heads, heads):
        raise CheckpointError(
            f"config.json sets num_kv_heads: {kv_heads} of num_attention_heads: {heads}, which needs new_decoder_architecture"
        )
    if (new and not parallel) or (norms or 1) > 2 or (norms == 2 and not new and parallel):
        raise CheckpointError(
            f"config.json sets num_ln_in_parallel_attn: {norms}, parallel_attn: {parallel} and new_decoder_architecture: {bool(new)}, "
            "which no falcon model has together; two norms need all three, one any"
        )
    return Arch(
        c["model_type"], c["vocab_size"], hidden, c["num_hidden_layers"], heads, kv_heads, head_dim, c["ffn_hidden_size"] or 4 * hidden,
        positions, c["activation"], gated=False, norm="layer", eps=c["layer_norm_epsilon"],
        rope=rope.read(c, head_dim, positions, max_model_len=max_model_len), parallel=parallel,
        one_norm=parallel and (not new or norms == 1), tied=c["tie_word_embeddings"],
        biased=("qkv", "o", "up", "down") if c["bias"] else (),
    )  # fmt: skip


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return {"embed.w": BASE + "word_embeddings.weight", "head.w": "lm_head.weight"} | both({"norm": BASE + "ln_f"})


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    fused = "self_attention.query_key_value"
    names = ("ln_attn", "ln_mlp") if a.parallel and not a.one_norm else ("input_layernorm", "post_attention_layernorm")
    products = both({"o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}, a.biased)
    products |= {"q.w k.w v.w": (fused + ".weight", grouped(a))} | ({"q.b k.b v.b": (fused + ".bias", grouped(a))} if a.biased else {})
    return products | both(dict(zip(("ln1",) if a.one_norm else ("ln1", "ln2"), names, strict=False)))
