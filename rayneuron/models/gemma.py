"""Gemma 2 and the text models of Gemma 3: norms around attention and feed-forward, windows, soft caps, two kinds of rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
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
    refuse(c, use_bidirectional_attention=True, final_logit_softcapping=0.0, attn_logit_softcapping=0.0)
    third = c["model_type"] == "gemma3_text"
    every = c.get("sliding_window_pattern", 6) if third else 2
    of_type(every, int, "sliding_window_pattern", c["model_type"])
    kinds = c["layer_types"]
    if kinds is None:
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(c["num_hidden_layers"])]
    ropes = {kind: {**c, "rope_scaling": None, "rope_parameters": block(c, kind)} if third else c for kind in THETAS}
    base = llama.arch({**ropes["full_attention"], "layer_types": kinds, "hidden_act": c["hidden_activation"]}, max_model_len)
    local: Rope = rope.read(ropes["sliding_attention"], base.head_dim, base.max_positions, max_model_len=max_model_len)
    return replace(
        base, norms="around", norm_offset=True, qk_norm=third, attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        embed_scale=c["hidden_size"] ** 0.5, local_rope=local if third else None, softcap_logits=c["final_logit_softcapping"] or 0.0,
        softcap_scores=0.0 if third else c["attn_logit_softcapping"] or 0.0,
    )  # fmt: skip


def block(c: dict[str, Any], kind: str) -> dict[str, Any]:
    """The rope settings of one kind of layers of Gemma 3: those of transformers 5, or the hub's keys, of which scaling is for full ones."""
    found, scaling = ({} if c.get(name) is None else c[name] for name in ("rope_parameters", "rope_scaling"))
    if not isinstance(found, dict) or found.keys() - THETAS.keys() or not isinstance(scaling, dict):
        raise CheckpointError(
            f"config.json sets rope_parameters: {found!r:.60}, rope_scaling: {scaling!r:.60}; rope_parameters of a gemma3_text model "
            f"has an object for each of {' and '.join(THETAS)}"
        )
    own = found.get(kind) or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json sets rope_parameters of {kind}: {own!r:.60}, where an object is needed")
    name, default = THETAS[kind]
    return {"rope_theta": c.get(name, ROPE_THETA["gemma3_text"][default]), **own, **(scaling if kind == "full_attention" else {})}


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    norms = {"ln1": "input_layernorm", "o_norm": "post_attention_layernorm"}
    norms |= {"ln2": "pre_feedforward_layernorm", "down_norm": "post_feedforward_layernorm"}
    return llama.layer(a, i) | both(norms, ())
