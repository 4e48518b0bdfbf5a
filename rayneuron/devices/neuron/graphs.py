"""What is compiled for Neuron: the step program over named weights and KV, one graph a shape, and three that move KV.

B rows, T new tokens, H KV heads of a rank, S positions of a block, n blocks moved at once, D head size, V vocabulary.
Rules of the runtime kept here: one forward signature for all graphs; a state is a buffer of the root that is rebound, never written in
place; and every graph rebinds every state (the first graph that is added decides which buffers are states, so a graph that only read one
would see it as a weight). What a step has nothing to write to is written where nobody looks.

A draft model's KV, that of heads and what they keep of every position are states like the model's own; who makes drafts and who verifies
them is one graph.

Adapters are weights like others, zeros in slots that nobody fills; with them every graph is told the slot of each row.

With `Border.feedback` there is one state more: the id each row sampled last. A decode step whose token is -1 takes it from there, so
the host need not have seen it before it starts the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rayneuron.devices.base import SCHEMA, Batch, Program, Shape, StepOutput, Weights, sizes
from rayneuron.devices.idle import idle
from rayneuron.devices.neuron.states import carried, forgotten, move, put, states, stores, taken
from rayneuron.devices.neuron.targets import WHOLE, Border, Move, Target, aligned
from rayneuron.devices.neuron.verbs import verbs
from rayneuron.errors import CompileError
from rayneuron.models.collectives import Collectives
from rayneuron.models.kv import KvShape

IDS = "ids"  # the state of ids, with feedback
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "uniform")
_PACKED = {"ints": ("int32", torch.int32), "floats": ("float32", torch.float32)}  # one array each: every input is copied to every rank


def input_names(shape: Shape, border: Border = WHOLE) -> tuple[str, ...]:
    """The fields of a Batch that the graph reads."""
    rows = ("rows",) if border.feedback else ()
    last = ("last",) if shape.tokens > 1 and shape.want.at == "last" else ()
    sampling = _SAMPLING if shape.want.ids == "sampled" else ()
    adapters = ("adapters",) if border.adapters else ()
    return ("tokens" if border.first else "hidden", "positions", *rows, "blocks", "slots", *last, *adapters, *sampling)


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


def named(weights: Weights, at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every weight of a rank by its name in the graph: top.embed.w, layers.0.qkv.w, and of what drafts draft.layers.0.qkv.w."""
    for key, tensor in weights["top"].items():
        yield f"{at}top.{key}", tensor
    for i, layer in enumerate(weights["layers"]):
        for key, tensor in layer.items():
            yield f"{at}layers.{i}.{key}", tensor
    if "draft" in weights:
        yield from named(weights["draft"], "draft.")


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
        self._more = {"first": 0} | {name: weights[name] for name in ("first", "lora_rank") if name in weights}
        self._names = _names(weights)
        seen: set[int] = set()
        for path, tensor in named(weights):
            shared = tensor.data_ptr() in seen and tensor.numel() > 0
            seen.add(tensor.data_ptr())
            # A tensor under two names (tied embeddings) would become one parameter of the graph, and the other name unknown.
            self._place(path, tensor.clone() if shared else tensor)
        for state, (shape, dtype) in stores(weights, kv, kv_dtype).items():
            self.register_buffer(state, torch.zeros(shape, dtype=dtype))
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
        """The outputs of `shown`: ids | ids, complete, logits, either with drafts | logits | hidden | KV [layers,n,H,2,S,D] | the blocks
        written."""
        held = {path: getattr(self, path) for path in states(self.kv)}
        kv = put(self.kv, held)
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
            made = self._program(ops, self._comm, self._weights(), kv, batch, shown)
            out = (batch.positions + 0,) if shown.tag == "fill" else outputs(made, shown)
        for (path, old), value in zip(held.items(), taken(kv), strict=True):
            if value is old and self.kv.draft is None:
                raise CompileError(f"the program leaves {path} as it was, and every graph has to rebind every state")
            setattr(self, path, forgotten(old) if value is old else value)
        if seen is not None:
            setattr(self, IDS, remember(seen, rows, out, shown))
        return out

    def _weights(self) -> dict[str, Any]:
        return {**self._tensors(self._names), **self._more}

    def _tensors(self, names: Mapping[str, Any], at: str = "") -> dict[str, Any]:
        made: dict[str, Any] = {"top": {key: self._tensor(f"{at}top.{key}") for key in names["top"]}}
        made["layers"] = [{key: self._tensor(f"{at}layers.{i}.{key}") for key in keys} for i, keys in enumerate(names["layers"])]
        return made if "draft" not in names else {**made, "draft": self._tensors(names["draft"], "draft.")}

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


def _names(weights: Weights) -> dict[str, Any]:
    """The names of `named`, as the weights have them."""
    made = {"top": list(weights["top"]), "layers": [list(layer) for layer in weights["layers"]]}
    return {**made, "draft": _names(weights["draft"])} if "draft" in weights else made


def outputs(out: StepOutput, shape: Shape) -> tuple[Tensor, ...]:
    """What a graph of `shape` returns: ids | ids, complete (int32), logits | logits | hidden | pooled; behind ids its drafts."""
    want, drafts = shape.want, () if out.drafts is None else (out.drafts,)
    if want.ids is None:
        return (cast(Tensor, out.pooled if want.pooled else out.hidden if want.hidden else out.logits),)
    if want.ids == "likeliest":
        return cast(Tensor, out.ids), *drafts
    return cast(Tensor, out.ids), cast(Tensor, out.complete).to(torch.int32), cast(Tensor, out.logits), *drafts


def follow(tokens: Tensor, seen: Tensor, rows: Tensor) -> Tensor:
    """tokens [B,T], -1 replaced by the id that row sampled last; seen [rows + 1], rows [B]."""
    return torch.where(tokens < 0, seen[rows][:, None], tokens) if tokens.shape[1] == 1 else tokens


def remember(seen: Tensor, rows: Tensor | None, out: tuple[Tensor, ...], target: Target | None) -> Tensor:
    """`seen` with the ids this step sampled. Graphs that sample nothing write the idle row's: see above."""
    if isinstance(target, Shape) and target.want.ids is not None:
        return torch.ops.aten.index_put(seen, [cast(Tensor, rows)], out[0][:, -1])
    return torch.cat((seen[:-1], torch.zeros_like(seen[-1:])))


def signature(weights: Weights) -> Mapping[str, Any]:
    """Names, shapes and dtypes of a rank's weights: what a graph depends on of them, quantisation included, and no value."""
    return {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in named(weights)}
