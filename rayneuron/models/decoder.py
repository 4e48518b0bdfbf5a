"""One decoder for every family: pure functions on fixed shapes.

B rows, T new tokens, L attended, E hidden, H heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.models import flash_decoding, rotary, shard
from rayneuron.models.adapted import adapted
from rayneuron.models.arch import Arch
from rayneuron.models.attention import StepTables, attention, bias, whole_norm
from rayneuron.models.feedforward import feed_forward
from rayneuron.models.kv import Kv, KvShape, Places

if TYPE_CHECKING:
    from rayneuron.models.collectives import Collectives
    from rayneuron.models.ops import Layer, Ops


@dataclass(slots=True)
class Taps:
    """The residual `behind` so many layers each, rising, which a forward pass puts into `states` [B,T,E]."""

    behind: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)


def forward(
    arch: Arch, ops: Ops, comm: Collectives, weights: Mapping[str, Any], kv: Kv, tokens: Tensor, places: Places,
    hidden: Tensor | None = None, taps: Taps | None = None,
) -> Tensor:  # fmt: skip
    """tokens int32 [B,T] -> [B,T,E] after the final norm; `kv` is written.

    A pipeline stage that holds no embedding starts from `hidden` [B,T,E]; one that holds no final norm returns the residual. `taps`: where
    else the residual is wanted.
    """
    top = weights["top"]
    x = embed(arch, ops, comm, top, tokens, places.positions) if hidden is None else hidden
    x = layers(arch, ops, comm, weights, kv, x, places, taps)
    if arch.final_norm and not arch.post_norm and "head.w" in top:  # the last stage
        x = norm(arch, ops, top, "norm", x)
    return ops.linear(top, "project_out", x) if "project_out.w" in top else x


def layers(
    arch: Arch, ops: Ops, comm: Collectives, weights: Mapping[str, Any], kv: Kv, x: Tensor, places: Places, taps: Taps | None = None
) -> Tensor:
    """This rank's layers on the residual x [B,T,E], in the device's fused form where it has one."""
    if ops.layers is not None:
        fused = ops.layers(arch, ops, comm, weights, kv, x, places, taps)
        if fused is not None:
            return fused
    if places.adapters is not None:
        ops = adapted(ops, places.adapters, weights["lora_rank"])
    step = prepare(arch, ops, comm, weights["top"], places, kv.shape, x.dtype)
    first = weights.get("first", 0)
    for i, w in enumerate(weights["layers"]):
        if taps is not None and i in taps.behind:
            taps.states.append(x)
        x, kv.layers[i] = layer(arch, ops, comm, w, kv.layers[i], x, step, first + i)
    if taps is not None and len(weights["layers"]) in taps.behind:
        taps.states.append(x)
    return x


def prepare(
    arch: Arch, ops: Ops, comm: Collectives, top: Mapping[str, Tensor], places: Places, shape: KvShape, dtype: torch.dtype
) -> StepTables:
    """Masks and rotary tables, once a step."""
    plan = shard.head_plan(arch.heads, arch.kv_heads, comm.ranks, arch.gqa, arch.sequence_shards)
    positions, length = places.positions, places.length
    cos, sin = rotary.tables(arch, top["rope.freq"], positions, dtype) if arch.position == "rope" else (None, None)
    windows, split = sorted(set(arch.windows or (0,))), None
    if shape.shards > 1:
        biases = {w: flash_decoding.bias(top, positions, length, w, shape, dtype) for w in windows}
        split = partial(flash_decoding.attend, arch, ops, comm, top, shape)
    else:
        biases = {w: bias(positions, length, w, top.get("slopes"), dtype) for w in windows}
    other = arch.local_rope and replace(arch, rope=arch.local_rope)
    local = rotary.tables(other, top["rope.local"], positions, dtype) if other else None
    whole = partial(whole_norm, arch, comm, plan) if arch.whole_qk_norm else None
    return StepTables(places, biases, cos, sin, plan.q_heads, plan.kv_heads, partial(norm, arch, ops), split, local, whole)


def norm(arch: Arch, ops: Ops, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The norm `name` of this architecture. A weight that counts from 1 is brought there in float32, where small dtypes lose nothing."""
    if arch.norm_offset:
        w = {f"{name}.w": w[f"{name}.w"].float() + 1} | ({f"{name}.b": w[f"{name}.b"]} if f"{name}.b" in w else {})
    return ops.norm(w, name, x, arch.norm, arch.eps)


def embed(arch: Arch, ops: Ops, comm: Collectives, top: Mapping[str, Tensor], tokens: Tensor, positions: Tensor) -> Tensor:
    """Vocabulary-parallel lookup [B,T,E]: rows outside this rank's share are zero and the sum over ranks restores them."""
    table = top["embed.w"]
    if comm.ranks == 1:
        x = F.embedding(tokens, table)
    else:
        local = tokens - top["embed.first"]
        mine = (local >= 0) & (local < table.shape[0])
        x = comm.reduce(F.embedding(local.clamp(0, table.shape[0] - 1), table) * mine[..., None])
    if arch.embed_scale != 1:
        x = x * torch.full((), arch.embed_scale, dtype=x.dtype, device=x.device)
    if "embed_norm.w" in top:
        x = ops.norm(top, "embed_norm", x, arch.norm, arch.eps)
    if "project_in.w" in top:
        x = ops.linear(top, "project_in", x)
    if arch.position == "learned":  # scratch positions may lie beyond the table
        x = x + F.embedding((positions + arch.position_offset).clamp(max=top["position.w"].shape[0] - 1), top["position.w"])
    return x


def layer(
    arch: Arch, ops: Ops, comm: Collectives, w: Mapping[str, Tensor], kv: Layer, x: Tensor, step: StepTables, index: int,
    read: Tensor | None = None,
) -> tuple[Tensor, Layer]:  # fmt: skip
    """Layer `index` of the model on the residual x [B,T,E], and its KV afterwards. `read`: what attention reads if not the norm of x.

    Biases of the row-split products (`o.bias`, `down.bias`) are added once, after the sum.
    """

    def normed(name: str, x: Tensor) -> Tensor:
        return norm(arch, ops, w, name, x)

    def joined(x: Tensor, name: str, summand: Tensor) -> Tensor:
        if arch.norms == "before":
            return _add(x + comm.reduce(summand), w, f"{name}.bias")
        return x + normed(f"{name}_norm", _add(comm.reduce(summand), w, f"{name}.bias"))

    before = not arch.post_norm and arch.norms != "after"
    h = read if read is not None else normed("ln1", x) if before else x
    a, kv = attention(arch, ops, w, kv, h, step, index)
    if arch.parallel:
        h = normed("ln2", x) if "ln2.w" in w else h  # GPT-J has one norm for both
        return _add(_add(x + comm.reduce(a + feed_forward(arch, ops, w, h)), w, "o.bias"), w, "down.bias"), kv
    x = joined(x, "o", a)
    if arch.post_norm:
        x = normed("ln1", x)
    h = normed("ln2", x) if before else x
    x = joined(x, "down", feed_forward(arch, ops, w, h))
    return (normed("ln2", x) if arch.post_norm else x), kv


def _add(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    return x + w[name] if name in w else x


def greedy(
    arch: Arch, ops: Ops, comm: Collectives, weights: Mapping[str, Any], hidden: Tensor, leads: Tensor | None = None
) -> Tensor:  # fmt: skip
    """hidden [...,E] -> the likeliest next ids [...] int32, the lowest among equals. leads float32 [...]: where by how many logits each
    leads the next is written."""
    fused = ops.greedy(arch, ops, comm, weights, hidden, leads) if ops.greedy is not None else None
    if fused is not None:
        return fused
    found = logits(arch, ops, comm, weights, hidden)
    if leads is not None:
        torch.sub(*found.topk(2).values.unbind(-1), out=leads)
    return ops.likeliest(found)


def logits(arch: Arch, ops: Ops, comm: Collectives, weights: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """hidden [...,E] -> float32 [...,V]. The padding that sharding added to the vocabulary is cut off, so it can never be chosen."""
    if ops.logits is not None:
        return ops.logits(arch, ops, comm, weights, hidden)
    return capped(arch, comm.gather(ops.linear(weights["top"], "head", hidden))[..., : arch.vocab].float())


def capped(arch: Arch, x: Tensor) -> Tensor:
    """Logits with the model's scale and soft cap."""
    if arch.logits_scale != 1:
        x = x / arch.logits_scale
    return arch.softcap_logits * torch.tanh(x / arch.softcap_logits) if arch.softcap_logits else x
