"""A step of idle rows only: what `engine.batch` fills in, and what devices run to meet their shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayneuron.devices.base import SCHEMA, Batch, Shape, sizes
from rayneuron.models.kv import KvSpace


def blank(shape: Shape, space: KvSpace) -> dict[str, NDArray[Any]]:
    """The arrays of a Batch of idle rows, without hidden states."""
    special = {"rows": space.rows, "positions": space.limit, "blocks": space.null, "slots": space.nowhere}
    return {
        name: np.full(sizes(name, shape, space), special.get(name, f.blank), f.dtype) for name, f in SCHEMA.items() if f.dtype
    }  # fmt: skip


def idle(shape: Shape, space: KvSpace) -> Batch:
    """A batch of idle rows; it writes nothing but scratch."""
    return Batch(**{name: torch.from_numpy(array) for name, array in blank(shape, space).items()})
