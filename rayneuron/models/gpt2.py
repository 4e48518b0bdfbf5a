"""GPT-2. Its products are stored transposed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayneuron.models.arch import Arch
from rayneuron.models.config_json import head_size, refuse
from rayneuron.models.rules import Convert, Rules, both, stacked

if TYPE_CHECKING:
    from torch import Tensor

BASE = "transformer."
PREFIX = "transformer.h.{}."
IGNORE = ("attn.bias", "attn.masked_bias")
TRANSPOSED = True  # products are stored [in, out]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    refuse(c, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False)
    return Arch(
        c["model_type"], c["vocab_size"], c["n_embd"], c["n_layer"], c["n_head"], c["n_head"], head_size(c["n_embd"], c["n_head"]),
        c["n_inner"] or 4 * c["n_embd"], c["n_positions"], c["activation_function"], gated=False, norm="layer",
        eps=c["layer_norm_epsilon"], position="learned", tied=c["tie_word_embeddings"],
    )  # fmt: skip


def top(a: Arch) -> Rules:
    """Tensors outside the layers."""
    return {"embed.w": BASE + "wte.weight", "position.w": BASE + "wpe.weight", "head.w": "lm_head.weight"} | both({"norm": BASE + "ln_f"})


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return rules(flip, stacked(a))


def flip(t: Tensor) -> Tensor:
    """[in, out] to [out, in]; a view."""
    return t.T


def rules(turn: Convert, three: Convert) -> Rules:
    """GPT-2's names; `turn` brings a stored product to [out, in], `three` cuts the fused rows into q, k, v."""
    names = both({"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj", "ln1": "ln_1", "ln2": "ln_2"})
    turned: Rules = {n: (str(names[n]), turn) for n in ("o.w", "up.w", "down.w")}
    return names | turned | {"q.w k.w v.w": ("attn.c_attn.weight", lambda t: three(turn(t))), "q.b k.b v.b": ("attn.c_attn.bias", three)}
