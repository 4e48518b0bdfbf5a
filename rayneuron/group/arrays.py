"""Tensors of a step as bytes of a message and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayneuron.devices.base import SCHEMA, Batch, Shape, StepOutput, blank
from rayneuron.group.messages import Array, Part
from rayneuron.models.kv import KvSpace

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
    return Part(shape, memoryview(b"".join([getattr(batch, name).numpy() for name in _FIELDS])))


class Batches:
    """Where the batches lie that a worker receives: one place for each shape and micro-batch, which the next step writes anew. All
    workers of a host wait for the cores that those before them compute on, so that a step makes no object it could keep."""

    def __init__(self, space: KvSpace) -> None:
        self._space = space
        self._held: dict[tuple[int, Shape], tuple[NDArray[np.uint8], Batch]] = {}

    def read(self, place: int, part: Part) -> Batch:
        """The batch of the `place`-th micro-batch of a step. Raises ValueError where its size is not the shape's."""
        held = self._held.get((place, part.shape))
        flat, batch = held if held is not None else self._make(place, part.shape)
        if len(part.data) != len(flat):
            raise ValueError(f"{len(part.data)} bytes where {part.shape} has {len(flat)}")
        flat[:] = part.data
        return batch

    def _make(self, place: int, shape: Shape) -> tuple[NDArray[np.uint8], Batch]:
        idle = blank(shape, self._space)
        flat = np.empty(sum(idle[name].nbytes for name in _FIELDS), np.uint8)
        ends = np.cumsum([idle[name].nbytes for name in _FIELDS])
        pieces = zip(_FIELDS, np.split(flat, ends[:-1]), strict=True)
        batch = Batch(**{name: torch.from_numpy(piece.view(idle[name].dtype).reshape(idle[name].shape)) for name, piece in pieces})
        self._held[place, shape] = flat, batch
        return flat, batch


def output(out: StepOutput) -> list[Array | None]:
    """What a part gave, to send."""
    made = [getattr(out, name) for name in _OUTPUTS]
    return [None if x is None else array(x) for x in made]


def step_output(sent: Sequence[Array | None]) -> StepOutput:
    """What a part gave, received."""
    return StepOutput(**{name: None if a is None else tensor(a) for name, a in zip(_OUTPUTS, sent, strict=True)})
