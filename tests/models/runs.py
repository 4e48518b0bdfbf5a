"""Ranks of a model, alone or together in threads, and the steps that tests put them through. Free of transformers, so it starts fast."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayneuron import models
from rayneuron.models import decoder, hub, ops, weights
from rayneuron.models.collectives import Solo
from rayneuron.models.kv import Kv, KvShape, KvSpace, Places
from rayneuron.models.memory import kv_shape


class Threads:
    """Collectives between threads of one process."""

    def __init__(self, rank: int, ranks: int, barrier: threading.Barrier, box: list[Any]) -> None:
        self.rank, self.ranks, self._barrier, self._box = rank, ranks, barrier, box

    def _all(self, x: Tensor) -> list[Tensor]:
        self._box[self.rank] = x
        self._barrier.wait()
        everybody = list(self._box)
        self._barrier.wait()
        return everybody

    def reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._all(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.reduce(x).chunk(self.ranks, dim)[self.rank]


def on_ranks(ranks: int, work: Callable[[Any], Any]) -> list[Any]:
    """`work(comm)` of every rank, in threads; raises what any rank raised."""
    if ranks == 1:
        with torch.no_grad():
            return [work(Solo())]
    barrier, box, out, failed = threading.Barrier(ranks), [None] * ranks, [None] * ranks, []

    def one(rank: int) -> None:
        try:
            with torch.no_grad():
                out[rank] = work(Threads(rank, ranks, barrier, box))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])
    return out


def table(space: KvSpace) -> Tensor:
    """The blocks of every row [rows + 1, width], scattered over the store, of the idle row none; int32."""
    width = space.width(space.limit)
    assert space.blocks >= space.rows * width
    order = torch.randperm(space.blocks, generator=torch.Generator().manual_seed(3))[: space.rows * width]
    return torch.cat((order.view(space.rows, width), torch.full((1, width), space.null))).to(torch.int32)


def places(space: KvSpace, held: Tensor, positions: Tensor, rows: Tensor, length: int) -> Places:
    """Where tokens at positions [B,T] of rows [B] are, by `table`; padding and idle rows write nowhere."""
    at = positions.clamp(max=space.limit - 1)
    slots = held[rows].gather(1, (at // space.block).long()) * space.block + at % space.block
    slots[(positions >= space.limit) | (rows[:, None] >= space.rows)] = space.nowhere
    return Places(positions, rows, held[rows][:, : space.width(length)].contiguous(), slots.to(torch.int32), length)


def zeros(shape: KvShape, dtype: torch.dtype) -> Kv:
    """KV of nothing but zeros, as the CPU's kernels want it: keys and values of a head of a block beside each other."""
    units = [torch.zeros(shape.space.total, shape.heads, 2, shape.columns, shape.dim, dtype=dtype) for _ in range(shape.layers)]
    return Kv(shape, [(each[:, :, 0], each[:, :, 1]) for each in units])


@dataclass
class Runner:
    """One rank of a model: weights, and KV of `rows` rows and `length` positions in blocks of `block`."""

    arch: Any
    weights: Any
    kv: Kv
    comm: Any
    ops: Any = ops.PLAIN

    @classmethod
    def open(
        cls,
        path: Path,
        comm: Any,
        *,
        rows: int = 3,
        length: int = 63,
        block: int = 16,
        kv_dtype: torch.dtype | None = None,
        arch: Any = None,
        **options: Any,
    ) -> Runner:
        config = hub.read_config(path)
        arch = arch or models.architecture(config)
        dtype = options.pop("dtype", torch.float32)
        loaded = weights.load(arch, models.family(config), hub.Checkpoint(path), dtype=dtype, rank=comm.rank, ranks=comm.ranks, **options)
        space = KvSpace(rows, length, rows * -(-length // block), block)
        return cls(arch, loaded, zeros(kv_shape(arch, space, comm.ranks), kv_dtype or dtype), comm)

    def places(self, positions: Tensor, rows: Tensor, length: int) -> Places:
        space = self.kv.shape.space
        return places(space, table(space), positions, rows, length)

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, length: int) -> Tensor:
        where = self.places(positions, rows, length)
        hidden = decoder.forward(self.arch, self.ops, self.comm, self.weights, self.kv, tokens, where)
        return decoder.logits(self.arch, self.ops, self.comm, self.weights, hidden)

    def chunk(self, ids: Tensor, start: int, stop: int, bucket: int, length: int) -> Tensor:
        """Tokens [start, stop) of every row in one step padded to `bucket`; rows 2, 0, and an idle one."""
        b, n, space = ids.shape[0], stop - start, self.kv.shape.space
        tokens = torch.zeros(b + 1, bucket, dtype=torch.int32)
        positions = torch.full((b + 1, bucket), space.limit, dtype=torch.int32)
        tokens[:b, :n], positions[:b, :n] = ids[:, start:stop], torch.arange(start, stop, dtype=torch.int32)
        rows = torch.tensor([2, 0][:b] + [space.rows], dtype=torch.int32)
        out = self.logits(tokens, positions, rows, min(length, space.limit))
        assert out.isfinite().all()
        return out[:b, :n]


def run(runner: Runner, ids: Tensor, prompt: int, bucket: int = 16) -> Tensor:
    """Prefill of `prompt` tokens in chunks of `bucket`, then single tokens, then a step of three: logits of every token [B,N,V]."""
    n = ids.shape[1]
    out = [runner.chunk(ids, s, min(s + bucket, prompt), bucket, 32 if prompt <= 32 else 64) for s in range(0, prompt, bucket)]
    out += [runner.chunk(ids, t, t + 1, 1, 64) for t in range(prompt, n - 3)]
    out.append(runner.chunk(ids, n - 3, n, 3, 64))
    return torch.cat(out, 1)
