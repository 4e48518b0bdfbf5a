"""Command-R and Command-R7B: attention and feed-forward side by side behind one layer norm, scaled logits; of the latter full layers rotate
nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.config_json import of_type, refuse
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, both

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    refuse(c, use_qk_norm=True, logit_scale=None, layer_norm_eps=None)
    if not c["logit_scale"] > 0:
        raise CheckpointError(f"config.json sets logit_scale: {c['logit_scale']!r}, where a number above 0 is needed")
    more, layers = {"rms_norm_eps": c["layer_norm_eps"]}, range(c["num_hidden_layers"])
    if c["model_type"] == "cohere2" and c["layer_types"] is None:
        every = c.get("sliding_window_pattern", 4)
        of_type(every, int, "sliding_window_pattern", "cohere2")
        more["layer_types"] = llama.kinds(c, every)
    base = llama.arch({**c, **more}, max_model_len)
    nope = tuple(i for i in layers if not base.window(i)) if c["model_type"] == "cohere2" else ()
    return replace(base, norm="layer", parallel=True, logits_scale=1 / c["logit_scale"], nope=nope)


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer."""
    return llama.products(a) | both({"ln1": "input_layernorm"}, ())
