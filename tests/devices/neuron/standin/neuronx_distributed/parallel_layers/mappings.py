"""Stand-in: collectives as operators in the traced graph, executed between the threads that play the local ranks."""

import threading

import torch
from torch import Tensor

from neuronx_distributed.trace import parallel_context


class Ring:
    """The local ranks of one run, and through `fabric` those of other processes. Every collective of every rank meets here, in order."""

    def __init__(self, ranks: int, fabric=None) -> None:
        self.box, self.everybody, self.fabric = [None] * ranks, [], fabric
        self.barrier = threading.Barrier(ranks, self._meet)

    def _meet(self) -> None:
        """On one thread, when all local ranks have come; every second time only to see them off."""
        if self.box[0] is not None:
            self.everybody = self.fabric.exchange(self.box) if self.fabric else self.box
            self.box = [None] * len(self.box)

    def all(self, place: int, what: str, x: Tensor) -> list[Tensor]:
        self.box[place] = (what, x)
        self.barrier.wait()
        everybody = self.everybody
        self.barrier.wait()
        if {(w, t.shape, t.dtype) for w, t in everybody} != {(what, x.shape, x.dtype)}:
            raise RuntimeError(f"ranks do not run the same collective: {[w for w, _ in everybody]}")
        return [t for _, t in everybody]


class Place(threading.local):
    """The rank that this thread plays."""

    ring: Ring | None = None
    place = 0  # among the local ranks
    rank = 0


HERE = Place()


def _all(what: str, x: Tensor) -> list[Tensor]:
    if HERE.ring is None:
        raise RuntimeError("a collective outside of a run")
    return HERE.ring.all(HERE.place, what, x)


def _summed(every: list[Tensor]) -> Tensor:
    """Pairwise and in the dtype they have: whoever wants float32 says so."""
    while len(every) > 1:
        every = [a + b for a, b in zip(every[::2], every[1::2], strict=False)] + every[len(every) & ~1 :]
    return every[0].clone()


@torch.library.custom_op("standin::all_reduce", mutates_args=())
def all_reduce(x: Tensor, ranks: int) -> Tensor:
    return _summed(_all("all_reduce", x))


@all_reduce.register_fake
def _(x: Tensor, ranks: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("standin::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, ranks: int) -> Tensor:
    return torch.cat(_all(f"all_gather {dim}", x), dim)


@all_gather.register_fake
def _(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty([n * ranks if i == dim else n for i, n in enumerate(x.shape)])


@torch.library.custom_op("standin::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, ranks: int, computation: str) -> Tensor:
    every = _all(f"reduce_scatter {dim} {computation}", x)
    total = torch.stack(every).amax(0) if computation == "max" else _summed(every)
    return total.chunk(ranks, dim)[HERE.rank].clone()


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, ranks: int, computation: str) -> Tensor:
    return x.new_empty([n // ranks if i == dim else n for i, n in enumerate(x.shape)])


def reduce_from_tensor_model_parallel_region(input_, process_group=None):
    ranks = parallel_context.size()
    return input_ if ranks == 1 else all_reduce(input_, ranks)


def _gather_along_dim(x, partition_dim, process_group=None, tile_cc=False):
    ranks = parallel_context.size()
    return x if ranks == 1 else all_gather(x, partition_dim, ranks)


def _reduce_scatter_along_dim(x, partition_dim, computation="sum", process_group=None, tile_cc=False):
    ranks = parallel_context.size()
    if x.shape[partition_dim] % ranks:
        raise RuntimeError(f"unable to create {ranks} partitions along dim {partition_dim} of {tuple(x.shape)}")
    if computation not in ("sum", "max"):
        raise RuntimeError(f"computation {computation}")
    return x if ranks == 1 else reduce_scatter(x, partition_dim, ranks, computation)
