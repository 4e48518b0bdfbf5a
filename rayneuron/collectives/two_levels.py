"""Collectives of ranks on several hosts: shared memory within a host, and one rank of each host over the network for all of its ranks.

Whatever crosses between hosts does so once a host, not once a rank. Every host has as many ranks, numbered host after host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayneuron.collectives.gloo import NARROW
from rayneuron.models.collectives import Collectives, own_share


class TwoLevels:
    """One rank. `near`: the ranks of its host; `far`: the first rank of every host, None on the others; `host` of `hosts` it is on."""

    def __init__(self, near: Collectives, far: Collectives | None, host: int, hosts: int) -> None:
        self.rank, self.ranks = host * near.ranks + near.rank, hosts * near.ranks
        self._near, self._far, self._host, self._hosts = near, far, host, hosts

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, on every rank the same bits; a new tensor. float16 and bfloat16 are rounded once, at the end."""
        total = self._near.reduce(x.float() if x.dtype in NARROW else x)
        if self._far is not None:
            total = self._far.reduce(total)
        self._near.broadcast(total, 0)
        return total.to(x.dtype)

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate along `dim` in rank order."""
        ours = self._near.gather(x, dim)
        if self._far is not None:
            whole = self._far.gather(ours, dim)
        else:
            shape = list(ours.shape)
            shape[dim] *= self._hosts
            whole = torch.empty(shape, dtype=ours.dtype)
        self._near.broadcast(whole, 0)
        return whole

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over ranks, keep this rank's equal share of `dim`."""
        return own_share(self, x, dim)

    def broadcast(self, x: Tensor, rank: int) -> None:
        """Copy `x` of one rank into everybody's: to its host's first rank, from there to the others', and on each host to all."""
        source, place = divmod(rank, self._near.ranks)
        if source == self._host:
            self._near.broadcast(x, place)
        if self._far is not None:
            self._far.broadcast(x, source)
        if source != self._host:
            self._near.broadcast(x, 0)

    def send(self, x: Tensor, rank: int) -> None:
        """Send to a rank of this host."""
        self._near.send(x, self._neighbour(rank))

    def receive(self, x: Tensor, rank: int) -> None:
        """Receive from a rank of this host."""
        self._near.receive(x, self._neighbour(rank))

    def _neighbour(self, rank: int) -> int:
        host, place = divmod(rank, self._near.ranks)
        if host != self._host:
            raise ValueError(f"rank {rank} is on another host than rank {self.rank}: only sums and gathers cross between hosts")
        return place
