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


@dataclass
class Runner:
    """One rank of a model: weights, KV of `rows` rows and `length` positions (the last row and column are scratch)."""

    arch: Any
    weights: Any
    kv: list[Tensor]
    comm: Any
    ops: Any = ops.PLAIN

    @classmethod
    def open(
        cls,
        path: Path,
        comm: Any,
        *,
        rows: int = 4,
        length: int = 64,
        kv_dtype: torch.dtype | None = None,
        arch: Any = None,
        **options: Any,
    ) -> Runner:
        config = hub.read_config(path)
        arch = arch or models.architecture(config)
        dtype = options.pop("dtype", torch.float32)
        loaded = weights.load(arch, models.family(config), hub.Checkpoint(path), dtype=dtype, rank=comm.rank, ranks=comm.ranks, **options)
        kv = [torch.zeros(s, dtype=kv_dtype or dtype) for s in decoder.kv_shapes(arch, rows, length, comm.ranks)]
        return cls(arch, loaded, kv, comm)

    def logits(self, tokens: Tensor, positions: Tensor, rows: Tensor, length: int) -> Tensor:
        hidden = decoder.forward(self.arch, self.ops, self.comm, self.weights, self.kv, tokens, positions, rows, length)
        return decoder.logits(self.arch, self.ops, self.comm, self.weights, hidden)

    def chunk(self, ids: Tensor, start: int, stop: int, bucket: int, length: int) -> Tensor:
        """Tokens [start, stop) of every row in one step padded to `bucket`; rows 2, 0, and an idle one on the scratch row."""
        b, n = ids.shape[0], stop - start
        scratch = self.kv[0].shape[1] - 1
        tokens = torch.zeros(b + 1, bucket, dtype=torch.int32)
        positions = torch.full((b + 1, bucket), self.scratch_column, dtype=torch.int32)
        tokens[:b, :n], positions[:b, :n] = ids[:, start:stop], torch.arange(start, stop, dtype=torch.int32)
        positions[b] = 0
        rows = torch.tensor([2, 0][:b] + [scratch], dtype=torch.int32)
        out = self.logits(tokens, positions, rows, length)
        assert out.isfinite().all()
        return out[:b, :n]

    @property
    def scratch_column(self) -> int:
        return 63


def run(runner: Runner, ids: Tensor, prompt: int, bucket: int = 16) -> Tensor:
    """Prefill of `prompt` tokens in chunks of `bucket`, then single tokens, then a step of three: logits of every token [B,N,V]."""
    n = ids.shape[1]
    out = [runner.chunk(ids, s, min(s + bucket, prompt), bucket, 32 if prompt <= 32 else 64) for s in range(0, prompt, bucket)]
    out += [runner.chunk(ids, t, t + 1, 1, 64) for t in range(prompt, n - 3)]
    out.append(runner.chunk(ids, n - 3, n, 3, 64))
    return torch.cat(out, 1)
