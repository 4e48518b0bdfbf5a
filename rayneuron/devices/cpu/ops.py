"""The verbs of `models.ops` on the kernels: products, norms, greedy choice; whole layers come from `stack`.

B rows, T new tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.cpu import adapters, draws, library, stack
from rayneuron.devices.cpu.packing import BF16, F32, LANES, PANEL, Arena, MatrixFields, Packed, pack, pack_experts, zeros
from rayneuron.devices.cpu.stack import ATTENTION, BEGIN, END, FEED, JOIN_ATTENTION, JOIN_FEED, Stack, refused
from rayneuron.models import ops as plain
from rayneuron.models.arch import Arch
from rayneuron.models.collectives import Collectives
from rayneuron.models.decoder import Taps
from rayneuron.models.kv import Kv, Places
from rayneuron.models.quantization import Quantization, quantise, scale_of

KIND = {torch.float32: F32, torch.bfloat16: BF16}
NORMS = {"rms": 0, "layer": 1}
INT8 = Quantization(torch.int8, "per_channel")
MIRRORS = (MatrixFields, stack.NormFields, stack.LayerFields, stack.ModelFields, stack.CallFields, draws.DrawFields, adapters.LoraFields)


def kernels(threads: int, dtype: torch.dtype, base: plain.Ops) -> Kernels | None:
    """The kernels for one rank, None where they cannot be had or compute no such dtype."""
    if dtype not in KIND:
        return None
    found = library.library()
    return None if found is None else Kernels(found, threads, base)


def check_mirrors(found: ctypes.CDLL) -> None:
    """Raise RuntimeError where a struct here is not the library's: a field on one side only is memory read as something else."""
    sizes = (ctypes.c_int32 * len(MIRRORS))()
    found.rn_sizes(sizes)
    for mirror, size in zip(MIRRORS, sizes, strict=True):
        if ctypes.sizeof(mirror) != size:
            raise RuntimeError(f"{mirror.__doc__} has {size} bytes there and {ctypes.sizeof(mirror)} here: one of them lacks a field")


class Kernels:
    """The kernels and one rank's team of threads. `ops`: the verbs, with `base`'s where the kernels have none."""

    def __init__(self, found: ctypes.CDLL, threads: int, base: plain.Ops) -> None:
        self.found = found
        check_mirrors(found)
        self.team = found.rn_pool_open(threads)
        self.int8 = bool(found.rn_features() & library.INT8)
        self.ops = replace(base, linear=self.linear, norm=self.norm, layers=self.layers, greedy=self.greedy, sample=self.sample)
        self._base = base
        self._arena = Arena()
        self._stacks: dict[int, Stack | None] = {}
        self.slots: adapters.Slots | None = None  # given before the first step
        self._end = weakref.finalize(self, found.rn_pool_close, self.team)  # threads end with their owner, closed or forgotten
        self._end.atexit = False  # an engine thread may still be inside a step then

    def pack(self, weights: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """The weights of one rank, packed layer by layer.

        The head of an int8 model becomes int8 too: half of what such a step reads would be the head.
        """
        arena, top = self._arena, weights["top"]
        small = self.int8 and dtype == torch.bfloat16 and any(t.dtype == torch.int8 for w in weights["layers"] for t in w.values())
        if small and "head.w" in top and top["head.w"].dtype != torch.int8:
            scale = scale_of(top["head.w"], INT8)
            top = {**top, "head.w": quantise(top["head.w"], scale, INT8), "head.scale": scale}
        layers = [pack(w, arena, dtype, self.int8) for w in weights["layers"]]
        return {**weights, "top": pack(top, arena, dtype, self.int8), "layers": layers}

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """KV (`packing.zeros`)."""
        return zeros(shape, dtype)

    def linear(self, w: Mapping[str, Any], name: str, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype, the head's in float32: rows that want logits and rows that do not must choose alike."""
        weight = w[name + ".w"]
        if not isinstance(weight, Packed):
            return self._base.linear(w, name, x)
        x = x.contiguous()
        if weight.fields.gated:
            return self._unpaired(weight, x)
        out = torch.empty(*x.shape[:-1], weight.outputs, dtype=torch.float32 if name == "head" else x.dtype)
        rows = x.numel() // x.shape[-1]
        self.found.rn_linear(self.team, weight.address, x.data_ptr(), KIND[x.dtype], rows, out.data_ptr(), KIND[out.dtype])
        return out

    def _unpaired(self, weight: Packed, x: Tensor) -> Tensor:
        """[gate, up] of a product whose vectors alternate: whole panels first, then each side's own, without the padding."""
        fields = MatrixFields.from_buffer_copy(weight.fields)
        fields.n, fields.gated = weight.fields.panels * PANEL, 0
        out = torch.empty(*x.shape[:-1], fields.n, dtype=x.dtype)
        rows = x.numel() // x.shape[-1]
        self.found.rn_linear(self.team, ctypes.addressof(fields), x.data_ptr(), KIND[x.dtype], rows, out.data_ptr(), KIND[out.dtype])
        sides = out.unflatten(-1, (-1, 2, LANES)).transpose(-3, -2).flatten(-2)  # [..., 2, padded]
        return sides[..., : weight.outputs // 2].flatten(-2)

    def norm(self, w: Mapping[str, Any], name: str, x: Tensor, kind: str, eps: float) -> Tensor:
        """As `models.ops.norm`, computed in float32 and rounded once."""
        if x.dtype not in KIND:
            return self._base.norm(w, name, x, kind, eps)
        x, n = x.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        scale, shift = (None if t is None else t.float() for t in (w.get(name + ".w"), w.get(name + ".b")))
        where = [None if t is None else t.data_ptr() for t in (scale, shift)]
        self.found.rn_norm(self.team, x.data_ptr(), KIND[x.dtype], x.numel() // n, n, *where, NORMS[kind], eps, out.data_ptr())
        return out

    def greedy(
        self, arch: Arch, ops: plain.Ops, comm: Collectives, weights: Mapping[str, Any], hidden: Tensor, leads: Tensor | None = None
    ) -> Tensor | None:  # fmt: skip
        """The likeliest ids without writing the logits, where this rank has the whole head."""
        head = weights["top"].get("head.w")
        if ops is not self.ops or comm.ranks > 1 or arch.softcap_logits or not isinstance(head, Packed) or hidden.dtype not in KIND:
            return None
        hidden = hidden.contiguous()
        ids = torch.empty(hidden.shape[:-1], dtype=torch.int32)
        kind, rows, into = KIND[hidden.dtype], ids.numel(), None if leads is None else leads.data_ptr()
        self.found.rn_best(self.team, head.address, hidden.data_ptr(), kind, rows, arch.vocab, ids.data_ptr(), into)
        return ids

    def sample(self, logits: Tensor, *how: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `engine.sampling.sample` with the whole vocabulary as candidates; so every row is complete."""
        if not draws.fits(logits):
            return None
        return draws.draw(self.found, self.team, logits, *how), torch.ones(logits.shape[0], dtype=torch.bool)

    def layers(
        self, arch: Arch, ops: plain.Ops, comm: Collectives, weights: Mapping[str, Any], kv: Kv, x: Tensor, places: Places,
        taps: Taps | None = None,
    ) -> Tensor | None:  # fmt: skip
        """All layers in one call, or two calls a layer between the sums over ranks; None where a layer is of another kind."""
        made = self._stack(arch, comm, weights, kv) if ops is self.ops else None  # whoever changed a verb wants it called
        if made is None or x.dtype != kv.layers[0][0].dtype:
            return None
        x = x.contiguous()
        call, given = made.call, [t.contiguous() for t in (places.positions, places.rows, places.blocks, places.slots)]
        call.x, call.summand = x.data_ptr(), None
        call.positions, call.rows, call.table, call.slots = (t.data_ptr() for t in given)
        some = places.adapters is not None and bool((places.adapters >= 0).any())
        call.adapters = places.adapters.data_ptr() if some and places.adapters is not None else None
        read = None if places.read is None else places.read.contiguous()
        call.read = None if read is None else read.data_ptr()
        call.batch, call.tokens, call.width = *x.shape[:2], places.blocks.shape[1]
        behind = () if taps is None else taps.behind
        if comm.ranks == 1 and not behind:
            call.y = (state := torch.empty_like(x)).data_ptr()
            self.found.rn_stack_run(made.opened, made.at, 0, made.count, BEGIN | ATTENTION | FEED | END)
            return state
        states = self._alone(made, x, behind) if comm.ranks == 1 else self._between_ranks(made, arch, comm, x, behind)
        if taps is not None:
            taps.states += states
        return self._residual(made, x)

    def _alone(self, made: Stack, x: Tensor, behind: Sequence[int]) -> list[Tensor]:
        """All layers of the only rank, and the residual behind some."""
        done, begin, states = 0, BEGIN, []
        for last in behind:
            self.found.rn_stack_run(made.opened, made.at, done, last, begin | ATTENTION | FEED)
            states.append(self._residual(made, x))
            done, begin = last, 0
        self.found.rn_stack_run(made.opened, made.at, done, made.count, begin | ATTENTION | FEED)
        return states

    def _residual(self, made: Stack, x: Tensor) -> Tensor:
        """As it is now, like x."""
        state = torch.empty_like(x)
        made.call.y = state.data_ptr()
        self.found.rn_stack_run(made.opened, made.at, 0, 0, END)
        return state

    def _between_ranks(self, made: Stack, arch: Arch, comm: Collectives, x: Tensor, behind: Sequence[int]) -> list[Tensor]:
        """Halves of layers, each followed by the sum over ranks of [true tokens, E] in float32; and the residual behind some layers."""
        run = partial(self.found.rn_stack_run, made.opened, made.at)
        tokens = run(0, 0, BEGIN)
        halves, states = [(ATTENTION, JOIN_ATTENTION), (FEED, JOIN_FEED)], []
        if arch.parallel:
            halves = [(ATTENTION | FEED, JOIN_ATTENTION | JOIN_FEED)]
        for i in range(made.count + 1):
            if i in behind:
                states.append(self._residual(made, x))
            for part, join in halves if tokens and i < made.count else ():
                own = torch.empty(tokens, x.shape[-1])  # a new one each time: another rank may still be reading the last
                made.call.summand = own.data_ptr()
                tokens = run(i, i + 1, part)  # fewer, where the last layer leaves out what nobody reads
                if tokens:
                    total = comm.reduce(own[:tokens]).contiguous()
                    made.call.summand = total.data_ptr()
                    run(i, i + 1, join)
        return states

    def _stack(self, arch: Arch, comm: Collectives, weights: Mapping[str, Any], kv: Kv) -> Stack | None:
        key = id(weights["layers"])
        if key not in self._stacks:
            usable = refused(arch, weights["layers"], kv) is None
            for w in weights["layers"] if usable else ():
                pack_experts(w, self._arena, kv.layers[0][0].dtype, self.int8)
            self._stacks[key] = Stack(self.found, self.team, arch, comm, weights, kv, self.slots) if usable else None
        return self._stacks[key]

    def runs_all(self, weights: Mapping[str, Any]) -> bool:
        """Whether a step has run these layers in one call, or in halves between ranks."""
        return self._stacks.get(id(weights["layers"])) is not None

    def forget(self, weights: Mapping[str, Any]) -> None:
        """These weights are not used any more."""
        made = self._stacks.pop(id(weights["layers"]), None)
        if made is not None:
            made.close()

    def close(self) -> None:
        """End the threads."""
        for made in self._stacks.values():
            if made is not None:
                made.close()
        self._stacks = {}
        self._end()
