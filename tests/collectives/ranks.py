"""Ranks of a shared-memory group in processes of their own, for tests and to be killed by them."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = str(Path(__file__).parents[2])


def start(ranks: int, what: str, segment: Sequence[int], *more: str, only: Sequence[object] = ()) -> list[subprocess.Popen[str]]:
    """One process a rank that does `what` (a function below) and prints what it found; `only=["all"]`: one that forks them all."""
    command = [sys.executable, "-m", "tests.collectives.ranks", what, str(ranks), f"{segment[0]},{segment[1]}"]
    return [
        subprocess.Popen(
            [*command, str(rank), *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in only or range(ranks)
    ]


def forked(ranks: int, work: Callable[[int], None]) -> int:
    """`work(rank)` in a process a rank, forked off one that has imported torch, which takes longer than all they do. Exit code."""
    import torch  # noqa: F401

    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((abs(code) for code in codes if code), 0)


def verbs(rank: int, ranks: int, segment: tuple[int, int], other: str) -> None:
    """Every verb in the native form, and over another segment in Python's."""
    pid, descriptor = other.split(",")
    every_verb(rank, ranks, segment, True)
    every_verb(rank, ranks, (int(pid), int(descriptor)), False)


def every_verb(rank: int, ranks: int, segment: tuple[int, int], native: bool) -> None:
    """On several sizes, dtypes and layouts, against torch's own sums."""
    import torch

    from rayneuron.collectives.shared_memory import Segment, SharedMemory

    torch.set_num_threads(1)
    comm = SharedMemory(Segment.attach(segment, ranks, 4096), rank, ranks, native=native, timeout_s=60)
    assert comm.native == native
    for turn, (shape, dtype) in enumerate(
        [((3, 7), torch.float32), ((2, 8, 40), torch.bfloat16), ((40, 80), torch.float32), ((1,), torch.float64), ((5, 4), torch.int32),
         ((3000,), torch.float16), ((9, 1024), torch.bfloat16)]
    ):  # fmt: skip
        every = [(torch.randn(shape, generator=torch.Generator().manual_seed(100 * turn + r)) * 9).to(dtype) for r in range(ranks)]
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        total = every[0].to(wide)
        for other in every[1:]:
            total = total + other.to(wide)
        total = total.to(dtype)
        mine = every[rank]
        assert torch.equal(comm.reduce(mine), total), (shape, dtype)
        assert torch.equal(comm.reduce(mine.T if mine.dim() == 2 else mine), total.T if mine.dim() == 2 else total)
        for dim in range(len(shape)):
            assert torch.equal(comm.gather(mine, dim), torch.cat(every, dim)), (shape, dtype, dim)
            if shape[dim] % ranks == 0:
                assert torch.equal(comm.reduce_scatter(mine, dim), total.chunk(ranks, dim)[rank]), (shape, dtype, dim)
        for root in range(ranks):
            copy = mine.clone()
            comm.broadcast(copy, root)
            assert torch.equal(copy, every[root]), (shape, dtype, root)
        into = torch.empty_like(mine)
        if rank % 2 == 0 and rank + 1 < ranks:
            comm.send(mine, rank + 1)
            comm.receive(into, rank + 1)
            assert torch.equal(into, every[rank + 1])
        elif rank % 2:
            comm.receive(into, rank - 1)
            comm.send(mine, rank - 1)
            assert torch.equal(into, every[rank - 1])
    print("equal\n", end="", flush=True)  # in one piece: several ranks share a pipe


def wait(rank: int, ranks: int, segment: tuple[int, int], timeout_s: str) -> None:
    """Tell who I am, learn who the others are, exchange once, then again; print how the second one ended and after how long."""
    import time

    import torch

    from rayneuron.collectives.shared_memory import Segment, SharedMemory
    from rayneuron.errors import WorkerLost
    from rayneuron.processes import process_started

    print(os.getpid(), process_started(os.getpid()), flush=True)
    peers = {int(r): (int(p), int(s)) for r, p, s in (part.split(":") for part in sys.stdin.readline().split())}
    comm = SharedMemory(Segment.attach(segment, ranks, 4096), rank, ranks, peers=peers, timeout_s=float(timeout_s))
    comm.reduce(torch.ones(4))
    print("met", flush=True)
    if rank == ranks - 1:
        sys.stdin.readline()  # until it is killed, or its input is closed
        return
    began = time.monotonic()
    try:
        comm.reduce(torch.ones(4))
    except WorkerLost as error:
        print(f"{time.monotonic() - began:.3f} {error}", flush=True)


if __name__ == "__main__":
    function, count, place, number, *rest = sys.argv[1:]
    pid, descriptor = place.split(",")

    def work(rank: int) -> None:
        globals()[function](rank, int(count), (int(pid), int(descriptor)), *rest)

    sys.exit(forked(int(count), work) if number == "all" else work(int(number)))
