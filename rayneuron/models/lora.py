"""LoRA adapters as PEFT writes them: a directory to pairs of our products, strict both ways, and a rank's share of them.

An adapter adds B (A x) to a product: A [R, in], B [out, R] with the scale in it, of the whole model until they are cut. R: its rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayneuron.errors import CheckpointError
from rayneuron.models.adaptable import Module
from rayneuron.models.adapted import Pairs
from rayneuron.models.adapter_config import CONFIG, MERGE, TENSORS, read_config
from rayneuron.models.arch import Arch
from rayneuron.models.hub import SafeFile
from rayneuron.models.rules import cut_of
from rayneuron.models.weights import Cut

KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter in float32. `identity`: of its config and tensors, whatever it is called; `rank`: the largest of its pairs."""

    identity: str
    rank: int
    layers: tuple[Pairs, ...]


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
        if not module.room:
            raise CheckpointError(f"{path} adapts {name!r}, which lora.target_modules does not name; name it there, or leave that out")
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


def sizes(modules: Mapping[str, Module], how: Cut, layers: range) -> list[dict[str, tuple[int, int]]]:
    """[out, in] of one rank's part of every product that may be adapted, of some layers."""
    made: list[dict[str, tuple[int, int]]] = [{} for _ in layers]
    for module in modules.values():
        for product, shape in zip(module.products, module.shapes, strict=True) if module.layer in layers else ():
            outputs, inputs = how(product + ".w", torch.empty(shape, device="meta")).shape
            made[module.layer - layers.start][product] = outputs, inputs
    return made


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
