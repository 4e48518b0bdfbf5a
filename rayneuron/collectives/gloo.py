"""Collectives between processes over torch.distributed's gloo: the form for ranks on different hosts, and the plain one everywhere.

Gloo's own sums cut a buffer into parts and add each from another rank on, so a row's last bits would depend on its batch: here everybody
gathers, then adds in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayneuron.errors import WorkerLost
from rayneuron.models.collectives import own_share

NARROW = (torch.float16, torch.bfloat16)  # summed in float32: the order of ranks must not decide the last bits


class Gloo:
    """One rank of a gloo group, made by `join` or `meet`; every wait ends after the group's timeout."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.ranks = group.size()

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks in rank order, on every rank; a new tensor."""
        first, *others = self._everybodys(x)
        total = first.float() if x.dtype in NARROW else first
        for part in others:
            total += part
        return total.to(x.dtype)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim` in rank order."""
        return torch.cat(self._everybodys(x), dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over ranks, keep this rank's equal share of `dim`."""
        return own_share(self, x, dim)

    def send(self, x: Tensor, rank: int) -> None:
        """Send to one rank of the group."""
        self._done(lambda: self._group.send([x.contiguous()], rank, 0))

    def receive(self, x: Tensor, rank: int) -> None:
        """Receive into `x` from one rank of the group."""
        whole = x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        self._done(lambda: self._group.recv([whole], rank, 0))
        if whole is not x:
            x.copy_(whole)

    def broadcast(self, x: Tensor, rank: int) -> None:
        """Copy `x` of one rank of the group into everybody's."""
        whole = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = rank, 0
        self._done(lambda: self._group.broadcast([whole], options))
        if whole is not x:
            x.copy_(whole)

    def _everybodys(self, x: Tensor) -> list[Tensor]:
        """The `x` of every rank, new tensors."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        self._done(lambda: self._group.allgather([parts], [x]))
        return parts

    def _done(self, begin: Callable[[], dist.Work]) -> None:
        """Do one operation to its end. Raises WorkerLost where a connection broke or the timeout passed."""
        try:
            begin().wait()
        except RuntimeError as problem:
            reason = " ".join(str(problem).split())[:300]
            raise WorkerLost(f"rank {self.rank} of {self.ranks} lost another rank in an exchange over the network: {reason}") from None


def join(address: str, rank: int, ranks: int, timeout_s: float = 120.0) -> Gloo:
    """Join the group that meets at `address` ("file:///path" or "tcp://host:port"). Raises after `timeout_s` where a rank is missing."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
    group = dist.group.WORLD
    assert group is not None
    return Gloo(group)


def leave() -> None:
    """Give the group of `join` back."""
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(store: Any, address: str, ip: str, rank: int, ranks: int, timeout_s: float, step_timeout_s: float) -> Gloo:
    """A group without any state of the process: its ranks find each other in the store at `address` ("ip:port"), which one of them holds.

    Each listens on its own internal `ip`, whatever its host name or environment say. Raises WorkerLost where a rank has not come.
    """
    host, _, port = address.rpartition(":")
    try:
        if store is None:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), ranks, False, timedelta(seconds=timeout_s), wait_for_workers=False
            )
        store.set_timeout(timedelta(seconds=timeout_s))
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=ip)]
        options._timeout = timedelta(seconds=step_timeout_s)
        options._threads = 2
        return Gloo(gloo(store, rank, ranks, options))
    except (RuntimeError, dist.DistError) as problem:
        reason, limit_s = " ".join(str(problem).split())[:300], min(timeout_s, step_timeout_s)
        raise WorkerLost(f"rank {rank} of {ranks} on {ip} did not meet the others at {address} within {limit_s:g} s: {reason}") from None
