"""Checkpoint names to canonical ones, and whole tensors to a rank's share: read, cut, convert, fuse, in that order.

The canonical names and the rules that lead to them are in `rules`; what of a tensor a rank holds is in `shard`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rayneuron.errors import CheckpointError
from rayneuron.models import Progress, flash_decoding, shard
from rayneuron.models.arch import Arch
from rayneuron.models.attention import alibi_slopes
from rayneuron.models.heads import Heads
from rayneuron.models.quantization import Quantization, is_quantised, parse, quantise, scale_of
from rayneuron.models.reader import Reader
from rayneuron.models.rotary import frequencies
from rayneuron.models.rules import FUSED, PRODUCTS, WIDE, Convert, Rules, cut_of, entering, same, shape_of

log = logging.getLogger(__name__)


SCALES = (".scale", ".weight_scale")  # NxD's name and the hub's
_SUMMED = {"o.b": "o.bias", "down.b": "down.bias"}  # added once, after the sum over ranks


@dataclass(slots=True)
class Cut:
    """How one rank cuts canonical tensors."""

    arch: Arch
    plan: shard.HeadPlan
    rank: int
    ranks: int

    def __call__(self, name: str, t: Tensor) -> Tensor:
        """The rank's share of one tensor (a weight, bias or scale); a view where no padding is needed."""
        layer, _, kind = name.rpartition(".")
        if kind == "scale" and (t.numel() == 1 or t.shape[-2] == 1 or layer in ("o", "down", "shared_down")):
            return t  # one scale for all rows, or one an output channel that is not split
        if name == "experts.down.b":
            return t / self.ranks  # every rank adds its part of the sum
        units, dim = cut_of(name) or ("", 0)
        if units == "equal parts":
            return shard.take_part(t, self.rank, self.ranks, dim)
        if units:
            index = self.plan.q_of(self.rank) if units == "query heads" else self.plan.kv_of(self.rank)
            return shard.take_heads(t, index, self.arch.head_dim, dim)
        return t


def cut_for(arch: Arch, rank: int, ranks: int) -> Cut:
    """How the rank-th of `ranks` cuts. Raises ConfigError where they cannot share the heads."""
    return Cut(arch, shard.head_plan(arch.heads, arch.kv_heads, ranks, arch.gqa, arch.sequence_shards), rank, ranks)


def load(
    arch: Arch,
    family: ModuleType | Heads,
    checkpoint: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    rank: int = 0,
    ranks: int = 1,
    fused: bool = True,
    progress: Progress | None = None,
    quantization: Quantization | str | None = None,
    stage: int = 0,
    stages: int = 1,
) -> dict[str, Any]:
    """One rank's weights, canonical: {"top": {name: Tensor}, "layers": [{name: Tensor}, ...], "first": index of the first layer}.

    Strict both ways: a tensor that is missing, of another shape, or read by nothing raises CheckpointError. Weights that come quantised
    stay so; `quantization` quantises the others while loading. `stage` of `stages` keeps its layers only.
    """
    cut = cut_for(arch, rank, ranks)
    reader = Reader(checkpoint, getattr(family, "BASE", ""))
    mine = shard.stage_layers(arch.layers, stage, stages)
    build = Build(reader, cut, dtype, parse(quantization) if isinstance(quantization, str) else quantization)
    top = build_top(build, family, first=stage == 0, last=stage == stages - 1)
    layers = []
    for i in range(arch.layers):
        prefix = family.PREFIX.format(i)
        build.ffn = arch.dense_ffn if i in arch.dense_layers else arch.ffn
        if i not in mine:
            build.skip(family.layer(arch, i), prefix)
            continue
        layers.append(fuse(build.collect(family.layer(arch, i), prefix), fused))
        progress and progress(len(layers), len(mine))
    further = family.further(arch) if hasattr(family, "further") else ()
    left = reader.unread(getattr(family, "IGNORE", ()), further)
    if left:
        raise CheckpointError(f"nothing in a {arch.model_type} model reads {', '.join(left[:3])} ({len(left)} tensors in all)")
    return {"top": top, "layers": layers, "first": mine.start}


def build_top(build: Build, family: ModuleType | Heads, *, first: bool, last: bool) -> dict[str, Tensor]:
    """The tensors outside the layers, with the constants a rank needs."""
    arch, cut = build.cut.arch, build.cut
    rules = dict(family.top(arch))
    head = rules.pop("head.w", None)
    before = {n: r for n, r in rules.items() if entering(n)}
    behind = {n: r for n, r in rules.items() if not entering(n)}
    top: dict[str, Tensor] = {}
    for wanted, group in ((first, before), (last, behind)):
        if wanted:
            top |= build.collect(group, "")
        else:
            build.skip(group, "")
    if arch.tied:
        if last:
            top["head.w"] = top["embed.w"] if first else build.piece("embed.w", build.reader.take(str(rules["embed.w"])))
        check_tied(build.reader, str(rules["embed.w"]), head)
    elif head is not None:
        top |= build.collect({"head.w": head}, "") if last else build.skip({"head.w": head}, "")
    return top | constants(cut, top)


def constants(cut: Cut, top: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a rank's steps read beside weights: embed.first where it holds the embedding, rope.freq, slopes, and flash decoding's."""
    arch, found = cut.arch, {}
    if "embed.w" in top:
        found["embed.first"] = torch.tensor([cut.rank * top["embed.w"].shape[0]], dtype=torch.int32)
    if arch.position == "rope":
        found["rope.freq"] = frequencies(arch.rope)
    if arch.local_rope is not None:
        found["rope.local"] = frequencies(arch.local_rope)
    if arch.sequence_shards > 1:
        found |= flash_decoding.constants(arch, cut.rank, cut.ranks)
    if arch.position == "alibi":
        slopes = alibi_slopes(arch.heads)
        found["slopes"] = torch.tensor([slopes[i] if i >= 0 else 0.0 for i in cut.plan.q_of(cut.rank)])
    return found


def check_tied(reader: Reader, embed: str, head: str | tuple[str, Convert] | None) -> None:
    """A tied model's own head tensor is not used; where it differs from the embedding, that is said."""
    if isinstance(head, str) and head in reader:
        other, table = reader.take(head), reader.take(embed)
        if other.shape != table.shape or (other.device.type != "meta" and not torch.equal(other, table)):
            log.warning("%s differs from %s, but the config ties them: the embedding is used", head, embed)
        reader.release(head)
        reader.release(embed)


@dataclass(slots=True)
class Build:
    """Turns rules into this rank's tensors."""

    reader: Reader
    cut: Cut
    dtype: torch.dtype
    quantization: Quantization | None = None
    ffn: int = 0  # inner size of the layer being built

    def collect(self, rules: Rules, prefix: str) -> dict[str, Tensor]:
        """Every tensor of `rules`, cut and converted. A row-split layer's bias gets its own name, for the sum over ranks comes first."""
        out: dict[str, Tensor] = {}
        for ours, rule in rules.items():
            theirs, convert = rule if isinstance(rule, tuple) else (rule, same)
            names = ours.split()
            if "{e}" in theirs:
                out |= self.stacked(names[0], prefix + theirs)
                continue
            for name, t in self.pieces(names, prefix + theirs, convert).items():
                out[_SUMMED.get(name, name)] = t
            self.reader.release(prefix + theirs)
        return out

    def skip(self, rules: Rules, prefix: str) -> dict[str, Tensor]:
        """Mark the tensors of another stage as known."""
        for rule in rules.values():
            theirs = prefix + (rule[0] if isinstance(rule, tuple) else rule)
            for e in range(self.cut.arch.experts if "{e}" in theirs else 1):
                name = theirs.replace("{e}", str(e))
                self.reader.used.update({name, *_scale_names(name)})
        return {}

    def pieces(self, names: list[str], theirs: str, convert: Convert) -> dict[str, Tensor]:
        """One tensor of the checkpoint, as this rank's share of one or several of ours, with their scales."""
        made = self.converted(theirs, convert, self.reader.take(theirs), len(names))
        out: dict[str, Tensor] = {}
        scales = self.scales(theirs, convert, made)
        for name, whole, scale in zip(names, made, scales, strict=True):
            self.check(name, whole, theirs)
            if scale is None and is_quantised(whole.dtype):
                raise CheckpointError(f"tensor {theirs!r} is stored as {whole.dtype}, but the checkpoint holds no scale for it")
            if scale is None and self.quantization is not None and name in PRODUCTS:
                scale = scale_of(whole, self.quantization)
            if scale is None:
                out[name] = self.piece(name, whole)
                continue
            key = name[:-1] + "scale"
            if whole.dim() == 3 and scale.numel() == 1:
                scale = scale.reshape(1, 1, 1).expand(len(whole), 1, 1)  # experts are picked by index, their scales likewise
            part, out[key] = self.cut(name, whole), _own(self.cut(key, scale), torch.float32)
            how = None if is_quantised(whole.dtype) else self.quantization
            out[name] = _own(part, part.dtype) if how is None else quantise(part, out[key], how)
        return out

    def converted(self, theirs: str, convert: Convert, t: Tensor, count: int) -> tuple[Tensor, ...]:
        """The pieces of a tensor as its family cuts it. Raises CheckpointError where its shape does not let it."""
        try:
            made = convert(t)
        except (RuntimeError, IndexError):  # of unflatten and split
            made = ()
        pieces: tuple[Tensor, ...] = made if isinstance(made, tuple) else (made,)
        if len(pieces) != count:
            raise CheckpointError(f"tensor {theirs!r} of shape {tuple(t.shape)} has not the form that config.json promises")
        return pieces

    def scales(self, theirs: str, convert: Convert, made: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """The scales stored beside a quantised tensor, one for each piece it becomes: of one number, or one an output channel."""
        found = next((n for n in _scale_names(theirs) if n in self.reader), None)
        if found is None:
            return (None,) * len(made)
        t = self.reader.take(found)
        if t.numel() == 1:
            return (t.reshape(1),) * len(made)
        scales = self.converted(found, convert, t if t.dim() > 1 else t[:, None], len(made))
        if any(tuple(s.shape) != (*w.shape[:-1], 1) for s, w in zip(scales, made, strict=True)):
            raise CheckpointError(f"tensor {found!r} has shape {tuple(t.shape)}; one scale, or one an output channel, is needed")
        return scales

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """The rank's share in memory of its own, in the dtype it is computed in."""
        return _own(self.cut(name, whole), torch.float32 if name in WIDE else self.dtype)

    def stacked(self, name: str, theirs: str) -> dict[str, Tensor]:
        """The share of every expert, stacked into one tensor a name."""
        out: dict[str, Tensor] = {}
        count = self.cut.arch.experts
        for e in range(count):
            source = theirs.replace("{e}", str(e))
            for key, t in self.pieces([name], source, same).items():
                if key not in out:
                    out[key] = t.new_empty((count, *(t.shape if t.dim() > 1 else (1, 1))))
                out[key][e] = t
            self.reader.release(source)
        return out

    def check(self, name: str, t: Tensor, theirs: str) -> None:
        """Shapes must be those the config promises."""
        want, found = shape_of(self.cut.arch, name, self.ffn), tuple(t.shape)
        if found not in (want, (self.cut.arch.experts, *want)):
            raise CheckpointError(f"tensor {theirs!r} gives {name} of shape {found}, but config.json promises {want}")


def held_bytes(weights: Mapping[str, Any]) -> int:
    """Bytes of a rank's weights; a tied head counts once."""
    tensors = {id(t): t for w in [weights["top"], *weights["layers"]] for t in w.values()}
    return sum(t.nbytes for t in tensors.values())


def fuse(w: dict[str, Tensor], fused: bool = True) -> dict[str, Tensor]:
    """q, k, v to qkv and gate, up to gate_up, as one product reads its input once. Experts are always fused, as experts.gate_up."""
    for name, parts in FUSED.items():
        if any(f"{p}.w" not in w for p in parts):
            continue
        experts = w[f"{parts[0]}.w"].dim() == 3
        if fused or experts:
            sizes = [w[f"{p}.w"].shape[-2] for p in parts]
            for kind in ("w", "scale", "b"):
                found = [w.pop(f"{p}.{kind}", None) for p in parts]
                if any(t is not None for t in found):
                    w[f"{'experts.' if experts else ''}{name}.{kind}"] = _join(kind, found, sizes)
    if "down.w" in w and w["down.w"].dim() == 3:
        for kind in ("w", "scale"):
            if f"down.{kind}" in w:
                w[f"experts.down.{kind}"] = w.pop(f"down.{kind}")
    return w


def _join(kind: str, parts: list[Tensor | None], sizes: list[int]) -> Tensor:
    one = next(t for t in parts if t is not None)
    if kind == "b":
        return torch.cat([one.new_zeros(n) if t is None else t for t, n in zip(parts, sizes, strict=True)], -1)
    whole = [t for t in parts if t is not None]
    if len(whole) != len(parts):
        raise CheckpointError("some of the tensors fused into one product are quantised and some are not; load with fused_qkv: false")
    if kind == "scale":
        whole = [t.reshape(-1, 1).expand(n, 1) if t.dim() < 3 else t.expand(-1, n, 1) for t, n in zip(whole, sizes, strict=True)]
    return shard.join(whole, -2)


def _scale_names(theirs: str) -> list[str]:
    stem = theirs.removesuffix(".weight")
    return [stem + s for s in SCALES]


def _own(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)
