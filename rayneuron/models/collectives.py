"""What the ranks of a group say to each other inside a step: the verbs, and their form for a group of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Collectives(Protocol):
    """Sums and copies between the ranks of one group. Every rank calls the same verbs in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def ranks(self) -> int:
        """How many there are."""

    def reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, on every rank; same shape."""

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors along `dim` in rank order, on every rank."""

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over ranks, then keep this rank's equal share of `dim`."""

    def send(self, x: Tensor, rank: int) -> None:
        """Send to one rank; the receiver knows shape and dtype."""

    def receive(self, x: Tensor, rank: int) -> None:
        """Receive into `x` from one rank."""

    def broadcast(self, x: Tensor, rank: int) -> None:
        """Copy `x` of `rank` into everybody's `x`."""


def own_share(comm: Collectives, x: Tensor, dim: int) -> Tensor:
    """`reduce_scatter` by `reduce`. Raises ValueError where the ranks cannot share `dim` equally."""
    if x.shape[dim] % comm.ranks:
        raise ValueError(f"{x.shape[dim]} along dim {dim} cannot be shared equally by {comm.ranks} ranks")
    return comm.reduce(x).chunk(comm.ranks, dim)[comm.rank].contiguous()


class Solo:
    """Collectives of a group of one: nothing moves."""

    rank = 0
    ranks = 1

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x

    def send(self, x: Tensor, rank: int) -> None:
        raise RuntimeError("a group of one rank has nobody to send to")

    def receive(self, x: Tensor, rank: int) -> None:
        raise RuntimeError("a group of one rank has nobody to receive from")

    def broadcast(self, x: Tensor, rank: int) -> None:
        return None
