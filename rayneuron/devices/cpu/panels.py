"""KV in panels, as the products of attention read it (`Blocks` of blocks.h): which stores lie so, and the way from and to rows.

N blocks of S positions, K KV heads, D head size, B rows of T new tokens, M blocks of a row. A unit is the keys, then the values, of one
head of one block; e values share a dword.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayneuron.devices.cpu.packing import PANEL
from rayneuron.models.kv import KvShape
from rayneuron.models.ops import Layer

TILE = 64  # positions that attention takes at once


def fit(kv: KvShape, dtype: torch.dtype) -> bool:
    """Whether units of this shape can be panels: whole tiles of positions, whole panels of values, numbers the kernels compute with."""
    whole = kv.columns % TILE == 0 and kv.dim % PANEL == 0
    return whole and kv.shards == 1 and dtype in (torch.float32, torch.bfloat16)


def views(units: Tensor) -> Layer:
    """Of units [N,K,2,S,D] the keys [N,K,S/32,D/e,32,e] and the values [N,K,S/64,D/32,64/e,32,e]."""
    n, heads, _, block, size = units.shape
    each = 4 // units.element_size()
    keys = units[:, :, 0].view(n, heads, block // PANEL, size // each, PANEL, each)
    return keys, units[:, :, 1].view(n, heads, block // TILE, size // PANEL, TILE // each, PANEL, each)


def lie(layer: Layer) -> bool:
    """Whether keys and values are such views."""
    return layer[0].dim() > 4


def rows(layer: Layer) -> Layer:
    """Keys and values [N,K,S,D], copied."""
    keys, values = layer
    return keys.transpose(3, 4).flatten(4).flatten(2, 3), values.permute(0, 1, 2, 4, 6, 3, 5).flatten(5).flatten(2, 4)


def write_rows(layer: Layer, blocks: list[int], units: Tensor) -> None:
    """Units [n,K,2,S,D] in rows into some blocks."""
    (keys, values), (k, v) = layer, units.unbind(2)
    steps, each = keys.shape[3], keys.shape[5]
    keys[blocks] = k.unflatten(3, (steps, each)).unflatten(2, (-1, PANEL)).transpose(3, 4)
    values[blocks] = v.unflatten(3, (-1, PANEL)).unflatten(2, (-1, TILE // each, each)).permute(0, 1, 2, 5, 3, 6, 4)


def write(layer: Layer, slots: Tensor, k: Tensor, v: Tensor) -> Layer:
    """As `models.ops.write_kv`, in place: k, v [B,T,K,D] at slots [B,T]."""
    keys, values = layer
    size, each = keys.shape[2] * PANEL, keys.shape[-1]
    block, offset = slots // size, slots % size
    keys[block, :, offset // PANEL, :, offset % PANEL] = k.to(keys.dtype).unflatten(-1, (-1, each))
    values[block, :, offset // TILE, :, offset % TILE // each, :, offset % each] = v.to(values.dtype).unflatten(-1, (-1, PANEL))
    return layer


def read(layer: Layer, blocks: Tensor) -> tuple[Layer, Tensor]:
    """The blocks [B,M] of some rows, copied, as a store of one block a row: keys and values [B,K,M*S,D], and blocks [B,1] of it."""
    keys, values = (store[blocks] for store in layer)
    keys = keys.permute(0, 2, 1, 3, 5, 4, 6).flatten(5).flatten(2, 4)
    values = values.permute(0, 2, 1, 3, 5, 7, 4, 6).flatten(6).flatten(2, 5)
    return (keys, values), torch.arange(len(blocks), dtype=blocks.dtype)[:, None]
