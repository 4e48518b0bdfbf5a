"""Drafts that are made within a step, one pass after the other: in each, every row that wants one more has it.

Shapes: B rows, T new tokens, R rows of a pass: those that draft in it where sizes may hang on values; else all B, of which the others write
nowhere, as a compiled graph has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayneuron.devices.base import DRAFTED, IF_SURE, Batch, Shape
from rayneuron.engine import step as plain
from rayneuron.engine.neuron_sampling import NeuronSampling
from rayneuron.models.kv import KvSpace, Places


@dataclass(slots=True)
class Pass:
    """The `j`-th draft of its rows. `columns`: the tokens of the step so far, [B] each of T. which: the rows R; None: all. on: where not
    sizes hang on values but results do, those [B] that draft."""

    j: int
    batch: Batch
    shape: Shape
    space: KvSpace
    columns: list[Tensor]
    which: Tensor | None
    on: Tensor | None
    asked: bool = False  # of a row the next draft is made only if it is sure of this one
    unsure: Tensor | None = None  # the answer [R]

    def of(self, x: Tensor) -> Tensor:
        """[B,...] -> [R,...]."""
        return x if self.which is None else x[self.which]

    def true(self, x: Tensor, otherwise: int) -> Tensor:
        """[R,n], `otherwise` of the rows that do not draft."""
        return x if self.on is None else torch.where(self.on[:, None], x, otherwise)

    def new(self) -> tuple[Tensor, Places]:
        """The ids [R,1] that are read, those the drafts come behind, and where they are."""
        batch, j = self.batch, self.j
        slots = self.true(self.of(batch.slots[:, j, None]), self.space.nowhere)
        rows = batch.rows if self.which is None else batch.rows[self.which]  # a graph may not have them
        places = Places(self.of(batch.positions[:, j, None]), rows, self.of(batch.blocks), slots, self.shape.length)
        return self.of(self.columns[j])[:, None], places

    def sample(self, ops: Any, logits: Tensor, rule: NeuronSampling | None) -> Tensor:
        """logits [R,V] -> ids [R]: as the model itself chooses, with the same random number, which for logits that are much alike gives
        much the same ids; so drafts of sampled rows come true nearly as often as those of others."""
        how = [self.of(getattr(self.batch, name)) for name in plain.HOW]
        return plain.sample(ops, logits, how, self.of(self.batch.uniform[:, self.j]), rule)[0]

    def put(self, ids: Tensor) -> None:
        """The drafts [R]."""
        column = self.columns[self.j + 1]
        ids = ids.to(column.dtype)
        if self.on is not None:
            ids = torch.where(self.on, ids, column)
        self.columns[self.j + 1] = ids if self.which is None else column.index_copy(0, self.which, ids)


def passes(ops: Any, batch: Batch, shape: Shape, space: KvSpace, columns: list[Tensor], most: int | None = None) -> Iterator[Pass]:
    """The passes of a step, of which more than `most` are never wanted."""
    if not ops.dynamic:
        wanted = (batch.tokens <= DRAFTED).sum(1, dtype=torch.int32)
        for j in range(min(shape.tokens - 1, most or shape.tokens)):
            yield Pass(j, batch, shape, space, columns, None, wanted > j)
        return
    tokens = batch.tokens.tolist()  # behind a pass everything of torch's is out of the caches: the fewer calls the better
    left = [sum([token <= DRAFTED for token in row]) for row in tokens]
    for j in range(max(left)):
        if not (rows := [i for i, n in enumerate(left) if n > j]):
            return
        asked = [j + 2 < shape.tokens and tokens[i][j + 2] == IF_SURE for i in rows]
        turn = Pass(j, batch, shape, space, columns, None if len(rows) == len(left) else torch.tensor(rows), None, any(asked))
        yield turn
        if turn.unsure is not None:
            for i, ends, unsure in zip(rows, asked, turn.unsure.tolist(), strict=True):
                left[i] = j + 1 if ends and unsure else left[i]


def slot_of(blocks: Tensor, at: Tensor, space: KvSpace, length: int) -> Tensor:
    """The slots [R,n] of positions at [R,n], of which those outside of the attended `length` are anywhere; blocks [R,M]."""
    at = at.clamp(0, length - 1)
    if space.block >= space.limit:  # one block a row
        return blocks[:, :1] * space.block + at
    shift = space.block.bit_length() - 1
    return blocks.gather(1, (at >> shift).long()) * space.block + (at & (space.block - 1))
