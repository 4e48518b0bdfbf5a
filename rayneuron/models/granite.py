"""Granite: Llama with factors on embeddings, scores, summands and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, layer, top

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json.

    Summands are not multiplied: the residual is held divided by that factor instead, which every norm takes out again if its eps is of
    that size too. So a layer is Llama's.
    """
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        if not c[name] > 0:
            raise CheckpointError(f"config.json sets {name}: {c[name]!r}, where a number above 0 is needed")
    base, factor = llama.arch(c, max_model_len), float(c["residual_multiplier"])
    return replace(
        base, eps=base.eps / factor**2, embed_scale=c["embedding_multiplier"] / factor, attention_scale=float(c["attention_multiplier"]),
        logits_scale=float(c["logits_scaling"]),
    )  # fmt: skip
