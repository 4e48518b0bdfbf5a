"""Which graphs are compiled for Neuron, and their names; no torch, so that a plan can list them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from rayneuron.devices.base import HIDDEN, Shape
from rayneuron.models.kv import KvSpace

MOVED_BLOCKS, MOVED_POSITIONS = 16, 512  # by one graph that moves KV, at most both; and one block whatever it has
SCRATCH_COLUMNS = 128  # behind every row where a row is one block: for what is to be forgotten, and as many as there are partitions
MOST_GRAPHS = 32  # that a deployment gets without naming its buckets: each is minutes of compiling and memory of every core


@dataclass(frozen=True, slots=True)
class Move:
    """A graph that reads, writes or copies `blocks` blocks of every layer."""

    tag: Literal["kv_export", "kv_import", "kv_copy"]
    blocks: int


Target = Shape | Move


@dataclass(frozen=True, slots=True)
class Border:
    """What goes in and out of a stage's graphs: ids into the `first` and out of the `last`, else hidden states [B,T,hidden] of `dtype`.

    feedback: ids the last step sampled are inputs of the next without passing the host. adapters: so is the slot of each row's adapter.
    """

    first: bool = True
    last: bool = True
    hidden: int = 0
    dtype: Any = None
    feedback: bool = False
    adapters: bool = False


WHOLE = Border()


@lru_cache(256)  # every step asks
def served(shape: Shape, border: Border = WHOLE) -> Shape:
    """The shape whose graph serves `shape`: sampling computes the logits anyway, so it is the graph that gives them, left unread.

    A stage that is not the last gives hidden states, whatever is asked of the last one.
    """
    if not border.last:
        return replace(shape, want=HIDDEN)
    return replace(shape, want=replace(shape.want, logits=True)) if shape.want.ids == "sampled" else shape


def moved_at_once(space: KvSpace) -> int:
    """Blocks that one graph moves."""
    return max(1, min(MOVED_BLOCKS, MOVED_POSITIONS // space.block))


def targets(shapes: Sequence[Shape], space: KvSpace, border: Border = WHOLE) -> list[Target]:
    """All graphs of an engine, each once: those of `shapes`, and the three that move blocks of KV."""
    blocks = moved_at_once(space)
    moves = (Move("kv_export", blocks), Move("kv_import", blocks), Move("kv_copy", blocks))
    return [*dict.fromkeys(served(s, border) for s in shapes), *moves]


@lru_cache(256)
def aligned(target: Target, space: KvSpace, border: Border = WHOLE) -> bool:
    """Whether row i of the graph is KV row i, so that KV is read where it lies. A stage's micro-batches are any rows, and are gathered."""
    if isinstance(target, Move) or target.tag in ("prefill", "fill") or not (border.first and border.last):
        return False
    return space.block >= space.limit and target.rows <= space.total


def spare_columns(space: KvSpace) -> int:
    """Columns of a block behind those that are attended."""
    return SCRATCH_COLUMNS if space.block >= space.limit else 0


@lru_cache(256)
def name(target: Target) -> str:
    """The graph's name: decode_b4_t1_l128_sampled_logits_last, kv_export_n16."""
    if isinstance(target, Move):
        return f"{target.tag}_n{target.blocks}"
    return f"{target.tag}_b{target.rows}_t{target.tokens}_l{target.length}_{target.want}"


def bucket(target: Target) -> str:
    """The graph for people: its name and what it is for."""
    if isinstance(target, Move):
        return f"graph {name(target)} ({target.blocks} KV blocks)"
    return f"graph {name(target)} (bucket of {target.rows} rows x {target.tokens} new tokens, attending {target.length})"


def listed(graphs: Sequence[Target]) -> list[str]:
    """A line a kind of graph: how many, and their names."""
    tags = dict.fromkeys(t.tag for t in graphs)
    kinds = {tag: [name(t).removeprefix(f"{tag}_") for t in graphs if t.tag == tag] for tag in tags}
    return [f"  {tag:<10} {len(names):>4}  {' '.join(names)}" for tag, names in kinds.items()]
