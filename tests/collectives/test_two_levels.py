"""Collectives over hosts: 2 and 3 "hosts" of 1 to 3 ranks as threads, against torch's sums; once a host is what crosses between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rayneuron.collectives.shared_memory import Segment, SharedMemory
from rayneuron.collectives.two_levels import TwoLevels
from rayneuron.errors import WorkerLost
from rayneuron.models.collectives import Solo


class Counted:
    """Stands for the network: counts the bytes that one host's first rank hands over."""

    def __init__(self, inner: SharedMemory) -> None:
        self._inner = inner
        self.rank, self.ranks = inner.rank, inner.ranks
        self.handed: list[int] = []

    def reduce(self, x: Tensor) -> Tensor:
        self.handed.append(x.nbytes)
        return self._inner.reduce(x)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        self.handed.append(x.nbytes)
        return self._inner.gather(x, dim)

    def broadcast(self, x: Tensor, rank: int) -> None:
        self.handed.append(x.nbytes)
        self._inner.broadcast(x, rank)


def run(hosts: int, each: int, work: Callable[[TwoLevels], Any]) -> tuple[list[Any], list[Counted]]:
    """What `work` gives on every rank, in rank order, and the hosts' ways out."""
    near, between = [Segment.create(each) for _ in range(hosts)], Segment.create(hosts)
    ways = [Counted(SharedMemory(between, host, hosts, timeout_s=60)) for host in range(hosts)]
    results: list[Any] = [None] * (hosts * each)

    def rank(host: int, place: int) -> None:
        inside: Any = SharedMemory(near[host], place, each, timeout_s=60) if each > 1 else Solo()
        comm = TwoLevels(inside, ways[host] if place == 0 else None, host, hosts)  # type: ignore[arg-type]
        assert comm.rank == host * each + place and comm.ranks == hosts * each
        results[comm.rank] = work(comm)

    threads = [threading.Thread(target=rank, args=(h, p)) for h in range(hosts) for p in range(each)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for segment in (*near, between):
        segment.close()
    return results, ways


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (3, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_verb_gives_what_torch_gives(hosts: int, each: int, dtype: torch.dtype) -> None:
    count = hosts * each
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(5, 2 * count, generator=generator).to(dtype) for _ in range(count)]
    total = torch.stack([x.double() for x in inputs]).sum(0)

    def work(comm: TwoLevels) -> list[Tensor]:
        mine = inputs[comm.rank]
        told = mine.clone()
        comm.broadcast(told, count - 1)
        return [comm.reduce(mine), comm.gather(mine, 1), comm.gather(mine, 0), comm.reduce_scatter(mine, 1), told, comm.reduce(mine)]

    results, ways = run(hosts, each, work)
    for rank, (summed, wide, long, share, told, again) in enumerate(results):
        assert summed.dtype == dtype and torch.equal(summed, results[0][0]) and torch.equal(summed, again)
        assert torch.allclose(summed.double(), total, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-5)
        assert torch.equal(wide, torch.cat(inputs, 1)) and torch.equal(long, torch.cat(inputs, 0))
        assert torch.equal(share, summed.chunk(count, 1)[rank]) and torch.equal(told, inputs[-1])
    wide_bytes = inputs[0].numel() * 4  # sums cross in float32
    for way in ways:
        sums = [n for n in way.handed if n == wide_bytes]
        assert len(way.handed) == 6 and len(sums) >= 3, "one message a verb and host, however many ranks it has"


def test_bfloat16_is_rounded_once() -> None:
    """2^-9 added four times to 1 is lost to rounding at every step; summed in float32 it is not."""
    inputs = [torch.tensor([1.0]), *[torch.tensor([2.0**-8])] * 3]
    results, _ = run(2, 2, lambda comm: comm.reduce(inputs[comm.rank].bfloat16()))
    assert all(r.item() == torch.tensor(1 + 3 * 2.0**-8).bfloat16().item() for r in results)


def test_an_abort_reaches_the_ranks_of_the_host() -> None:
    began = threading.Barrier(2)

    def work(comm: TwoLevels) -> str:
        if comm.rank == 3:
            began.wait(60)
            comm._near.abort()  # type: ignore[attr-defined]
            return "aborted"
        if comm.rank == 2:
            began.wait(60)
            try:
                comm.reduce(torch.ones(3))
            except WorkerLost as lost:
                return str(lost)
        return "elsewhere"

    results, _ = run(2, 2, work)
    assert results[2:] == ["another rank of the group has failed", "aborted"]


def test_only_neighbours_send_to_each_other() -> None:
    def work(comm: TwoLevels) -> Any:
        mine = torch.full((2,), float(comm.rank))
        if comm.rank % 2:
            comm.receive(mine, comm.rank - 1)
            return mine.tolist()
        comm.send(mine, comm.rank + 1)
        with pytest.raises(ValueError, match="on another host"):
            comm.send(mine, (comm.rank + 2) % 4)
        return None

    assert run(2, 2, work)[0] == [None, [0.0, 0.0], None, [2.0, 2.0]]
