"""Collectives through shared memory, between real processes: against torch's sums, and with a rank killed, missing or broken off."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rayneuron.collectives.native import library
from rayneuron.collectives.shared_memory import Segment, SharedMemory
from rayneuron.errors import ConfigError, WorkerLost
from tests.collectives import ranks

FORMS = ["native", "python"]


@pytest.fixture
def segments() -> Iterator[list[Segment]]:
    made: list[Segment] = []
    yield made
    for segment in made:
        segment.close()


def test_the_library_is_there_where_a_compiler_is() -> None:
    assert library("shared_memory") is not None, "the tests' machine has a C compiler"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [2, 4])
def test_every_verb_gives_what_torch_gives(count: int, form: str, segments: list[Segment]) -> None:
    segments.append(Segment.create(count, 4096))
    processes = ranks.start(count, "verbs", segments[0].address, form)
    for process in processes:
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0 and out == "equal\n"


def threaded(count: int, slot_bytes: int, work: object, **options: object) -> list[object]:
    """The same in threads of this process, which the native form lets run side by side."""
    segment = Segment.create(count, slot_bytes)
    results: list[object] = [None] * count

    def run(rank: int) -> None:
        comm = SharedMemory(segment, rank, count, **options)  # type: ignore[arg-type]
        results[rank] = work(comm)  # type: ignore[operator]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    segment.close()
    return results


def test_thousands_of_turns_never_mix() -> None:
    """Sums of numbers that name their turn: a slot read too early or too late would show."""

    def work(comm: SharedMemory) -> bool:
        good = True
        for turn in range(2000):
            good &= bool((comm.reduce(torch.full((16,), float(turn * (comm.rank + 1)))) == turn * 6.0).all())
            if turn % 7 == 0:
                good &= comm.gather(torch.tensor([turn + comm.rank]), 0).tolist() == [turn, turn + 1, turn + 2]
        return good

    assert threaded(3, 4096, work, timeout_s=60.0) == [True] * 3


def test_the_order_of_summation_is_the_ranks() -> None:
    """1e8 + 1 - 1e8 in float32 depends on the order: every rank must say what rank order says."""
    values = [1e8, 1.0, -1e8, 3.0]
    expected = ((torch.tensor(values[0]) + values[1]) + values[2]) + values[3]
    for native in (True, False):
        out = threaded(4, 4096, lambda comm: comm.reduce(torch.tensor([values[comm.rank]])).item(), native=native, timeout_s=60.0)
        assert out == [expected.item()] * 4


def test_nan_and_infinity_survive_in_bfloat16() -> None:
    row = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0], dtype=torch.bfloat16)
    for out in threaded(2, 4096, lambda comm: comm.reduce(row), timeout_s=60.0):
        assert torch.equal(torch.nan_to_num(out, 7.0), torch.nan_to_num(row + row, 7.0))  # type: ignore[call-overload]


def test_a_killed_rank_is_named_in_time(segments: list[Segment]) -> None:
    segments.append(Segment.create(3, 4096))
    processes = ranks.start(3, "wait", segments[0].address, "60")
    who = [process.stdout.readline().split() for process in processes]  # type: ignore[union-attr]
    for process in processes:
        process.stdin.write(" ".join(f"{rank}:{pid}:{started}" for rank, (pid, started) in enumerate(who)) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    for process in processes:
        assert process.stdout.readline() == "met\n"  # type: ignore[union-attr]
    os.kill(processes[2].pid, signal.SIGKILL)  # a zombie until it is waited for: it must count as gone all the same
    for process in processes[:2]:
        took, _, error = process.communicate(timeout=200)[0].strip().partition(" ")
        assert error == f"rank 2 (pid {processes[2].pid}) is gone"
        assert float(took) < 20  # it may have waited before the kill; the machine may be busy
    processes[2].wait()


def test_a_rank_that_never_comes_is_named_at_the_deadline(segments: list[Segment]) -> None:
    segments.append(Segment.create(2, 4096))
    for native in (True, False):
        comm = SharedMemory(segments[0], 0, 2, timeout_s=0.3, native=native)
        began = time.monotonic()
        with pytest.raises(WorkerLost, match=r"rank 1 has not come to the exchange within 0\.3 s"):
            comm.reduce(torch.ones(3))
        assert time.monotonic() - began >= 0.3
        with pytest.raises(WorkerLost, match=r"rank 1 has not come"):
            comm.receive(torch.ones(3), 1)


@pytest.mark.parametrize("native", [True, False])
def test_abort_breaks_every_wait(native: bool, segments: list[Segment]) -> None:
    segments.append(Segment.create(2, 4096))
    comm = SharedMemory(segments[0], 0, 2, timeout_s=60, native=native)
    waiting = threading.Thread(target=lambda: pytest.raises(WorkerLost, comm.reduce, torch.ones(3)))
    waiting.start()
    comm.abort()
    waiting.join(60)
    assert not waiting.is_alive()
    with pytest.raises(WorkerLost, match="another rank of the group has failed"):
        comm.gather(torch.ones(3))


def test_nothing_has_a_name(segments: list[Segment]) -> None:
    """Whatever kills the group, there is no file that could stay."""

    def named() -> set[str]:
        """Files below /dev/shm that this process has open or mapped: others may make and remove theirs meanwhile."""
        words = Path("/proc/self/maps").read_text().split()
        words += [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return {word for word in words if word.startswith("/dev/shm/")}

    before = named()
    segments.append(Segment.create(2))
    assert named() == before
    assert "memfd:rayneuron" in os.readlink(f"/proc/self/fd/{segments[0].address[1]}")


def test_a_segment_of_a_dead_process_says_so() -> None:
    gone = next(pid for pid in range(4_000_000, 4_100_000) if not Path(f"/proc/{pid}").exists())
    with pytest.raises(ConfigError, match="one user in one container"):
        Segment.attach((gone, 3), 2)


def test_unequal_shares_are_refused(segments: list[Segment]) -> None:
    segments.append(Segment.create(2, 4096))
    with pytest.raises(ValueError, match="shared equally by 2"):
        SharedMemory(segments[0], 0, 2).reduce_scatter(torch.ones(3), 0)
