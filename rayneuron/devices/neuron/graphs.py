"""What is compiled for Neuron: the step program over named weights and KV, one graph a shape, and three that move KV.

B rows, T new tokens, H KV heads of a rank, N blocks of S positions, n blocks moved at once, D head size, V vocabulary.
Rules of the runtime kept here: one forward signature for all graphs; a state is a buffer of the root that is rebound, never written in
place; and every graph rebinds every state (the first graph that is added decides which buffers are states, so a graph that only read one
would see it as a weight).

With `Border.feedback` there is one state more: the id each row sampled last. A decode step whose token is -1 takes it from there, so
the host need not have seen it before it starts the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayneuron.devices.base import SCHEMA, Batch, Program, Shape, StepOutput, Weights, sizes
from rayneuron.devices.idle import idle
from rayneuron.devices.neuron.targets import WHOLE, Border, Move, Target, aligned, spare_columns
from rayneuron.devices.neuron.verbs import verbs
from rayneuron.errors import CompileError
from rayneuron.models.collectives import Collectives
from rayneuron.models.kv import Kv, KvShape

IDS = "ids"  # the state of ids, with feedback
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "uniform")
_PACKED = {"ints": ("int32", torch.int32), "floats": ("float32", torch.float32)}  # one array each: every input is copied to every rank


def input_names(shape: Shape, border: Border = WHOLE) -> tuple[str, ...]:
    """The fields of a Batch that the graph reads."""
    rows = ("rows",) if border.feedback else ()
    last = ("last",) if shape.tokens > 1 and shape.want.at == "last" else ()
    sampling = _SAMPLING if shape.want.ids == "sampled" else ()
    return ("tokens" if border.first else "hidden", "positions", *rows, "blocks", "slots", *last, *sampling)


@lru_cache(256)  # every step asks
def packed(shape: Shape, border: Border = WHOLE) -> Mapping[str, list[str]]:
    """The fields of a Batch that lie side by side in each packed array [B,n]."""
    names = [n for n in input_names(shape, border) if n != "hidden"]
    return {kind: found for kind, (dtype, _) in _PACKED.items() if (found := [n for n in names if SCHEMA[n].dtype == dtype])}


def pack(batch: Batch, shape: Shape, border: Border = WHOLE) -> dict[str, Tensor]:
    """The inputs of a graph of `shape`: all integers in one array, all numbers in another, hidden states apart."""
    out = {}
    for kind, names in packed(shape, border).items():
        parts: list[Tensor] = [getattr(batch, n) for n in names]
        out[kind] = torch.cat([part if part.ndim > 1 else part.unsqueeze(1) for part in parts], 1)
    return out if border.first else {**out, "hidden": cast(Tensor, batch.hidden)}


def seat(given: Mapping[str, Tensor], blank: Mapping[str, Tensor], rows: list[int], count: int) -> tuple[dict[str, Tensor], Tensor]:
    """What was packed with its first rows at `rows`, the others as in `blank`; and for `count` rows where each is to be found."""
    made, seats = {}, np.array(rows)
    for kind, packed in given.items():  # numpy takes half of the time of torch
        made[kind] = torch.from_numpy(laid := blank[kind].numpy().copy())
        laid[seats] = packed.numpy()[: len(rows)]
    found = np.zeros(count, np.int64)
    found[: len(rows)] = seats
    return made, torch.from_numpy(found)


def unpack(given: Mapping[str, Tensor | None], shape: Shape, kv: KvShape, border: Border = WHOLE) -> Batch:
    """A Batch of what was packed; None what the graph does not read."""
    fields: dict[str, Any] = dict.fromkeys(SCHEMA)
    for kind, names in packed(shape, border).items():
        widths = [sizes(n, shape, kv.space)[1:] for n in names]
        parts = cast(Tensor, given[kind]).split([w[0] if w else 1 for w in widths], 1)
        fields |= {n: part if w else part[:, 0] for n, part, w in zip(names, parts, widths, strict=True)}
    return Batch(**{**fields, "hidden": given["hidden"]})


def example(target: Target, kv: KvShape, kv_dtype: torch.dtype, border: Border = WHOLE) -> dict[str, Tensor]:
    """Inputs of the graph's shapes and dtypes, for tracing."""
    if isinstance(target, Move):
        given = ("source", "target") if target.tag == "kv_copy" else ("moved",)
        inputs = {n: torch.zeros(target.blocks, dtype=torch.int32) for n in given}
        if target.tag == "kv_import":
            shape = (kv.layers, target.blocks, kv.heads, 2, kv.columns, kv.dim)
            inputs["values"] = torch.zeros(shape, dtype=carried(kv_dtype))
        return inputs
    batch = idle(target, kv.space)
    if not border.first:
        batch.hidden = torch.zeros(sizes("hidden", target, kv.space, border.hidden), dtype=border.dtype or torch.float32)
    return pack(batch, target, border)


def named(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a rank by its name in the graph: top.embed.w, layers.0.qkv.w."""
    for key, tensor in weights["top"].items():
        yield f"top.{key}", tensor
    for i, layer in enumerate(weights["layers"]):
        for key, tensor in layer.items():
            yield f"layers.{i}.{key}", tensor


class Graph(nn.Module):
    """The module that is traced once a target. Weights are parameters, KV buffers; `shown` says which graph the next trace makes."""

    def __init__(
        self, program: Program, comm: Collectives, weights: Weights, kv: KvShape, kv_dtype: torch.dtype, border: Border = WHOLE,
        *, together: bool = True,
    ) -> None:  # fmt: skip
        """`together`: the host that runs the graph drives all ranks."""
        super().__init__()
        self.shown: Target | None = None
        self.kv = kv
        self._border = border
        self._program, self._comm, self._together = program, comm, together
        self._first = weights.get("first", 0)
        self._top, self._layers = list(weights["top"]), [list(layer) for layer in weights["layers"]]
        seen: set[int] = set()
        for path, tensor in named(weights):
            shared = tensor.data_ptr() in seen and tensor.numel() > 0
            seen.add(tensor.data_ptr())
            # A tensor under two names (tied embeddings) would become one parameter of the graph, and the other name unknown.
            self._place(path, tensor.clone() if shared else tensor)
        columns = kv.columns + spare_columns(kv.space)
        for state in states(kv):
            self.register_buffer(state, torch.zeros(kv.space.total, kv.heads, columns, kv.dim, dtype=kv_dtype))
        if border.feedback:
            self.register_buffer(IDS, torch.zeros(kv.space.rows + 1, dtype=torch.int32))

    def forward(
        self,
        ints: Tensor | None = None,
        floats: Tensor | None = None,
        hidden: Tensor | None = None,
        moved: Tensor | None = None,
        source: Tensor | None = None,
        target: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The outputs of `shown`: ids | ids, complete, logits | logits | hidden | KV [layers,n,H,2,S,D] | the blocks written."""
        held = [getattr(self, path) for path in states(self.kv)]
        kv = Kv(self.kv, list(zip(held[::2], held[1::2], strict=True)))
        seen = getattr(self, IDS) if self._border.feedback else None
        shown, rows = self.shown, None
        if isinstance(shown, Move):
            out = move(shown, kv, moved, source, target, values)
        else:
            assert shown is not None
            batch = unpack({"ints": ints, "floats": floats, "hidden": hidden}, shown, self.kv, self._border)
            rows = batch.rows
            if seen is not None:
                batch.tokens = follow(batch.tokens, seen, rows)
            ops = verbs(self._comm, self.kv, aligned=aligned(shown, self.kv.space, self._border), together=self._together)
            out = outputs(self._program(ops, self._comm, self._weights(), kv, batch, shown), shown)
        for path, old, value in zip(states(self.kv), held, (store for layer in kv.layers for store in layer), strict=True):
            if value is old:
                raise CompileError(f"the program leaves {path} as it was, and every graph has to rebind every state")
            setattr(self, path, value)
        if seen is not None:
            setattr(self, IDS, remember(seen, rows, out, shown))
        return out

    def _weights(self) -> dict[str, Any]:
        top = {key: self._tensor(f"top.{key}") for key in self._top}
        layers = [{key: self._tensor(f"layers.{i}.{key}") for key in keys} for i, keys in enumerate(self._layers)]
        return {"top": top, "layers": layers, "first": self._first}

    def _place(self, path: str, tensor: Tensor) -> None:
        """Put a weight at a dotted path; torch allows no dots in one name."""
        *parents, leaf = path.split(".")
        module: nn.Module = self
        for part in parents:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = cast(nn.Module, module._modules[part])
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))

    def _tensor(self, path: str) -> Tensor:
        """Looked up at every trace: moving a module to another device replaces its tensors."""
        parent, _, leaf = path.rpartition(".")
        return cast(Tensor, getattr(self.get_submodule(parent), leaf))


def carried(kv_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which KV goes in and out of a graph: float8 as bfloat16, which holds all of its numbers."""
    return kv_dtype if kv_dtype.itemsize > 1 else torch.bfloat16


def states(kv: KvShape) -> list[str]:
    """The names of the KV buffers, keys and values of a layer apart."""
    return [f"kv_{layer}_{part}" for layer in range(kv.layers) for part in "kv"]


def outputs(out: StepOutput, shape: Shape) -> tuple[Tensor, ...]:
    """What a graph of `shape` returns: ids | ids, complete (int32), logits | logits | hidden | pooled."""
    want = shape.want
    if want.ids is None:
        return (cast(Tensor, out.pooled if want.pooled else out.hidden if want.hidden else out.logits),)
    if want.ids == "likeliest":
        return (cast(Tensor, out.ids),)
    return cast(Tensor, out.ids), cast(Tensor, out.complete).to(torch.int32), cast(Tensor, out.logits)


def follow(tokens: Tensor, seen: Tensor, rows: Tensor) -> Tensor:
    """tokens [B,T], -1 replaced by the id that row sampled last; seen [rows + 1], rows [B]."""
    return torch.where(tokens < 0, seen[rows][:, None], tokens) if tokens.shape[1] == 1 else tokens


def remember(seen: Tensor, rows: Tensor | None, out: tuple[Tensor, ...], target: Target | None) -> Tensor:
    """`seen` with the ids this step sampled. Graphs that sample nothing write the idle row's: see above."""
    if isinstance(target, Shape) and target.want.ids is not None:
        return torch.ops.aten.index_put(seen, [cast(Tensor, rows)], out[0][:, -1])
    return torch.cat((seen[:-1], torch.zeros_like(seen[-1:])))


def move(
    what: Move, kv: Kv, moved: Tensor | None, source: Tensor | None, target: Tensor | None, values: Tensor | None
) -> tuple[Tensor, ...]:
    """The graphs that move KV. moved, source, target [n] int32; values [layers,n,H,2,S,D] as `carried`. Every layer is rebound.

    Padding moves scratch to scratch. Export writes zeros there, since it has to write something.
    """
    out = []
    for i, stores in enumerate(kv.layers):
        if what.tag == "kv_export":
            found = [store[cast(Tensor, moved)][:, :, : kv.shape.columns] for store in stores]
            out.append(torch.stack([one.to(carried(one.dtype)) for one in found], 2))
            last = torch.full((1,), stores[0].shape[0] - 1, dtype=torch.int32, device=stores[0].device)
            written = [torch.ops.aten.index_put(store, [last], torch.zeros_like(store[-1:])) for store in stores]
        elif what.tag == "kv_import":
            parts = F.pad(cast(Tensor, values)[i], (0, 0, 0, spare_columns(kv.shape.space))).to(stores[0].dtype).unbind(2)
            written = [torch.ops.aten.index_put(store, [moved], part) for store, part in zip(stores, parts, strict=True)]
        else:
            written = [torch.ops.aten.index_put(store, [target], store[cast(Tensor, source)]) for store in stores]
        kv.layers[i] = tuple(written)
    if what.tag == "kv_export":
        return (torch.stack(out),)
    return (cast(Tensor, moved if what.tag == "kv_import" else target) + 0,)


def signature(weights: Weights) -> Mapping[str, Any]:
    """Names, shapes and dtypes of a rank's weights: what a graph depends on of them, quantisation included, and no value."""
    return {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in named(weights)}
