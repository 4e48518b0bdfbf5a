"""Heads that draft from a model's own hidden states, in the layouts they are published in: Medusa, EAGLE, EAGLE-3; no torch.

E hidden size of the heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rayneuron import models
from rayneuron.errors import CheckpointError
from rayneuron.models import safe_header
from rayneuron.models.arch import Arch
from rayneuron.models.memory import Parameters, canonical, share
from rayneuron.models.rules import Rules, both, shape_of

MAPS = ("d2t", "t2d")  # of a draft vocabulary: what to add to an id to have the model's; whether an id of the model's is there
Shapes = Mapping[str, tuple[int, ...]]
Renamed = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads as data, and their tensors as `weights.load` reads those of a family: `outside` the layers and `inside` each of them (a Medusa
    head is one), ours and theirs. `arch`: theirs; `width`: of what they need of each position; `taps`: they read the residual behind so
    many layers of the model, and not its hidden state; `normed`: the layer adds to what it has normed (EAGLE-3)."""

    PREFIX: ClassVar[str] = ""
    IGNORE: ClassVar[tuple[str, ...]] = (*MAPS, "rotary_emb.inv_freq")

    method: str
    arch: Arch
    width: int
    outside: Renamed
    inside: tuple[Renamed, ...]
    taps: tuple[int, ...] = ()
    normed: bool = False

    def top(self, a: Arch) -> Rules:
        """Tensors outside the layers."""
        return dict(self.outside)

    def layer(self, a: Arch, i: int) -> Rules:
        """Tensors of one layer."""
        return dict(self.inside[i])

    @property
    def chained(self) -> bool:
        """Whether each draft is made from the one before, and has KV; else all are made of one hidden state."""
        return self.method != "medusa"

    @property
    def layers(self) -> int:
        """Those that have KV."""
        return int(self.chained)

    @property
    def headed(self) -> bool:
        """Whether they have a head over the vocabulary; else they have the model's."""
        return not self.chained or "head.w" in dict(self.outside)

    @property
    def most(self) -> int | None:
        """The most drafts they can make, None where they can make any number."""
        return None if self.chained else len(self.inside)

    def parameters(self, ranks: int) -> Parameters:
        """What a rank holds of them."""
        part = share(self.arch, ranks)
        total = part.count(name for name, _ in self.outside)
        for pairs in self.inside:
            total += part.count(canonical(dict(pairs)), self.arch.ffn)
        return total


def kind(raw: Mapping[str, Any]) -> str | None:
    """The method whose heads a config.json is of, by what only such files say; None where it says nothing."""
    said = [str(raw.get("model_type", "")), *map(str, raw.get("architectures") or ())]
    if "medusa_num_heads" in raw or any(word.lower().startswith("medusa") for word in said):
        return "medusa"
    if "draft_vocab_size" in raw or any("eagle3" in word.lower() for word in said):
        return "eagle3"
    return "eagle" if any(word.lower().startswith("eagle") for word in said) else None


def shapes(folder: Path, allow_pickle: bool = False) -> Shapes:
    """The tensors of a directory, by the headers of its safetensors files. Raises CheckpointError."""
    whole = folder / "model.safetensors"
    found: dict[str, tuple[int, ...]] = {}
    for file in [whole] if whole.is_file() else sorted(folder.glob("*.safetensors")):
        found |= {name: entry.shape for name, entry in safe_header.read(file).entries.items()}
    if found:
        return found
    from rayneuron.models.hub import Checkpoint

    return {name: tuple(t.shape) for name, t in Checkpoint(folder, allow_pickle).items()}


def read(method: str, raw: Mapping[str, Any], held: Shapes, target: Arch) -> Heads:
    """Heads for a model by their config.json and the tensors there are. Raises CheckpointError naming what is missing, misshapen, read by
    nothing, or not for this model."""
    if (other := kind(raw) or method) != method:
        raise CheckpointError(f"these are {other} heads, and not {method}; write method: {other}")
    made = {"medusa": _medusa, "eagle": _eagle, "eagle3": _eagle3}[method](raw, held, target)
    for name, wanted in _wanted(made):
        if name not in held:
            raise CheckpointError(f"tensor {name!r} is missing from the {len(held)} of these {method} heads")
        if held[name] != wanted:
            raise CheckpointError(f"tensor {name!r} has shape {held[name]}, but config.json promises {wanted}")
    known = {name for name, _ in _wanted(made)}
    left = [name for name in held if name not in known and not name.endswith(Heads.IGNORE)]
    if left:
        raise CheckpointError(f"nothing in {method} heads reads {', '.join(left[:3])} ({len(left)} tensors in all)")
    return made


def _wanted(heads: Heads) -> Iterable[tuple[str, tuple[int, ...]]]:
    for pairs in (heads.outside, *heads.inside):
        for ours, theirs in pairs:
            yield theirs, shape_of(heads.arch, ours, heads.arch.ffn)
    if heads.arch.spoken:
        yield from zip(MAPS, ((heads.arch.spoken,), (heads.arch.vocab,)), strict=True)


def _medusa(raw: Mapping[str, Any], held: Shapes, target: Arch) -> Heads:
    """Each head is residual blocks and a head of its own, or one that all share; FasterDecoding's names, or vLLM's."""
    count, blocks = (_number(raw, *names) for names in (("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")))
    _refuse(raw, {"truncated_vocab_size": (None, target.vocab)})
    _same(raw, target)
    prefix = _prefix(held, "medusa_heads.", "medusa_head.")
    named = any(name.startswith((f"{prefix}blocks.", f"{prefix}lm_head")) for name in held)
    alike = [f"{prefix}{name}.weight" for name in ("lm_heads.0", "lm_head")] if raw.get("original_lm_head") else [""]
    shared = next((name for name in alike if name in held), alike[-1])
    biased = any(name.startswith(prefix) and name.endswith(".bias") for name in held)
    inside: list[Renamed] = []
    for i in range(count):
        at = {f"block{j}": f"{prefix}blocks.{i}.layers.{j}" if named else f"{prefix}{i}.{j}.linear" for j in range(blocks)}
        own: Rules = {} if shared else {"head.w": f"{prefix}lm_heads.{i}.weight" if named else f"{prefix}{i}.{blocks}.weight"}
        inside.append(_pairs(both(at, None if biased else ()) | own))
    width = target.embed or target.hidden
    arch = Arch("medusa", target.vocab, width, count, target.heads, target.kv_heads, target.head_dim, 0, gqa=target.gqa)
    return Heads("medusa", arch, width, (("head.w", shared),) if shared else (), tuple(inside))


def _eagle(raw: Mapping[str, Any], held: Shapes, target: Arch) -> Heads:
    """One decoder layer on the embedding of an id joined with the hidden state before it; without a head of its own it has the model's."""
    if isinstance(raw.get("model"), dict):  # as vLLM wraps them
        raw = {**raw["model"], **{key: value for key, value in raw.items() if key.startswith("eagle_")}}
    arch, family = _layer(raw, target)
    prefix, width = _prefix(held, "model."), target.embed or target.hidden
    outside = {"fc.w": f"{prefix}fc.weight"} | ({"fc.b": f"{prefix}fc.bias"} if _biased(raw, held, f"{prefix}fc.bias") else {})
    outside |= _own(held, prefix, arch, target)
    layer = {ours: f"{prefix}layers.0.{theirs}" for ours, theirs in _pairs(family.layer(arch, 0))}
    if layer["ln1.w"] not in held:  # as published; NxD's may have one
        del layer["ln1.w"]
    arch = replace(arch, joined=arch.hidden + width)
    return Heads("eagle", arch, width, _pairs(outside), (_pairs(layer),))


def _eagle3(raw: Mapping[str, Any], held: Shapes, target: Arch) -> Heads:
    """One decoder layer whose attention reads the embedding beside what `fc` makes of three residuals, and a head that may know some ids
    only."""
    said = raw.get("eagle_config") or {}
    _refuse({**raw, **said}, {"norm_before_fc": (None, False), "fc_norm": (None, False), "norm_output": (None, False)})
    _refuse(said, {"use_aux_hidden_state": (None, True)})
    arch, family = _layer(raw, target)
    prefix, width = _prefix(held, "model."), target.hidden
    if (other := raw.get("target_hidden_size") or width) != width:
        raise CheckpointError(f"they read hidden states of {other}, the model has {width}; name heads that were trained for it")
    taps = raw.get("eagle_aux_hidden_state_layer_ids") or said.get("eagle_aux_hidden_state_layer_ids")
    taps = (2, target.layers // 2, target.layers - 3) if taps is None else tuple(taps)
    rising = all(type(i) is int for i in taps) and list(taps) == sorted(set(taps))
    if not taps or not rising or not 0 <= taps[0] <= taps[-1] <= target.layers:
        raise CheckpointError(
            f"they read the model behind {', '.join(map(str, taps))} of its {target.layers} layers; say which, rising, as "
            "eagle_aux_hidden_state_layer_ids in their config.json"
        )
    name = "midlayer." if any(n.startswith(f"{prefix}midlayer.") for n in held) else "layers.0."
    layer = {ours: f"{prefix}{name}{theirs}" for ours, theirs in _pairs(family.layer(arch, 0))}
    layer["hidden_norm.w"] = f"{prefix}{name}hidden_norm.weight"
    outside = {"fc.w": f"{prefix}fc.weight", "norm.w": f"{prefix}norm.weight", "head.w": "lm_head.weight"}
    outside |= _own(held, prefix, arch, target)
    known = raw.get("draft_vocab_size") or target.vocab
    arch = replace(arch, spoken=known if known != target.vocab else 0, joined=len(taps) * width, doubled=True)
    normed = bool(raw.get("norm_before_residual", False))
    return Heads("eagle3", arch, arch.hidden, _pairs(outside), (_pairs(layer),), taps, normed)


def _layer(raw: Mapping[str, Any], target: Arch) -> tuple[Arch, Any]:
    """The decoder layer that drafts, which is one of Llama's kind, and its family."""
    family, arch = models.family(dict(raw)), models.architecture(dict(raw))
    if models.FAMILIES[arch.model_type] != "llama" or arch.layers != 1 or arch.windows:
        raise CheckpointError(
            f"config.json is of {arch.layers} layers of {arch.model_type}; what drafts here is one layer of llama, mistral, qwen2 or qwen3"
        )
    _same(raw, target)
    return replace(arch, tied=False, gqa=target.gqa), family


def _own(held: Shapes, prefix: str, arch: Arch, target: Arch) -> dict[str, str]:
    """The embedding and the head, where they are theirs and not the model's."""
    names = {"embed.w": f"{prefix}embed_tokens.weight", "head.w": "lm_head.weight"}
    missing = [name for name in names.values() if name not in held]
    if missing and arch.hidden != (target.embed or target.hidden):
        raise CheckpointError(
            f"they have no {missing[0]}, and the model's does not fit: it has hidden size {target.hidden}, they have {arch.hidden}"
        )
    return {ours: theirs for ours, theirs in names.items() if theirs in held}


def _same(raw: Mapping[str, Any], target: Arch) -> None:
    """They are for this vocabulary."""
    if raw.get("vocab_size", target.vocab) != target.vocab:
        raise CheckpointError(
            f"they have a vocabulary of {raw['vocab_size']}, the model has {target.vocab}; name heads that were trained for it"
        )


def _biased(raw: Mapping[str, Any], held: Shapes, name: str) -> bool:
    """Whether `fc` has a bias: the file decides, unless config.json does."""
    said = raw.get("bias", raw.get("eagle_fc_bias"))
    return name in held if said is None else bool(said)


def _number(raw: Mapping[str, Any], *names: str) -> int:
    found = next((raw[name] for name in names if name in raw), 1 if "layers" in names[0] else None)
    if type(found) is not int or not 1 <= found <= 64:
        raise CheckpointError(f"config.json sets {names[0]}: {found!r:.40}, which is to be a number from 1 to 64")
    return found


def _refuse(raw: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]) -> None:
    for name, fine in known.items():
        if raw.get(name) not in fine:
            raise CheckpointError(f"config.json sets {name}: {raw[name]!r:.40}, and such heads are not read here")


def _prefix(held: Shapes, *names: str) -> str:
    return next((prefix for prefix in names if any(name.startswith(prefix) for name in held)), "")


def _pairs(rules: Rules | dict[str, str]) -> Renamed:
    return tuple((ours, rule if isinstance(rule, str) else rule[0]) for ours, rule in rules.items())
