"""GPT BigCode (StarCoder, SantaCoder): GPT-2, not transposed, with one KV head or as many as query heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.models import gpt2
from rayneuron.models.arch import Arch
from rayneuron.models.gpt2 import BASE, IGNORE, PREFIX, top
from rayneuron.models.rules import Rules, interleaved, same, stacked

__all__ = ["BASE", "IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    return replace(gpt2.arch(c), kv_heads=1 if c["multi_query"] else c["n_head"])


def layer(a: Arch, i: int) -> Rules:
    """Tensors of one layer. Several KV heads come as (q k v) a head, one comes after all queries."""
    return gpt2.rules(same, stacked(a) if a.kv_heads == 1 else interleaved(a))
