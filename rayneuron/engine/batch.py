"""A plan's works to padded arrays.

Shapes: B rows, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from rayneuron.devices.base import FOLLOWS, Batch, Shape
from rayneuron.engine.sampling import uniforms
from rayneuron.engine.scheduler import Work
from rayneuron.engine.sequence import Sequence


class RowError(Exception):
    """What one work asks for cannot be laid out; the others can."""

    def __init__(self, work: Work, why: Exception) -> None:
        super().__init__(f"{type(why).__name__}: {why}")
        self.work = work


def draw_number(sequence: Sequence) -> NDArray[np.float32]:
    """The uniform number [1] of a sequence's next token; the same in `pack` and on the host."""
    return uniforms([sequence.seed], [len(sequence.ids)])


def pack(works: Rows[Work], shape: Shape, scratch_row: int, scratch_column: int) -> Batch:
    """Lay works out as rows 0..n-1 of `shape`; the rest are idle: scratch row, position 0. Padding tokens go to the scratch column.

    A token that the host has not seen yet is FOLLOWS: the device takes the id that the row sampled last. Raises RowError.
    """
    b, n = shape.rows, len(works)
    tokens = np.zeros((b, shape.tokens), np.int32)
    positions = np.zeros((b, shape.tokens), np.int32)
    positions[:n] = scratch_column
    rows = np.full(b, scratch_row, np.int32)
    last, top_k = np.zeros((2, b), np.int32)
    temperature, min_p, uniform = np.zeros((3, b), np.float32)
    top_p = np.ones(b, np.float32)
    for i, work in enumerate(works):
        sequence, start, stop = work.sequence, work.start, work.start + work.count
        assert sequence.row is not None
        rows[i] = sequence.row
        last[i] = work.count - 1
        params = sequence.params
        try:  # `validate` has refused what does not fit; whatever slips through must not end the rows beside it
            tokens[i, : work.count] = sequence.ids[start:stop] or FOLLOWS
            positions[i, : work.count] = range(start, stop) if work.count < 8 else np.arange(start, stop)
            if params.temperature:  # greedy rows keep the filters off
                temperature[i] = params.temperature
                top_k[i], top_p[i], min_p[i] = max(params.top_k, 0), params.top_p, params.min_p
        except (ValueError, TypeError, OverflowError) as why:
            raise RowError(work, why) from why
    if temperature.any():
        uniform[:n] = uniforms([w.sequence.seed for w in works], [w.start + w.count for w in works])
    return Batch(*map(torch.from_numpy, (tokens, positions, rows, last, temperature, top_k, top_p, min_p, uniform, np.zeros(b, np.int32))))
