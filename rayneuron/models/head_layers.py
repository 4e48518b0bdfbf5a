"""What heads compute: drafts from the model's own hidden states (Medusa, Cai et al. 2024; EAGLE and EAGLE-3, Li et al. 2024, 2025).

B rows, T tokens, E hidden size, F width of what is kept of a position, V vocabulary. With the id at position s and the features of the
position before, an EAGLE layer has an entry, whose KV lies at slot s, and so hangs on nothing behind s: blocks that are shared or copied
have it like the model's own. It counts as position s - 1, and there is none at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayneuron.errors import CheckpointError
from rayneuron.models import attention, decoder, rotary, weights
from rayneuron.models.attention import StepTables
from rayneuron.models.heads import MAPS, Heads
from rayneuron.models.kv import Kv, Places

if TYPE_CHECKING:
    from rayneuron.models.collectives import Collectives
    from rayneuron.models.ops import Ops


def load(heads: Heads, checkpoint: Mapping[str, Tensor], *, dtype: torch.dtype, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """A rank's weights of heads, as `weights.load`; of a smaller vocabulary, what the model calls its `ids`. Raises CheckpointError."""
    made = weights.load(heads.arch, heads, checkpoint, dtype=dtype, rank=rank, ranks=ranks, fused=False)
    count, vocab = heads.arch.spoken, heads.arch.vocab
    if count:
        ids = torch.arange(count) + checkpoint[MAPS[0]]
        there = torch.zeros(vocab, dtype=torch.bool)
        if ((ids < 0) | (ids >= vocab)).any() or len(ids.unique()) != count:
            raise CheckpointError(f"tensor {MAPS[0]!r} does not lead each of {count} ids to one of its own among {vocab}")
        there[ids] = True
        if not torch.equal(there, checkpoint[MAPS[1]].bool()):
            raise CheckpointError(f"tensors {MAPS[0]!r} and {MAPS[1]!r} speak of different ids")
        made["top"]["ids"] = ids.int()
    return made


def blocks(ops: Ops, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The residual blocks of one Medusa head, on hidden states [...,E]."""
    j = 0
    while f"block{j}.w" in w:
        x = x + F.silu(ops.linear(w, f"block{j}", x))
        j += 1
    return x


def features(heads: Heads, ops: Ops, top: Mapping[str, Tensor], hidden: Tensor, taps: decoder.Taps) -> Tensor:
    """What is kept of the tokens of a step [B,T,F]: their hidden states, or what EAGLE-3's `fc` makes of residuals."""
    return ops.linear(top, "fc", torch.cat(taps.states, -1)) if heads.taps else hidden


def enter(
    heads: Heads, ops: Ops, comm: Collectives, held: Mapping[str, Any], kv: Kv, tokens: Tensor, before: Tensor, places: Places
) -> None:
    """Write the KV of entries: tokens [B,T], each with the features `before` it [B,T,F]. A layer reads nothing else, so no attention."""
    arch, w = heads.arch, held["layers"][0]
    _, read = _entries(heads, ops, comm, held, tokens, before, places)
    k, v = (ops.linear(w, name, read).unflatten(-1, (-1, arch.head_dim)) for name in "kv")
    if arch.qk_norm:
        k = decoder.norm(arch, ops, w, "k_norm", k)
    cos, sin = rotary.tables(arch, held["top"]["rope.freq"], places.positions - 1, before.dtype)
    k = ops.rotate(k, cos, sin, arch.rope.pairs)
    kv.layers[0] = ops.write_kv(kv.layers[0], places.slots, k, v)


def draft(
    heads: Heads, ops: Ops, comm: Collectives, held: Mapping[str, Any], kv: Kv, tokens: Tensor, before: Tensor, places: Places
) -> tuple[Tensor, Tensor]:
    """As `enter`, and what the layer says: what the head reads, and the features of each token's own position, as it guesses them."""
    tables = _tables(heads, ops, comm, held["top"], kv, places, before.dtype)
    x, read = _entries(heads, ops, comm, held, tokens, before, places)
    x, kv.layers[0] = decoder.layer(heads.arch, ops, comm, held["layers"][0], kv.layers[0], x, tables, 0, read)
    return (decoder.norm(heads.arch, ops, held["top"], "norm", x) if heads.taps else x), x


def _entries(
    heads: Heads, ops: Ops, comm: Collectives, held: Mapping[str, Any], tokens: Tensor, before: Tensor, places: Places
) -> tuple[Tensor, Tensor]:
    """The residual of entries, and what attention reads."""
    arch, w, top = heads.arch, held["layers"][0], held["top"]
    embedded = decoder.embed(arch, ops, comm, top, tokens, places.positions)
    if not heads.taps:
        x = ops.linear(top, "fc", torch.cat((embedded, before), -1))
        return x, decoder.norm(arch, ops, w, "ln1", x) if "ln1.w" in w else x
    normed = decoder.norm(arch, ops, w, "hidden_norm", before)
    return normed if heads.normed else before, torch.cat((decoder.norm(arch, ops, w, "ln1", embedded), normed), -1)


def _tables(
    heads: Heads, ops: Ops, comm: Collectives, top: Mapping[str, Tensor], kv: Kv, places: Places, dtype: torch.dtype
) -> StepTables:
    """Of a step of entries: nobody looks at slot 0, where there is none."""
    bias = attention.bias(places.positions, places.length, 0, None, dtype)
    first = torch.arange(places.length, dtype=torch.int32, device=bias.device) == 0
    bias = torch.where(first, attention.mask_value(dtype), bias)
    made = decoder.prepare(heads.arch, ops, comm, top, replace(places, positions=places.positions - 1), kv.shape, dtype)
    return replace(made, places=places, biases={heads.arch.window(0): bias})
