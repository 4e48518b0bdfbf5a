"""Sums over gloo, ranks as threads: the same bits for a row whatever shares its batch and wherever in memory it lies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rayneuron.collectives.gloo import Gloo, meet

COLUMNS = 576


def run(ranks: int, work: Callable[[Gloo], Any]) -> list[Any]:
    """What `work` gives on every rank, in rank order."""
    store, results = dist.HashStore(), [None] * ranks  # type: ignore[attr-defined]

    def rank(number: int) -> None:
        results[number] = work(meet(store, "here", "127.0.0.1", number, ranks, 60, 60))

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_every_batch_and_at_every_offset(ranks: int, dtype: torch.dtype) -> None:
    rows = [torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(ranks)]
    want = summed(rows)
    cases = [(batch, offset) for batch in (1, 2, 3, 5, 16, 64) for offset in (0, 1, 3, 7, 16)]

    def work(comm: Gloo) -> list[Tensor]:
        found = []
        for batch, offset in cases:
            room = torch.zeros(offset + batch * COLUMNS, dtype=dtype)
            mine = room[offset:].view(batch, COLUMNS).copy_(rows[comm.rank][:batch])
            found.append(comm.reduce(mine))
            assert torch.equal(mine, rows[comm.rank][:batch]), "the summand is left as it was"
        return found

    for everybody in zip(*run(ranks, work), cases, strict=True):
        *sums, (batch, offset) = everybody
        assert all(total.dtype == dtype and torch.equal(total, want[:batch]) for total in sums), (batch, offset)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_other_verbs_give_what_torch_gives(ranks: int) -> None:
    parts = [torch.arange(6 * ranks).view(2, 3 * ranks) * (r + 1) for r in range(ranks)]

    def work(comm: Gloo) -> tuple[Tensor, ...]:
        mine = parts[comm.rank]
        return comm.gather(mine, 0), comm.gather(mine.T, -1), comm.reduce_scatter(mine, 1), comm.reduce(mine)

    total = torch.stack(parts).sum(0)
    for rank, (long, wide, share, whole) in enumerate(run(ranks, work)):
        assert torch.equal(long, torch.cat(parts, 0)) and torch.equal(wide, torch.cat([p.T for p in parts], -1))
        assert torch.equal(share, total.chunk(ranks, 1)[rank]) and torch.equal(whole, total)
