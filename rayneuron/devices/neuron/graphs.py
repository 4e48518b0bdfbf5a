"""What is compiled for Neuron: the step program over named weights and KV, one graph a shape, and three that move KV.

B rows, T new tokens, H KV heads of a rank, N blocks of S positions, n blocks moved at once, D head size, V vocabulary.
Rules of the runtime kept here: one forward signature for all graphs; a state is a buffer of the root that is rebound, never written in
place; and every graph rebinds every state (the first graph that is added decides which buffers are states, so a graph that only read one
would see it as a weight).

With `Border.feedback` there is one state more: the id each row sampled last. A decode step whose token is -1 takes it from there, so
the host need not have seen it before it starts the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rayneuron.devices.base import HIDDEN, LIKELIEST, LOGITS, SAMPLED, SCHEMA, SCORES, Batch, Program, Shape, StepOutput, Weights, sizes
from rayneuron.errors import CompileError
from rayneuron.models.collectives import Collectives
from rayneuron.models.kv import Kv, KvShape
from rayneuron.models.ops import bytes_of

IDS = "ids"  # the state of ids, with feedback
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "uniform")


@dataclass(frozen=True, slots=True)
class Move:
    """A graph that reads, writes or copies `blocks` blocks of every layer."""

    tag: Literal["kv_export", "kv_import", "kv_copy"]
    blocks: int


Target = Shape | Move


@dataclass(frozen=True, slots=True)
class Border:
    """What goes in and out of a stage's graphs: ids into the `first` and out of the `last`, else hidden states [B,T,hidden] of `dtype`.

    feedback: ids the last step sampled are inputs of the next without passing the host.
    """

    first: bool = True
    last: bool = True
    hidden: int = 0
    dtype: torch.dtype = torch.float32
    feedback: bool = False


WHOLE = Border()


def served(shape: Shape, border: Border = WHOLE) -> Shape:
    """The shape whose graph serves `shape`: sampling computes the last logits anyway, so SAMPLED is the LOGITS graph, left unread.

    A stage that is not the last gives hidden states, whatever is asked of the last one.
    """
    if not border.last:
        return replace(shape, want=HIDDEN)
    return replace(shape, want=LOGITS) if shape.want == SAMPLED else shape


def targets(shapes: Sequence[Shape], blocks: int, border: Border = WHOLE) -> list[Target]:
    """All graphs of an engine, each once: those of `shapes`, and the three that move `blocks` blocks of KV."""
    moves = (Move("kv_export", blocks), Move("kv_import", blocks), Move("kv_copy", blocks))
    return [*dict.fromkeys(served(s, border) for s in shapes), *moves]


def name(target: Target) -> str:
    """The graph's name: decode_b4_t1_l128_likeliest_last, kv_export_n16."""
    if isinstance(target, Move):
        return f"{target.tag}_n{target.blocks}"
    return f"{target.tag}_b{target.rows}_t{target.tokens}_l{target.length}_{target.want}"


def bucket(target: Target) -> str:
    """The graph for people: its name and what it is for."""
    if isinstance(target, Move):
        return f"graph {name(target)} ({target.blocks} KV blocks)"
    return f"graph {name(target)} (bucket of {target.rows} rows x {target.tokens} new tokens, attending {target.length})"


def input_names(shape: Shape, border: Border = WHOLE) -> tuple[str, ...]:
    """The fields of a Batch that the graph reads."""
    rows = ("rows",) if border.feedback else ()
    last = ("last",) if shape.tokens > 1 and shape.want.at == "last" else ()
    sampling = _SAMPLING if shape.want == LOGITS else ()
    return ("tokens" if border.first else "hidden", "positions", *rows, "blocks", "slots", *last, *sampling)


def example(target: Target, kv: KvShape, kv_dtype: torch.dtype, border: Border = WHOLE) -> dict[str, Tensor]:
    """Inputs of the graph's shapes and dtypes, for tracing."""
    if isinstance(target, Move):
        given = ("source", "target") if target.tag == "kv_copy" else ("moved",)
        inputs = {n: torch.zeros(target.blocks, dtype=torch.int32) for n in given}
        if target.tag == "kv_import":
            shape = (kv.layers, target.blocks, kv.heads, 2, kv.columns, kv.dim)
            inputs["values"] = torch.zeros(shape, dtype=torch.uint8 if kv_dtype.itemsize == 1 else kv_dtype)
        return inputs
    kinds = {"int32": torch.int32, "float32": torch.float32, "": border.dtype}
    return {
        n: torch.zeros(sizes(n, target, kv.space, border.hidden), dtype=kinds[SCHEMA[n].dtype]) for n in input_names(target, border)
    }  # fmt: skip


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
        self, program: Program, ops: Any, comm: Collectives, weights: Weights, kv: KvShape, kv_dtype: torch.dtype, border: Border = WHOLE
    ) -> None:
        super().__init__()
        self.shown: Target | None = None
        self.kv = kv
        self._border = border
        self._program, self._ops, self._comm = program, ops, comm
        self._first = weights.get("first", 0)
        self._top, self._layers = list(weights["top"]), [list(layer) for layer in weights["layers"]]
        seen: set[int] = set()
        for path, tensor in named(weights):
            shared = tensor.data_ptr() in seen and tensor.numel() > 0
            seen.add(tensor.data_ptr())
            # A tensor under two names (tied embeddings) would become one parameter of the graph, and the other name unknown.
            self._place(path, tensor.clone() if shared else tensor)
        for name in states(kv):
            self.register_buffer(name, torch.zeros(kv.space.total, kv.heads, kv.columns, kv.dim, dtype=kv_dtype))
        if border.feedback:
            self.register_buffer(IDS, torch.zeros(kv.space.rows + 1, dtype=torch.int32))

    def forward(
        self,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        rows: Tensor | None = None,
        blocks: Tensor | None = None,
        slots: Tensor | None = None,
        last: Tensor | None = None,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        uniform: Tensor | None = None,
        adapters: Tensor | None = None,
        hidden: Tensor | None = None,
        moved: Tensor | None = None,
        source: Tensor | None = None,
        target: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The outputs of `shown`: ids | ids, complete, logits | logits [B,T,V] | hidden | KV [layers,n,H,2,S,D] | the blocks written."""
        held = [getattr(self, name) for name in states(self.kv)]
        kv = Kv(self.kv, list(zip(held[::2], held[1::2], strict=True)))
        seen = getattr(self, IDS) if self._border.feedback else None
        shown = self.shown
        if isinstance(shown, Move):
            out = move(shown, kv, moved, source, target, values)
        else:
            assert shown is not None
            if seen is not None:
                tokens = follow(cast(Tensor, tokens), seen, cast(Tensor, rows))
            given = (tokens, positions, rows, blocks, slots, last, temperature, top_k, top_p, min_p, uniform, adapters, hidden)
            batch = Batch(*cast("tuple[Any, ...]", given))
            out = outputs(self._program(self._ops, self._comm, self._weights(), kv, batch, shown), shown)
        for name, old, value in zip(states(self.kv), held, (store for layer in kv.layers for store in layer), strict=True):
            if value is old:
                raise CompileError(f"the program leaves {name} as it was, and every graph has to rebind every state")
            setattr(self, name, value)
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


def states(kv: KvShape) -> list[str]:
    """The names of the KV buffers, keys and values of a layer apart."""
    return [f"kv_{layer}_{part}" for layer in range(kv.layers) for part in "kv"]


def outputs(out: StepOutput, shape: Shape) -> tuple[Tensor, ...]:
    """What a graph of `shape` returns: ids | ids, complete (int32), logits | logits | hidden."""
    if shape.want == HIDDEN:
        return (cast(Tensor, out.hidden),)
    if shape.want == SCORES:
        return (cast(Tensor, out.logits),)
    if shape.want == LIKELIEST:
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
    """The graphs that move KV. moved, source, target [n] int32; values [layers,n,H,2,S,D], float8 as bytes. Every layer is rebound.

    Padding moves scratch to scratch. Export writes zeros there, since it has to write something.
    """
    out = []
    for i, layer in enumerate(kv.layers):
        stores = [bytes_of(store) for store in layer]
        if what.tag == "kv_export":
            out.append(torch.stack([store[cast(Tensor, moved)] for store in stores], 2))
            last = [torch.full((1,), store.shape[0] - 1, dtype=torch.int32, device=store.device) for store in stores]
            written = [torch.ops.aten.index_put(store, [at], torch.zeros_like(store[-1:])) for store, at in zip(stores, last, strict=True)]
        elif what.tag == "kv_import":
            parts = cast(Tensor, values)[i].unbind(2)
            written = [torch.ops.aten.index_put(store, [moved], part) for store, part in zip(stores, parts, strict=True)]
        else:
            written = [torch.ops.aten.index_put(store, [target], store[cast(Tensor, source)]) for store in stores]
        kv.layers[i] = tuple(made.view(store.dtype) for made, store in zip(written, layer, strict=True))
    if what.tag == "kv_export":
        return (torch.stack(out),)
    return (cast(Tensor, moved if what.tag == "kv_import" else target) + 0,)


def signature(weights: Weights) -> Mapping[str, Any]:
    """Names, shapes and dtypes of a rank's weights: what a graph depends on of them, quantisation included, and no value."""
    return {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in named(weights)}
