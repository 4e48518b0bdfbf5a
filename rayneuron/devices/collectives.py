"""Collectives between processes over torch.distributed's gloo: the form for ranks on different hosts, and the plain one everywhere.

Gloo has no reduce_scatter for every dtype and no sum in float16 on all versions, so both are made here of what it has.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

NARROW = (torch.float16, torch.bfloat16)  # summed in float32: the order of ranks must not decide the last bits


class Gloo:
    """One rank of a gloo group. The store of `join` is the meeting point; every wait ends after the group's timeout."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, on every rank; a new tensor."""
        total = x.to(torch.float32, copy=True) if x.dtype in NARROW else x.clone()
        total = total.contiguous()
        dist.all_reduce(total, group=self._group)
        return total.to(x.dtype)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim` in rank order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(parts, x, group=self._group)
        return torch.cat(parts, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over ranks, keep this rank's equal share of `dim`."""
        if x.shape[dim] % self.ranks:
            raise ValueError(f"{x.shape[dim]} along dim {dim} cannot be shared equally by {self.ranks} ranks")
        return self.reduce(x).chunk(self.ranks, dim)[self.rank].contiguous()

    def send(self, x: Tensor, rank: int) -> None:
        """Send to one rank of the group."""
        dist.send(x.contiguous(), group=self._group, group_dst=rank)

    def receive(self, x: Tensor, rank: int) -> None:
        """Receive into `x` from one rank of the group."""
        if x.is_contiguous():
            dist.recv(x, group=self._group, group_src=rank)
            return
        whole = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.recv(whole, group=self._group, group_src=rank)
        x.copy_(whole)

    def broadcast(self, x: Tensor, rank: int) -> None:
        """Copy `x` of one rank of the group into everybody's."""
        whole = x.contiguous()
        dist.broadcast(whole, group=self._group, group_src=rank)
        if whole is not x:
            x.copy_(whole)


def join(address: str, rank: int, ranks: int, timeout_s: float = 120.0) -> Gloo:
    """Join the group that meets at `address` ("file:///path" or "tcp://host:port"). Raises after `timeout_s` where a rank is missing."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
    return Gloo()


def leave() -> None:
    """Give the group back."""
    if dist.is_initialized():
        dist.destroy_process_group()
