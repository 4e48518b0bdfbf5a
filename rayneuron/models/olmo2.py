"""OLMo 2 and 3: Llama that normalises what is added to the residual, and queries and keys over all heads. 3 has windows, and scales the
rope of full layers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import llama, rope
from rayneuron.models.arch import Arch
from rayneuron.models.defaults import ROPE_THETA
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    if c["model_type"] == "olmo2":
        return replace(llama.arch(c, max_model_len), norms="after", whole_qk_norm=True)
    own = ROPE_THETA["olmo3"]
    full, sliding = rope.of_kind(c, "full_attention", c.get("rope_theta", own)), rope.of_kind(c, "sliding_attention", own)
    kinds = llama.kinds(c, 4) if c["layer_types"] is None else c["layer_types"]
    base = llama.arch({**full, "layer_types": kinds}, max_model_len)
    local = rope.read(sliding, base.head_dim, base.max_positions, max_model_len=max_model_len)
    return replace(base, norms="after", whole_qk_norm=True, local_rope=local)


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    s = "s" if a.whole_qk_norm else ""
    norms = {f"q_norm{s}": "self_attn.q_norm", f"k_norm{s}": "self_attn.k_norm"}
    norms |= {"o_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
    return llama.products(a) | both(norms, ())
