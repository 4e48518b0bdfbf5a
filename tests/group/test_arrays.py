"""A step's batch as bytes: what a worker reads is what worker 0 packed, over and over in the same place."""

from __future__ import annotations

import msgspec
import pytest
import torch

from rayneuron.devices.base import LIKELIEST, SAMPLED, SCHEMA, Batch, Shape
from rayneuron.devices.idle import idle
from rayneuron.group.arrays import Batches, part
from rayneuron.group.messages import Part
from rayneuron.models.kv import KvSpace

SPACE = KvSpace(rows=4, limit=100, blocks=12, block=32)
SHAPES = (Shape("decode", 2, 1, 64, LIKELIEST), Shape("prefill", 1, 8, 100, SAMPLED), Shape("decode", 4, 1, 100, SAMPLED))
NAMES = [name for name, field in SCHEMA.items() if field.dtype]


def drawn(shape: Shape, seed: int) -> Batch:
    batch, draw = idle(shape, SPACE), torch.Generator().manual_seed(seed)
    for name in NAMES:
        array = getattr(batch, name)
        setattr(batch, name, torch.rand(array.shape, generator=draw).mul(1000).to(array.dtype))
    return batch


def test_what_is_read_is_what_was_packed_and_lies_where_the_last_one_lay() -> None:
    batches, places = Batches(SPACE), {}
    for turn in range(3):
        for place, shape in enumerate((*SHAPES, SHAPES[0])):
            sent = drawn(shape, 10 * turn + place)
            told = msgspec.msgpack.decode(msgspec.msgpack.encode(part(shape, sent)), type=Part)
            met, read = batches.read(place, told)
            assert met == shape
            for name in NAMES:
                mine, theirs = getattr(read, name), getattr(sent, name)
                assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype
            places.setdefault(place, read.tokens.data_ptr())
            assert read.tokens.data_ptr() == places[place]
    assert len(set(places.values())) == 4, "micro-batches of one step lie apart, also of one shape"


def test_a_batch_of_another_size_is_refused() -> None:
    told = part(SHAPES[0], drawn(SHAPES[0], 1))
    with pytest.raises(ValueError, match="bytes where"):
        Batches(SPACE).read(0, Part(part(SHAPES[2], idle(SHAPES[2], SPACE)).shape, told.data))
