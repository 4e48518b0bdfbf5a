"""GPT-J: rotary on neighbours, one norm a layer, attention and feed-forward side by side."""

from __future__ import annotations

from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models.arch import Arch, Rope
from rayneuron.models.config_json import head_size
from rayneuron.models.rules import Rules, both

BASE = "transformer."
PREFIX = "transformer.h.{}."
IGNORE = ("attn.bias", "attn.masked_bias")


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    head_dim, rotated = head_size(c["n_embd"], c["n_head"]), c["rotary_dim"]
    inner, positions = c["n_inner"] or 4 * c["n_embd"], c["n_positions"]
    if rotated > head_dim or rotated % 2:
        head = f"the {head_dim} of a head (n_embd {c['n_embd']} / n_head {c['n_head']}, or hidden_size / num_attention_heads)"
        raise CheckpointError(f"rotary_dim {rotated} of config.json (64 where it is absent) is odd or more than {head}")
    return Arch(
        c["model_type"], c["vocab_size"], c["n_embd"], c["n_layer"], c["n_head"], c["n_head"], head_dim, inner, positions,
        c["activation_function"], gated=False, norm="layer", eps=c["layer_norm_epsilon"], rope=Rope(dim=rotated, pairs=True),
        parallel=True, tied=c["tie_word_embeddings"],
    )  # fmt: skip


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return {"embed.w": BASE + "wte.weight"} | both({"norm": BASE + "ln_f", "head": "lm_head"})


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    bare: Rules = {f"{n}.w": f"attn.{n}_proj.weight" for n in "qkv"}
    return bare | {"o.w": "attn.out_proj.weight"} | both({"up": "mlp.fc_in", "down": "mlp.fc_out", "ln1": "ln_1"})
