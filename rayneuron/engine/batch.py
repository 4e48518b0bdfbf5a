"""A plan's works to padded arrays.

Shapes: B rows, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from rayneuron.devices.base import Batch, Shape
from rayneuron.engine.sampling import uniforms
from rayneuron.engine.scheduler import Work
from rayneuron.engine.sequence import Sequence


def draw_number(sequence: Sequence) -> np.ndarray:
    """The uniform number [1] of a sequence's next token; the same in `pack` and on the host."""
    return uniforms([sequence.seed], [len(sequence.ids)])


def pack(works: Rows[Work], shape: Shape, scratch_row: int, scratch_column: int) -> Batch:
    """Lay works out as rows 0..n-1 of `shape`; the rest are idle: scratch row, position 0. Padding tokens go to the scratch column."""
    b, t = shape.rows, shape.tokens
    tokens = np.zeros((b, t), np.int32)
    positions = np.full((b, t), scratch_column, np.int32)
    whole = np.full((3, b), scratch_row, np.int32)  # rows, last, top_k
    whole[1:] = 0
    real = np.ones((4, b), np.float32)  # temperature, top_p, min_p, uniform
    real[0] = 0.0
    positions[len(works) :] = 0
    seeds, counters = [], []
    for i, work in enumerate(works):
        sequence, start, count = work.sequence, work.start, work.count
        params = sequence.params
        if count == 1:
            tokens[i, 0] = sequence.ids[start]
            positions[i, 0] = start
        else:
            tokens[i, :count] = sequence.ids[start : start + count]
            positions[i, :count] = np.arange(start, start + count)
        whole[0, i] = sequence.row
        whole[1, i] = count - 1
        if params.temperature:
            whole[2, i] = max(params.top_k, 0)
            real[0, i], real[1, i], real[2, i] = max(params.temperature, 0.01), params.top_p, params.min_p
        else:
            real[2, i] = 0.0
        seeds.append(sequence.seed)
        counters.append(start + count)
    real[2, len(works) :] = 0.0
    real[3, : len(works)] = uniforms(seeds, counters)
    rows, last, top_k = torch.from_numpy(whole)
    temperature, top_p, min_p, uniform = torch.from_numpy(real)
    return Batch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        rows=rows,
        last=last,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        uniform=uniform,
        adapters=torch.zeros(b, dtype=torch.int32),
    )
