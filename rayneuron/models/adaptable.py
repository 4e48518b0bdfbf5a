"""Which products of a model may have adapters: modules of theirs, products of ours; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from rayneuron.errors import ConfigError
from rayneuron.models.arch import Arch
from rayneuron.models.rules import PRODUCTS, Convert, same, shape_of


@dataclass(frozen=True, slots=True)
class Module:
    """Where a module of theirs goes: its layer, our products, how its outputs become theirs; `turned`: it is stored [in, out].
    `room`: whether adapters may have it here."""

    layer: int
    products: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]  # [out, in] of each
    convert: Convert = same
    turned: bool = False
    room: bool = True


def modules_of(arch: Arch, family: ModuleType, targets: Sequence[str] | None = None) -> dict[str, Module]:
    """The products of every layer by their module's name; of experts none. targets: the modules that adapters may have (q_proj), None for
    all. Raises ConfigError for one that no layer has."""
    made = dict(_modules(arch, family))
    if targets is None:
        return made
    ends = {name: {target for target in targets if name == target or name.endswith("." + target)} for name in made}
    if absent := set(targets).difference(*ends.values()):
        there = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in made))
        said = f"lora.target_modules names {min(absent)!r:.60}, and what adapters may have of a {arch.model_type} model is {there}"
        raise ConfigError(said, param="lora.target_modules")
    return {name: replace(module, room=bool(ends[name])) for name, module in made.items()}


def _modules(arch: Arch, family: ModuleType) -> Iterator[tuple[str, Module]]:
    turned = getattr(family, "TRANSPOSED", False)
    for i in range(arch.layers):
        ffn = arch.dense_ffn if i in arch.dense_layers else arch.ffn
        for ours, rule in family.layer(arch, i).items():
            theirs, convert = rule if isinstance(rule, tuple) else (rule, same)
            names = ours.split()
            mixed = arch.experts and i not in arch.dense_layers and names[0] in ("gate.w", "up.w", "down.w")
            if mixed or not set(names) <= PRODUCTS or not theirs.endswith(".weight"):
                continue
            shapes = tuple(shape_of(arch, name, ffn) for name in names)
            products = tuple(name.removesuffix(".w") for name in names)
            yield family.PREFIX.format(i) + theirs.removesuffix(".weight"), Module(i, products, shapes, convert, turned)  # type: ignore[arg-type]
