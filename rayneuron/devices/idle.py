"""A step of idle rows only: what devices run to meet their shapes."""

from __future__ import annotations

import torch

from rayneuron.devices.base import Batch, Shape, blank
from rayneuron.models.kv import KvSpace


def idle(shape: Shape, space: KvSpace) -> Batch:
    """A batch of idle rows; it writes nothing but scratch."""
    return Batch(**{name: torch.from_numpy(array) for name, array in blank(shape, space).items()})
