"""EXAONE 4: OLMo 2's layer with norms of each head; where there are windows, full layers rotate nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, top
from rayneuron.models.olmo2 import layer

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json."""
    kinds, every, layers = c["layer_types"], c["sliding_window_pattern"], range(c["num_hidden_layers"])
    if kinds is None:
        if type(every) is not int or every < 1 or not c["sliding_window"]:
            said = f"sliding_window: {c['sliding_window']} and sliding_window_pattern: {every!r:.60}"
            raise CheckpointError(f"config.json sets {said}, which say nothing of the kinds of layers; write layer_types")
        kinds = llama.kinds(c, every)
    base = llama.arch({**c, "layer_types": kinds}, max_model_len)
    return replace(base, norms="after", qk_norm=True, nope=tuple(i for i in layers if c["sliding_window"] and not base.window(i)))
