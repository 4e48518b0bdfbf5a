"""A plan's works to padded arrays.

Shapes: B rows, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from rayneuron.devices.base import FOLLOWS, Batch, Shape
from rayneuron.devices.idle import blank
from rayneuron.engine.sampling import uniforms
from rayneuron.engine.scheduler import Work
from rayneuron.engine.sequence import Sequence
from rayneuron.models.kv import KvSpace


class RowError(Exception):
    """What one work asks for cannot be laid out; the others can."""

    def __init__(self, work: Work, why: Exception) -> None:
        super().__init__(f"{type(why).__name__}: {why}")
        self.work = work


def draw_number(sequence: Sequence) -> NDArray[np.float32]:
    """The uniform number [1] of a sequence's next token; the same in `pack` and on the host."""
    return uniforms([sequence.seed], [len(sequence.ids)])


def pack(works: Rows[Work], shape: Shape, space: KvSpace) -> Batch:
    """Lay works out as rows 0..n-1 of `shape`; the rest are idle.

    A token that the host has not seen yet is FOLLOWS: the device takes the id that the row sampled last. Raises RowError.
    """
    arrays = blank(shape, space)
    tokens, positions, rows, blocks, slots, last = (arrays[n] for n in ("tokens", "positions", "rows", "blocks", "slots", "last"))
    temperature, top_k, top_p, min_p = (arrays[n] for n in ("temperature", "top_k", "top_p", "min_p"))
    size, width = space.block, blocks.shape[1]
    for i, work in enumerate(works):
        sequence, start, count = work.sequence, work.start, work.count
        hold, stop = sequence.hold, start + count
        assert hold is not None
        rows[i], last[i], blocks[i] = hold.row, count - 1, hold.table[:width]
        if count == 1:
            positions[i, 0], slots[i, 0] = start, hold.blocks[start // size] * size + start % size
        else:
            positions[i, :count] = at = np.arange(start, stop, dtype=np.int32)
            slots[i, :count] = hold.table[at // size] * size + at % size
        if start < hold.shared * size:  # computed again for what stands behind it: others read what is there
            slots[i, : hold.shared * size - start] = space.nowhere
        params = sequence.params
        try:  # `validate` has refused what does not fit; whatever slips through must not end the rows beside it
            tokens[i, :count] = sequence.ids[start:stop] or FOLLOWS
            if params.temperature:  # greedy rows keep the filters off
                temperature[i] = params.temperature
                top_k[i], top_p[i], min_p[i] = max(params.top_k, 0), params.top_p, params.min_p
        except (ValueError, TypeError, OverflowError) as why:
            raise RowError(work, why) from why
    if temperature.any():
        arrays["uniform"][: len(works), 0] = uniforms([w.sequence.seed for w in works], [w.start + w.count for w in works])
    return Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()})
