"""SmolLM3: Llama that in some layers rotates nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayneuron.errors import CheckpointError
from rayneuron.models import llama
from rayneuron.models.arch import Arch
from rayneuron.models.llama import IGNORE, PREFIX, layer, top

__all__ = ["IGNORE", "PREFIX", "arch", "layer", "top"]


def arch(c: dict[str, Any], max_model_len: int | None = None) -> Arch:
    """The Arch of a config.json. `no_rope_layers` says 1 of a layer that rotates."""
    layers, rotates = range(c["num_hidden_layers"]), c["no_rope_layers"]
    if rotates is None:
        rotates = [int((i + 1) % c["no_rope_layer_interval"] != 0) for i in layers]
    if len(rotates) != len(layers) or not all(type(on) in (int, bool) for on in rotates):
        count = f"num_hidden_layers: {len(layers)}"
        raise CheckpointError(f"config.json sets no_rope_layers: {rotates!r:.60}; write 0 or 1 for each of {count}")
    kinds = c["layer_types"]
    if kinds is None:
        slide = c["use_sliding_window"] and c["sliding_window"] is not None
        kinds = ["sliding_attention" if slide and not on else "full_attention" for on in rotates]
    return replace(llama.arch({**c, "layer_types": kinds}, max_model_len), nope=tuple(i for i in layers if not rotates[i]))
