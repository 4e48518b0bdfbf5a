"""Whole layers in one call: the model as the structs of stack.h.

B rows, T new tokens, E hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.cpu import panels
from rayneuron.devices.cpu.adapters import Slots
from rayneuron.devices.cpu.packing import BF16, F32, MatrixFields, Packed, lanes
from rayneuron.models import rotary, shard
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives
from rayneuron.models.kv import Kv

ACTS = {"silu": 1, "swish": 1, "gelu": 2, "gelu_new": 3, "gelu_fast": 3, "gelu_pytorch_tanh": 3, "quick_gelu": 4, "relu": 5, "relu2": 6}
BEGIN, ATTENTION, JOIN_ATTENTION, FEED, JOIN_FEED, END = 1, 2, 4, 8, 16, 32
NORMS = ("ln1", "ln2", "q_norm", "k_norm")
_P, _I, _F = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class NormFields(ctypes.Structure):
    """`Norm` of stack.h."""

    _fields_ = [("w", _P), ("b", _P)]


class LayerFields(ctypes.Structure):
    """`Layer` of stack.h."""

    _fields_ = [
        *((name, MatrixFields) for name in ("qkv", "o", "up", "down")),
        *((name, NormFields) for name in NORMS),
        *((name, _P) for name in ("expert_up", "expert_down", "o_bias", "down_bias", "kv", "lora")),
        *((name, _I) for name in ("window", "second", "nope")),
    ]


class ModelFields(ctypes.Structure):
    """`Model` of stack.h."""

    _fields_ = [
        *((name, _P) for name in ("layer", "cos", "sin", "slopes")),
        *((name, _I) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "half", "pairs")),
        *((name, _I) for name in ("norm", "post_norm", "parallel", "gated", "act", "qk_norm", "kind", "rows", "limit", "blocks", "block")),
        *((name, _I) for name in ("panels", "experts", "top_k", "renormalise")),
        *((name, _F) for name in ("eps", "clip", "scale")),
    ]


class CallFields(ctypes.Structure):
    """`Call` of stack.h."""

    _fields_ = [
        *((name, _P) for name in ("x", "y", "positions", "rows", "table", "slots", "summand", "adapters", "read")),
        *((name, _I) for name in ("batch", "tokens", "width")),
    ]


def refused(arch: Arch, layers: Sequence[Mapping[str, Any]], kv: Kv) -> str | None:
    """Why these layers cannot run as a stack; None where they can."""
    if arch.uncommon:
        return arch.uncommon
    dense = ("down.w", "gate_up.w" if arch.gated else "up.w")
    for w in layers:
        for name in ("qkv.w", "o.w", *(("router.w",) if "router.w" in w else dense)):
            if not isinstance(w.get(name), Packed):
                return f"{name} is not one packed product"
    if arch.experts and (arch.capacity_factor is not None or not arch.gated or arch.parallel):
        return "experts drop tokens, have no gate, or read what attention reads"
    if kv.shape.shards > 1:
        return "KV is split by position"
    if not kv.layers or kv.layers[0][0].dtype not in (torch.float32, torch.bfloat16):
        return "KV is stored small"
    if any(k.stride()[:2] != v.stride()[:2] or k.data_ptr() + k[0, 0].nbytes != v.data_ptr() for k, v in kv.layers):
        return "keys and values do not lie in units"
    if arch.head_dim % 2 or arch.act not in ACTS:
        return f"head size {arch.head_dim}, activation {arch.act}"
    return None


class Stack:
    """The `count` layers of one rank over its weights and KV, as the kernels know them; `call`, at address `at`: what a run is told."""

    def __init__(
        self, found: ctypes.CDLL, team: Any, arch: Arch, comm: Collectives, weights: Mapping[str, Any], kv: Kv, slots: Slots | None = None
    ) -> None:  # fmt: skip
        """`slots`: of adapters, where there may be any."""
        self._found = found
        self._arch = arch
        self._held: list[Any] = [weights, kv]
        self._slots = slots
        self.count = len(weights["layers"])
        model = self._model(comm, weights, kv)
        self.opened = found.rn_stack_open(team, ctypes.addressof(model))
        self.call = CallFields()
        self.at = ctypes.addressof(self.call)

    def _model(self, comm: Collectives, weights: Mapping[str, Any], kv: Kv) -> ModelFields:
        arch, top, space = self._arch, weights["top"], kv.shape.space
        plan = shard.head_plan(arch.heads, arch.kv_heads, comm.ranks, arch.gqa, arch.sequence_shards)
        first = weights.get("first", 0)
        layers = (LayerFields * self.count)(
            *(
                self._layer(i, first + i, w, keys, comm.ranks)
                for i, (w, (keys, _)) in enumerate(zip(weights["layers"], kv.layers, strict=True))
            )
        )
        inner = next((w["down.w"].fields.k for w in weights["layers"] if "down.w" in w), 0)
        model = ModelFields(
            layer=ctypes.addressof(layers),
            layers=self.count,
            hidden=arch.hidden,
            heads=plan.q_heads,
            kv_heads=plan.kv_heads,
            head_dim=arch.head_dim,
            inner=inner,
            half=arch.rope.dim // 2 if arch.position == "rope" else 0,
            pairs=arch.rope.pairs,
            norm=arch.norm == "layer",
            post_norm=arch.post_norm,
            parallel=arch.parallel,
            gated=arch.gated,
            act=ACTS[arch.act],
            qk_norm=arch.qk_norm,
            experts=arch.experts,
            top_k=arch.top_k,
            renormalise=arch.renormalise,
            kind=F32 if kv.layers[0][0].dtype == torch.float32 else BF16,
            rows=space.rows,
            limit=space.limit,
            blocks=space.blocks,
            block=space.block,
            panels=panels.lie(kv.layers[0]),
            eps=arch.eps,
            clip=arch.clip_qkv,
            scale=arch.scale,
        )
        if arch.position == "rope":
            every = torch.arange(space.limit, dtype=torch.int32)[None]
            cos, sin = (t.flatten(0, 2).contiguous() for t in rotary.tables(arch, top["rope.freq"], every, torch.float32))
            model.cos, model.sin = self._keep(cos), self._keep(sin)
        if arch.position == "alibi":
            model.slopes = self._keep(top["slopes"].float())
        self._held += [layers, model]
        return model

    def _layer(self, i: int, index: int, w: Mapping[str, Any], keys: Tensor, ranks: int) -> LayerFields:
        up = w["router.w"] if "router.w" in w else w["gate_up.w"] if self._arch.gated else w["up.w"]
        made = LayerFields(w["qkv.w"].fields, w["o.w"].fields, up.fields, kv=keys.data_ptr())
        made.window, made.nope = self._arch.window(index), index in self._arch.nope
        made.lora = None if self._slots is None else self._slots.address(i)
        made.second = not self._arch.parallel or "ln2.w" in w
        if "router.w" in w:
            made.expert_up, made.expert_down = (self._experts(w, f"experts.{name}") for name in ("gate_up", "down"))
        else:
            made.down = w["down.w"].fields
        for name in NORMS:
            weight, bias = w.get(name + ".w"), w.get(name + ".b")
            if weight is not None and self._arch.norm_offset:
                weight = weight.float() + 1
            getattr(made, name).w, getattr(made, name).b = self._keep(weight), self._keep(bias)
        for name, matrix in (("o", made.o), ("down", made.down)):
            bias = w.get(name + ".bias")
            if bias is not None and ranks == 1:
                matrix.bias = self._keep(lanes(bias, gated=False))
            elif bias is not None:
                setattr(made, name + "_bias", self._keep(bias))
        return made

    def _experts(self, w: Mapping[str, Any], name: str) -> int:
        """The address of one Matrix an expert."""
        made = (MatrixFields * len(w[name + ".w"]))(*(e.fields for e in w[name + ".w"]))
        self._held.append(made)
        return ctypes.addressof(made)

    def _keep(self, t: Tensor | None) -> int | None:
        """The address of t as float32, kept alive."""
        if t is None:
            return None
        self._held.append(t.float().contiguous())
        return int(self._held[-1].data_ptr())

    def close(self) -> None:
        """Give the scratch memory back."""
        self._found.rn_stack_close(self.opened)
        self._held = []
