"""Gemma, the first: norms that count from 1. Gemma 2 and the text models of 3: norms around attention and feed-forward, windows, soft caps,
two kinds of rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama, rope
from rayneuron.models.arch import Arch, Rope
from rayneuron.models.config_json import of_type, refuse
from rayneuron.models.defaults import ROPE_THETA
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]

# Of Gemma 3: what the hub calls the theta of each kind of layer, and transformers its default.
THETAS = {"full_attention": ("rope_theta", "global"), "sliding_attention": ("rope_local_base_freq", "local")}


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    if c["model_type"] == "gemma":
        refuse(c, use_bidirectional_attention=True)
        return replace(llama.arch(c, max_model_len), norm_offset=True, embed_scale=c["hidden_size"] ** 0.5)
    refuse(c, use_bidirectional_attention=True, final_logit_softcapping=0.0, attn_logit_softcapping=0.0)
    third = c["model_type"] == "gemma3_text"
    every = c.get("sliding_window_pattern", 6) if third else 2
    of_type(every, int, "sliding_window_pattern", c["model_type"])
    kinds = c["layer_types"]
    if kinds is None:
        kinds = llama.kinds(c, every)
    ropes = {kind: rope.of_kind(c, kind, theta(c, kind)) if third else c for kind in rope.BY_KIND}
    base = llama.arch({**ropes["full_attention"], "layer_types": kinds, "hidden_act": c["hidden_activation"]}, max_model_len)
    local: Rope = rope.read(ropes["sliding_attention"], base.head_dim, base.max_positions, max_model_len=max_model_len)
    return replace(
        base, norms="around", norm_offset=True, qk_norm=third, attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        embed_scale=c["hidden_size"] ** 0.5, local_rope=local if third else None, softcap_logits=c["final_logit_softcapping"] or 0.0,
        softcap_scores=0.0 if third else c["attn_logit_softcapping"] or 0.0,
    )  # fmt: skip


def theta(c: dict[str, Any], kind: str) -> Any:
    """Of one kind of layers of Gemma 3."""
    name, default = THETAS[kind]
    return c.get(name, ROPE_THETA["gemma3_text"][default])


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    if a.norms == "before":
        return llama.layer(a, i)
    norms = {"ln1": "input_layernorm", "o_norm": "post_attention_layernorm"}
    norms |= {"ln2": "pre_feedforward_layernorm", "down_norm": "post_feedforward_layernorm"}
    return llama.layer(a, i) | both(norms, ())
