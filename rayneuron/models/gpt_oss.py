"""GPT-OSS: attention sinks, windows in every other layer, experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Convert, Rules, both

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]

ALPHA = 1.702  # of quick_gelu
ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}  # where config.json has none


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    if c["swiglu_alpha"] != ALPHA or not c["swiglu_limit"] > 0:
        raise CheckpointError(
            f"config.json sets swiglu_alpha: {c['swiglu_alpha']} and swiglu_limit: {c['swiglu_limit']}; supported are {ALPHA} and a limit "
            "above 0"
        )
    kinds = c["layer_types"]
    if kinds is None:
        kinds = llama.kinds(c, 2)
    bare = {"rope_parameters": ROPE} if c.get("rope_parameters") is None and not c.get("rope_scaling") else {}
    base = llama.arch({**c, **bare, "layer_types": kinds, "hidden_act": "quick_gelu"}, max_model_len)
    return replace(
        base, sinks=True, experts=c["num_local_experts"], top_k=c["num_experts_per_tok"], swiglu_limit=c["swiglu_limit"], expert_bias=True
    )  # fmt: skip


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer. The experts' products are stored [in, out], gate and up taking turns."""
    e = "mlp.experts."
    return llama.attention(a) | both({"router": "mlp.router"}) | {
        "sinks.w": ("self_attn.sinks", every_channel(a)), "gate.w up.w": (e + "gate_up_proj", turned),
        "gate.b up.b": (e + "gate_up_proj_bias", turns), "down.w": (e + "down_proj", lambda t: t.transpose(1, 2)),
        "experts.down.b": e + "down_proj_bias",
    }  # fmt: skip


def every_channel(a: Arch) -> Convert:
    """[heads] to [heads x head size]: cut as queries are."""
    return lambda t: t.repeat_interleave(a.head_dim)


def turns(t: Tensor) -> tuple[Tensor, Tensor]:
    """The last dimension as every other one; views."""
    return t[..., ::2], t[..., 1::2]


def turned(t: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, E, 2F] to gate and up [experts, F, E]; views."""
    gate, up = turns(t)
    return gate.transpose(1, 2), up.transpose(1, 2)
