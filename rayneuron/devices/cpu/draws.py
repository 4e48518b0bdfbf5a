"""Next tokens drawn from logits, and what is told about them, by the kernels: any row by itself, over the whole vocabulary.

B rows, V vocabulary. `engine.sampling` and `engine.logits` define the results in torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DrawFields(ctypes.Structure):
    """`Draw` of sample.h."""

    _fields_ = [*((name, ctypes.c_float) for name in ("temperature", "top_p", "min_p", "uniform")), ("top_k", ctypes.c_int32)]


_WORDS = len(DrawFields._fields_)  # each 4 bytes
_DRAW = np.dtype(DrawFields)
How = tuple[float, int, float, float, float]  # temperature, top_k, top_p, min_p, uniform


def fits(logits: Tensor) -> bool:
    """Whether the kernels read these logits [V] or [B,V] as they lie."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.stride(-1) == 1


def draw(
    found: ctypes.CDLL, team: Any, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
) -> Tensor:  # fmt: skip
    """[B,V] float32 and [B] parameters -> ids [B] int32. `team`: the threads of a rank, None: this one."""
    rows, count = logits.shape
    how = torch.empty(rows, _WORDS)
    for i, values in enumerate((temperature, top_p, min_p, uniform)):
        how[:, i] = values
    how.view(torch.int32)[:, 4] = top_k
    ids = torch.empty(rows, dtype=torch.int32)
    where = logits.data_ptr() + 4 * logits.stride(0) * np.arange(rows, dtype=np.uint64)
    found.rn_draw(team, where.ctypes.data, rows, count, how.data_ptr(), None, ids.data_ptr())
    return ids


def draw_rows(found: ctypes.CDLL, rows: Sequence[Tensor], hows: Sequence[How], masks: Sequence[NDArray[np.uint32] | None]) -> list[int]:
    """The ids of some rows [V] by the calling thread. Masks: a bit for each id that may come; -1 where none can."""
    where = np.array([row.data_ptr() for row in rows], np.uint64)
    bits = np.array([0 if mask is None else mask.ctypes.data for mask in masks], np.uint64)
    how = np.array([(temperature, top_p, min_p, uniform, top_k) for temperature, top_k, top_p, min_p, uniform in hows], _DRAW)
    ids = np.empty(len(rows), np.int32)
    found.rn_draw(None, where.ctypes.data, len(rows), len(rows[0]), how.ctypes.data, bits.ctypes.data, ids.ctypes.data)
    return ids.tolist()


def describe(found: ctypes.CDLL, rows: Sequence[Tensor], tokens: Sequence[int], count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `engine.logits.describe`: B of [V] float32, B tokens -> two of [B], two of [B,count]; of equals the lowest id comes first."""
    n = len(rows[0])
    count = min(count, n)
    where, wanted = np.array([row.data_ptr() for row in rows], np.uint64), np.array(tokens, np.int32)
    own, rank = torch.empty(len(rows), dtype=torch.float64), torch.empty(len(rows), dtype=torch.int32)
    ids, values = torch.empty(len(rows), count, dtype=torch.int32), torch.empty(len(rows), count, dtype=torch.float64)
    told = [t.data_ptr() for t in (own, rank, ids, values)]
    found.rn_describe(where.ctypes.data, len(rows), n, wanted.ctypes.data, count, *told)
    return own, rank, ids, values
