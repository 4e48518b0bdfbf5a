"""LoRA adapters as PEFT writes them: a directory to pairs of our products, strict both ways, and a rank's share of them.

An adapter adds B (A x) to a product: A [R, in], B [out, R] with the scale in it, of the whole model until they are cut. R: its rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rayneuron.errors import CheckpointError
from rayneuron.models.adapted import Pairs
from rayneuron.models.arch import Arch
from rayneuron.models.hub import SafeFile
from rayneuron.models.rules import PRODUCTS, Convert, cut_of, same, shape_of
from rayneuron.models.weights import Cut

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
MERGE = "merge the adapter into the weights instead (merge_and_unload)"
# Of adapter_config.json: what changes more than a product by B (A x), and why it is not served.
REFUSED = {
    "use_dora": "DoRA scales the base's own weights", "use_qalora": "QALoRA pools the input", "use_bdlora": "BD-LoRA is blockwise",
    "lora_bias": "it has biases of its own", "modules_to_save": "it brings whole modules (embeddings, head)",
    "layer_replication": "it repeats layers of the base", "alora_invocation_tokens": "an aLoRA begins within a prompt",
    "target_parameters": "it adapts single parameters, as experts are", "trainable_token_indices": "it changes embeddings",
    "arrow_config": "it routes between adapters",
}  # fmt: skip
CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")  # inits that move the base's own weights
READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "bias"),
    *("layers_to_transform", "init_lora_weights", "base_model_name_or_path"),
}
TRAINING = {  # what says how it was trained, or where it came from, and nothing of what it adds
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out", "layers_pattern"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying"),
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter in float32. `identity`: of its config and tensors, whatever it is called; `rank`: the largest of its pairs."""

    identity: str
    rank: int
    layers: tuple[Pairs, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """Where a module of theirs goes: its layer, our products, how its outputs become theirs; `turned`: it is stored [in, out]."""

    layer: int
    products: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]  # [out, in] of each
    convert: Convert = same
    turned: bool = False


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What adapter_config.json says."""

    path: Path
    rank: int
    alpha: float
    root: bool  # divided by the rank's root, not by the rank
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)

    def of(self, module: str) -> tuple[int, float]:
        """The rank and the scale of one module."""
        rank, alpha = self._first(self.ranks, module, self.rank), self._first(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.root else rank)

    def wants(self, module: str, layer: int) -> bool:
        """Whether `target_modules` and what narrows it mean this module."""
        chosen = self.targets == "all-linear" or self._meant(self.targets, module)
        return chosen and not self._meant(self.excluded, module) and (self.layers is None or layer in self.layers)

    def _meant(self, names: str | tuple[str, ...], module: str) -> bool:
        if isinstance(names, str):
            return self._matches(names, module)
        return any(module == name or module.endswith("." + name) for name in names)

    def _first(self, pattern: Mapping[str, Any], module: str, default: Any) -> Any:
        return next((value for name, value in pattern.items() if self._matches(rf"(.*\.)?({name})", module)), default)

    def _matches(self, pattern: str, module: str) -> bool:
        try:
            return re.fullmatch(pattern, module) is not None
        except re.error as wrong:
            raise CheckpointError(f"{self.path / CONFIG}: {pattern!r} is no regular expression: {wrong}") from None


def read(path: Path, arch: Arch, modules: Mapping[str, Module], *, max_rank: int, rest: Callable[[], None] = lambda: None) -> Adapter:
    """The adapter of a directory, in memory of its own. Raises CheckpointError for whatever it is not known how to add, by name.

    modules: of `modules_of`; `rest` is called after every little piece of the work.
    """
    said, digest = read_config(path)
    rest()
    pairs = _read_pairs(path, digest, rest)
    layers: list[Pairs] = [{} for _ in range(arch.layers)]
    most = 0
    for name, (a, b) in pairs.items():
        rest()
        module = modules.get(name)
        if module is None:
            raise CheckpointError(f"{path} adapts {name!r}; {_why_unknown(name, arch)}")
        if not said.wants(name, module.layer):
            raise CheckpointError(f"{path / TENSORS} has tensors for {name!r}, which target_modules of {CONFIG} does not name")
        rank, scale = said.of(name)
        if rank > max_rank:
            raise CheckpointError(f"{path} has rank {rank} at {name!r}, and lora.max_lora_rank is {max_rank}; raise it there")
        _check_shapes(path, name, module, rank, a, b)
        layers[module.layer] |= _ours(module, a.float(), b.float() * scale)
        most = max(most, rank)
    for name, module in modules.items():
        rest()
        if name not in pairs and said.wants(name, module.layer):
            raise CheckpointError(f"{path / TENSORS} has no tensors for {name!r}, which target_modules of {CONFIG} names")
    if not pairs:
        raise CheckpointError(f"{path / TENSORS} adapts nothing")
    return Adapter(digest.hexdigest(), most, tuple(layers))


def cut(adapter: Adapter, how: Cut, layers: Iterable[int], dtype: torch.dtype, rest: Callable[[], None] = lambda: None) -> Iterator[Pairs]:
    """One rank's share of some layers: B is cut where the weight's outputs are, A where its inputs are; rounded once to `dtype`."""
    for i in layers:
        pairs: Pairs = {}
        shared: dict[int, Tensor] = {}  # the A of what is fused in theirs: one here too
        for name, (a, b) in adapter.layers[i].items():
            rest()
            whole = name + ".w"
            _, dim = cut_of(whole) or ("", 0)
            if dim in (1, -1):
                pairs[name] = how(whole, a).to(dtype).contiguous(), b.to(dtype).contiguous()
            else:
                down = shared.setdefault(id(a), a.to(dtype).contiguous())
                pairs[name] = down, how(whole, b).to(dtype).contiguous()
        yield pairs


def sizes(arch: Arch, family: ModuleType, how: Cut, layers: range) -> list[dict[str, tuple[int, int]]]:
    """[out, in] of one rank's part of every product that may be adapted, of some layers."""
    made: list[dict[str, tuple[int, int]]] = [{} for _ in layers]
    for module in modules_of(arch, family).values():
        for product, shape in zip(module.products, module.shapes, strict=True) if module.layer in layers else ():
            outputs, inputs = how(product + ".w", torch.empty(shape, device="meta")).shape
            made[module.layer - layers.start][product] = outputs, inputs
    return made


def read_config(path: Path) -> tuple[AdapterConfig, Any]:
    """adapter_config.json, and a hash that has begun with it. Raises CheckpointError."""
    file = path / CONFIG
    try:
        data = file.read_bytes() if file.stat().st_size <= MAX_CONFIG_BYTES else b""
        raw = json.loads(data)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no adapter: it has no {CONFIG}") from None
    except (OSError, ValueError, RecursionError) as wrong:
        raise CheckpointError(f"{file} cannot be read as JSON: {wrong}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is no JSON object")
    _refuse(file, raw)
    rank, alpha = raw.get("r"), raw.get("lora_alpha")
    ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    for name, value in (("r", rank), *ranks.items()):
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{file} sets the rank {name}: {value!r:.60}, where a positive integer is needed")
    for name, value in (("lora_alpha", alpha), *alphas.items()):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not value:
            raise CheckpointError(f"{file} sets {name}: {value!r:.60}, where a number other than 0 is needed")
    targets, excluded = _names(file, raw, "target_modules"), _names(file, raw, "exclude_modules")
    if not targets:
        raise CheckpointError(f"{file} names no target_modules")
    chosen = raw.get("layers_to_transform")
    chosen = [chosen] if type(chosen) is int else chosen or None
    if chosen is not None and not (isinstance(chosen, list) and all(type(i) is int for i in chosen)):
        raise CheckpointError(f"{file} sets layers_to_transform: {chosen!r:.60}, where numbers of layers are needed")
    kept = None if chosen is None else tuple(chosen)
    said = AdapterConfig(path, rank, float(alpha), bool(raw.get("use_rslora")), targets, excluded, kept, ranks, alphas)  # type: ignore[arg-type]
    return said, hashlib.blake2b(data, digest_size=16)


def _refuse(file: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{file} sets peft_type: {raw.get('peft_type')!r:.60}; only LORA is served")
    for name, why in REFUSED.items():
        if raw.get(name):
            raise CheckpointError(f"{file} sets {name}, and {why}, which is not served; {MERGE}")
    if raw.get("bias") not in (None, "none"):
        raise CheckpointError(f"{file} sets bias: {raw['bias']!r:.60}, so it changes the base's biases, which is not served; {MERGE}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGING_INITS):
        said = f"init_lora_weights: {init!r:.60}, which moved the base's weights"
        raise CheckpointError(f"{file} sets {said}; save it with path_initial_model_for_weight_conversion, or {MERGE}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(raw.get(name) or {}, dict):
            raise CheckpointError(f"{file} sets {name}: {raw[name]!r:.60}, where an object is needed")
    for name, value in raw.items():
        if name not in READ | TRAINING | REFUSED.keys() and value not in (None, False, [], {}):
            raise CheckpointError(f"{file} sets {name!r:.60}, which is not known here and may change what the adapter adds; {MERGE}")


def _names(file: Path, raw: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    """A regular expression, or names."""
    value = raw.get(key)
    if isinstance(value, str):
        return value
    if not isinstance(value or [], list) or not all(isinstance(name, str) for name in value or ()):
        raise CheckpointError(f"{file} sets {key}: {value!r:.60}, where names or a regular expression are needed")
    return tuple(value or ())


def _read_pairs(path: Path, digest: Any, rest: Callable[[], None]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B by module of theirs, in memory of their own, hashed on the way."""
    if not (path / TENSORS).exists():
        said = "; save it with safe_serialization=True" if (path / "adapter_model.bin").exists() else ""
        raise CheckpointError(f"{path} has no {TENSORS}{said}")
    file = SafeFile(path / TENSORS, rest)
    rest()
    sides: dict[str, dict[str, Tensor]] = {}
    for name in sorted(file.entries):
        key = KEY.fullmatch(name)
        if key is None:
            raise CheckpointError(f"{path / TENSORS} holds tensor {name!r}, which is no lora_A or lora_B of a product; {MERGE}")
        t = file.tensor(name).clone()
        if t.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not t.isfinite().all():
            raise CheckpointError(f"{path / TENSORS}: tensor {name!r} ({t.dtype}) is not of finite numbers in fp32, bf16 or fp16")
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.view(-1).view(torch.uint8).numpy().data)
        sides.setdefault(key["module"], {})[key["side"]] = t
        rest()
    for module, pair in sides.items():
        if len(pair) != 2:
            raise CheckpointError(f"{path / TENSORS} has lora_{next(iter(pair))} of {module!r} alone")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def modules_of(arch: Arch, family: ModuleType) -> dict[str, Module]:
    """The products of every layer by their module's name; of experts none."""
    return dict(_modules(arch, family))


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


def _check_shapes(path: Path, name: str, module: Module, rank: int, a: Tensor, b: Tensor) -> None:
    want_a, want_b = (rank, module.shapes[0][1]), (sum(out for out, _ in module.shapes), rank)
    if tuple(a.shape) != want_a or tuple(b.shape) != want_b:
        raise CheckpointError(
            f"{path}: {name!r} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, and this model with rank {rank} needs "
            f"{want_a} and {want_b}: it was made for another base, or {CONFIG} has another rank"
        )


def _ours(module: Module, a: Tensor, b: Tensor) -> Pairs:
    """The pairs of our products: what cuts a weight's outputs cuts B's, and all have the same A."""
    made = module.convert(b.T if module.turned else b)
    pieces = made if isinstance(made, tuple) else (made,)
    return {product: (a, piece) for product, piece in zip(module.products, pieces, strict=True)}


def _why_unknown(name: str, arch: Arch) -> str:
    if "expert" in name and "shared" not in name:
        return f"adapters of experts are not served; {MERGE}"
    if name.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens", "wte", "embed_in", "embed_out", "word_embeddings"):
        return f"adapters of embeddings and head are not served; {MERGE}"
    return f"a {arch.model_type} model has no such product in its attention or feed-forward: it was made for another base, or {MERGE}"
