"""Tensors of a step as bytes of a message and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import torch
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


@lru_cache(maxsize=1024)
def _said(shape: Shape) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(shape))


def part(shape: Shape, batch: Batch) -> Part:
    """A batch to send."""
    return Part(_said(shape), memoryview(b"".join([getattr(batch, name).numpy() for name in _FIELDS])))


class Batches:
    """Where the batches lie that a worker receives: one place for each shape and micro-batch, which the next step writes anew. All
    workers of a host wait for the cores that those before them compute on, so that a step makes no object it could keep, and reads no
    shape that it has met."""

    def __init__(self, space: KvSpace) -> None:
        self._space = space
        self._held: dict[tuple[int, bytes], tuple[memoryview, Shape, Batch]] = {}

    def read(self, place: int, part: Part) -> tuple[Shape, Batch]:
        """The `place`-th micro-batch of a step. Raises ValueError where its size is not the shape's."""
        key = place, bytes(part.shape)
        held, shape, batch = self._held.get(key) or self._make(*key)
        if len(part.data) != len(held):
            raise ValueError(f"{len(part.data)} bytes where {shape} has {len(held)}")
        held[:] = part.data
        return shape, batch

    def _make(self, place: int, said: bytes) -> tuple[memoryview, Shape, Batch]:
        shape = msgspec.msgpack.decode(said, type=Shape)
        idle = blank(shape, self._space)
        flat = np.empty(sum(idle[name].nbytes for name in _FIELDS), np.uint8)
        ends = np.cumsum([idle[name].nbytes for name in _FIELDS])
        pieces = zip(_FIELDS, np.split(flat, ends[:-1]), strict=True)
        batch = Batch(**{name: torch.from_numpy(piece.view(idle[name].dtype).reshape(idle[name].shape)) for name, piece in pieces})
        return self._held.setdefault((place, said), (memoryview(flat), shape, batch))  # type: ignore[arg-type]


def output(out: StepOutput) -> list[Array | None]:
    """What a part gave, to send."""
    made = [getattr(out, name) for name in _OUTPUTS]
    return [None if x is None else array(x) for x in made]


def step_output(sent: Sequence[Array | None]) -> StepOutput:
    """What a part gave, received."""
    return StepOutput(**{name: None if a is None else tensor(a) for name, a in zip(_OUTPUTS, sent, strict=True)})
