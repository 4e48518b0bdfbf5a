"""What a checkpoint of an architecture holds, for who makes one up. No pytest: the HLO gate uses it too."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from rayneuron.models.arch import Arch
from rayneuron.models.stored import stored_shape


def checkpoint_shapes(arch: Arch, family: ModuleType) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor a checkpoint of this architecture holds, as its family stores them."""
    parts = [("", family.top(arch), arch.ffn)]
    for i in range(arch.layers):
        parts.append((family.PREFIX.format(i), family.layer(arch, i), arch.dense_ffn if i in arch.dense_layers else arch.ffn))
    for prefix, rules, ffn in parts:
        for ours, rule in rules.items():
            theirs, convert = rule if isinstance(rule, tuple) else (rule, None)
            if arch.tied and ours == "head.w":
                continue
            for e in range(arch.experts if "{e}" in theirs else 1):
                yield prefix + theirs.replace("{e}", str(e)), stored_shape(arch, ours.split(), ffn, convert)
