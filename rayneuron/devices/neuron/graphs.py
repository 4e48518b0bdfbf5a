"""What is compiled for Neuron: the step program over named weights and KV, one graph a shape, and two that move KV to and from the host.

B rows, T new tokens, H KV heads of a rank, N positions moved at once, D head size, V vocabulary.
Rules of the runtime kept here: one forward signature for all graphs, and every graph writes every KV buffer (the first graph that is
added decides which buffers are states, so a graph that only read one would see it as a weight).

With `Border.feedback` there is one state more: the id each KV row sampled last. A decode step whose token is -1 takes it from there, so
the host need not have seen it before it starts the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from rayneuron.devices.base import Batch, Program, Shape, StepOutput, Weights
from rayneuron.models.collectives import Collectives

KV = "kv"  # states are kv.0, kv.1, ...
IDS = "ids"  # and this one, with feedback
_ALWAYS = ("positions", "rows")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "uniform")
_REAL = ("temperature", "top_p", "min_p", "uniform")


@dataclass(frozen=True, slots=True)
class Move:
    """A graph that reads or writes `positions` positions of one KV row of every layer."""

    tag: Literal["kv_export", "kv_import"]
    positions: int


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
    """The shape whose graph serves `shape`: sampling computes the last logits anyway, so `sample` is the `logits` graph, left unread.

    A stage that is not the last gives hidden states, whatever is asked of the last one.
    """
    if not border.last:
        return replace(shape, output="hidden")
    return replace(shape, output="logits") if shape.output == "sample" else shape


def targets(shapes: Sequence[Shape], positions: int, border: Border = WHOLE) -> list[Target]:
    """All graphs of an engine, each once: those of `shapes`, and the two that move KV."""
    return [*dict.fromkeys(served(s, border) for s in shapes), Move("kv_export", positions), Move("kv_import", positions)]


def name(target: Target) -> str:
    """The graph's name: decode_b4_t1_l128_greedy, kv_export_n128."""
    if isinstance(target, Move):
        return f"{target.tag}_n{target.positions}"
    return f"{target.tag}_b{target.rows}_t{target.tokens}_l{target.length}_{target.output}"


def input_names(shape: Shape, border: Border = WHOLE) -> tuple[str, ...]:
    """The fields of a Batch that the graph reads."""
    last = ("last",) if shape.tokens > 1 and shape.output not in ("scores", "hidden") else ()
    return ("tokens" if border.first else "hidden",) + _ALWAYS + last + (_SAMPLING if shape.output == "logits" else ())


def example(
    target: Target, kv_shape: Sequence[int], layers: int, kv_dtype: torch.dtype, border: Border = WHOLE
) -> dict[str, Tensor]:  # fmt: skip
    """Inputs of the graph's shapes and dtypes, for tracing. kv_shape [2, rows, H, positions, D]."""
    if isinstance(target, Move):
        moved = {"row": torch.zeros(1, dtype=torch.int32), "columns": torch.zeros(target.positions, dtype=torch.int32)}
        if target.tag == "kv_import":
            shape = (layers, 2, kv_shape[2], target.positions, kv_shape[4])
            moved["values"] = torch.zeros(shape, dtype=torch.uint8 if kv_dtype.itemsize == 1 else kv_dtype)
        return moved
    b, t = target.rows, target.tokens
    sizes = {"tokens": (b, t), "positions": (b, t), "hidden": (b, t, border.hidden)}
    kinds = {"hidden": border.dtype, **dict.fromkeys(_REAL, torch.float32)}
    return {n: torch.zeros(sizes.get(n, (b,)), dtype=kinds.get(n, torch.int32)) for n in input_names(target, border)}


def named(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a rank by its name in the graph: top.embed.w, layers.0.qkv.w."""
    for key, tensor in weights["top"].items():
        yield f"top.{key}", tensor
    for i, layer in enumerate(weights["layers"]):
        for key, tensor in layer.items():
            yield f"layers.{i}.{key}", tensor


class Graph(nn.Module):
    """The module that is traced once a target. Weights are parameters, KV buffers; `target` says which graph the next trace makes."""

    def __init__(
        self, program: Program, ops: Any, comm: Collectives, weights: Weights, kv: Sequence[tuple[int, ...]], kv_dtype: torch.dtype,
        border: Border = WHOLE,
    ) -> None:  # fmt: skip
        super().__init__()
        self.target: Target | None = None
        self._border = border
        self._program, self._ops, self._comm = program, ops, comm
        self._first = weights.get("first", 0)
        self._top, self._layers = list(weights["top"]), [list(layer) for layer in weights["layers"]]
        seen: set[int] = set()
        for path, tensor in named(weights):
            shared = tensor.data_ptr() in seen and tensor.numel() > 0
            seen.add(tensor.data_ptr())
            # A tensor under two names (tied embeddings) would become one parameter of the graph, and the other name unknown.
            self._place(path, nn.Parameter(tensor.clone() if shared else tensor, requires_grad=False))
        for i, shape in enumerate(kv):
            self._place(f"{KV}.{i}", torch.zeros(shape, dtype=kv_dtype))
        self._states = [f"{KV}.{i}" for i in range(len(kv))]
        if border.feedback:
            self._place(IDS, torch.zeros(kv[0][1], dtype=torch.int32))

    def forward(
        self,
        tokens: Tensor | None = None,
        positions: Tensor | None = None,
        rows: Tensor | None = None,
        last: Tensor | None = None,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        uniform: Tensor | None = None,
        adapters: Tensor | None = None,
        row: Tensor | None = None,
        columns: Tensor | None = None,
        values: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The outputs of `target`: ids | ids, complete, logits | logits [B,T,V] | hidden | KV [layers,2,H,N,D] | the row moved to."""
        states = [self._tensor(name) for name in self._states]
        # torch-xla donates a buffer that is written itself, and none that is written through a view of it (examples/hlo_check). So the
        # program writes values, and each state is written once, at the end. A clone of a value is no operation in a functional graph.
        kv = [state.clone() for state in states]
        seen = self._tensor(IDS).clone() if self._border.feedback else None
        target = self.target
        if isinstance(target, Move):
            assert row is not None and columns is not None
            if target.tag == "kv_export":
                out: tuple[Tensor, ...] = (export(kv, row, columns),)
            else:
                assert values is not None
                out = (load(kv, row, columns, values),)
        else:
            assert target is not None
            if seen is not None:
                tokens = follow(cast(Tensor, tokens), seen, cast(Tensor, rows))
            given = (tokens, positions, rows, last, temperature, top_k, top_p, min_p, uniform, adapters, hidden)
            batch = Batch(*cast("tuple[Any, ...]", given))
            out = outputs(self._program(self._ops, self._comm, self._weights(), kv, batch, target), target)
        for state, value in zip(states, kv, strict=True):
            state.copy_(value)
        if seen is not None:
            self._tensor(IDS).copy_(remember(seen, rows, out, target))
        return out

    def _weights(self) -> dict[str, Any]:
        top = {key: self._tensor(f"top.{key}") for key in self._top}
        layers = [{key: self._tensor(f"layers.{i}.{key}") for key in keys} for i, keys in enumerate(self._layers)]
        return {"top": top, "layers": layers, "first": self._first}

    def _place(self, path: str, tensor: Tensor) -> None:
        """Put a tensor at a dotted path; torch allows no dots in one name."""
        *parents, leaf = path.split(".")
        module: nn.Module = self
        for part in parents:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = cast(nn.Module, module._modules[part])
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor)

    def _tensor(self, path: str) -> Tensor:
        """Looked up at every trace: moving a module to another device replaces its tensors."""
        parent, _, leaf = path.rpartition(".")
        return cast(Tensor, getattr(self.get_submodule(parent), leaf))


def outputs(out: StepOutput, shape: Shape) -> tuple[Tensor, ...]:
    """What a graph of `shape` returns: ids | ids, complete (int32), logits | logits | hidden."""
    if shape.output == "hidden":
        return (cast(Tensor, out.hidden),)
    if shape.output == "scores":
        return (cast(Tensor, out.logits),)
    if shape.output == "greedy":
        return (cast(Tensor, out.ids),)
    return cast(Tensor, out.ids), cast(Tensor, out.complete).to(torch.int32), cast(Tensor, out.logits)


def follow(tokens: Tensor, seen: Tensor, rows: Tensor) -> Tensor:
    """tokens [B,T], -1 replaced by the id that row sampled last; seen [KV rows], rows [B]."""
    return torch.where(tokens < 0, seen[rows][:, None], tokens) if tokens.shape[1] == 1 else tokens


def remember(seen: Tensor, rows: Tensor | None, out: tuple[Tensor, ...], target: Target) -> Tensor:
    """`seen` with the ids this step sampled. Graphs that sample nothing write the scratch row's: see above."""
    if isinstance(target, Shape) and target.output in ("greedy", "logits"):
        seen[cast(Tensor, rows)] = out[0]
    else:
        seen[-1:] = torch.zeros((), dtype=seen.dtype, device=seen.device)
    return seen


def export(kv: Sequence[Tensor], row: Tensor, columns: Tensor) -> Tensor:
    """row [1], columns [N] int32 -> [layers, 2, H, N, D]; float8 as bytes. The scratch cell is written: see above."""
    out = []
    for layer in kv:
        store = layer if layer.dtype.itemsize > 1 else layer.view(torch.uint8)
        out.append(store.index_select(1, row)[:, 0].index_select(2, columns))
        store[:, -1:, :, -1:] = torch.zeros((), dtype=store.dtype, device=store.device)
    return torch.stack(out)


def load(kv: Sequence[Tensor], row: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Write values [layers, 2, H, N, D] at row [1], columns [N]; padding columns point at the scratch column. Returns row."""
    at = row.expand(columns.shape)
    for i, layer in enumerate(kv):
        store = layer if layer.dtype.itemsize > 1 else layer.view(torch.uint8)
        store[:, at, :, columns] = values[i].permute(2, 0, 1, 3)  # N 2 H D: the indexed dims come first
    return row + 0


def signature(weights: Weights) -> Mapping[str, Any]:
    """Names, shapes and dtypes of a rank's weights: what a graph depends on of them, quantisation included, and no value."""
    return {key: [list(t.shape), str(t.dtype).removeprefix("torch.")] for key, t in named(weights)}
