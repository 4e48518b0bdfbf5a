"""Tensors of a step as bytes of a message and back, without copying what was received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayneuron.devices.base import SCHEMA, Batch, Shape, StepOutput
from rayneuron.group.messages import Array, Part

_FIELDS = tuple(name for name, f in SCHEMA.items() if f.dtype)  # hidden states go from stage to stage, not from worker 0
_OUTPUTS = tuple(f.name for f in fields(StepOutput) if f.name != "hidden")
_KINDS = {torch.int32: "i4", torch.int64: "i8", torch.float32: "f4", torch.bool: "?", torch.uint8: "u1"}
_DTYPES = {name: np.dtype(name) for name in _KINDS.values()}


def array(x: Tensor) -> Array:
    """A tensor of 32- or 64-bit numbers, bytes or truth values."""
    x = x.contiguous()
    data: Any = x.numpy().reshape(-1).view(np.uint8)
    return Array(_KINDS[x.dtype], tuple(x.shape), memoryview(data))


def tensor(a: Array) -> Tensor:
    """The tensor, over the frame's own bytes. Raises ValueError where sizes disagree."""
    return torch.from_numpy(np.frombuffer(a.data, _DTYPES[a.kind]).reshape(a.shape))


def part(shape: Shape, batch: Batch) -> Part:
    """A batch to send."""
    return Part(shape, [array(getattr(batch, name)) for name in _FIELDS])


def batch(part: Part) -> Batch:
    """A batch received."""
    return Batch(**{name: tensor(a) for name, a in zip(_FIELDS, part.arrays, strict=True)})


def output(out: StepOutput) -> list[Array | None]:
    """What a part gave, to send."""
    made = [getattr(out, name) for name in _OUTPUTS]
    return [None if x is None else array(x) for x in made]


def step_output(sent: Sequence[Array | None]) -> StepOutput:
    """What a part gave, received."""
    return StepOutput(**{name: None if a is None else tensor(a) for name, a in zip(_OUTPUTS, sent, strict=True)})
