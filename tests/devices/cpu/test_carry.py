"""Runs of KV copied and hashed by the kernels: the hash is the library's, the bytes are those that were hashed, and no other is touched."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash

from rayneuron.devices.base import KvRuns
from rayneuron.devices.cpu import carry
from rayneuron.devices.cpu.library import library
from rayneuron.transfer import pieces

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels here")
BY = carry.by(library())


def some(*shape: int, seed: int = 0, at: int = 0) -> np.ndarray:
    """Random bytes, `at` bytes behind a line of the cache."""
    size = int(np.prod(shape))
    whole = np.random.default_rng(seed).integers(0, 256, size + 128, np.uint8)
    start = -whole.ctypes.data % 64 + at
    return whole[start : start + size].reshape(shape)


@pytest.mark.parametrize("unit", [241, 255, 256, 257, 1023, 1024, 1025, 1088, 4096, 49_153])
@pytest.mark.parametrize("at", [0, 1])
def test_it_is_xxh3_of_what_then_lies_there(unit, at):
    theirs = [some(7, 3, unit, seed=layer, at=at) for layer in range(2)]
    ours = [np.full((9, 4, unit), 0xEE, np.uint8) for _ in range(2)] if at else [some(9, 4, unit, seed=9) for _ in range(2)]
    before = [units.copy() for units in ours]
    of, to = KvRuns(theirs, (5, 1, 2), 1, 2), KvRuns(ours, (8, 0, 3), 2, 2)
    found = np.concatenate([BY(of, to)(0, 4), BY(of, to)(4, 6)])
    for units, there, sums in zip(before, theirs, found.reshape(2, 3), strict=True):
        for i, (source, target) in enumerate(((5, 8), (1, 0), (2, 3))):
            assert int(sums[i]) == xxhash.xxh3_64_intdigest(there[source, 1:3].tobytes())
            units[target, 2:4] = there[source, 1:3]
    assert all((a == b).all() for a, b in zip(before, ours, strict=True))
    assert (BY(to, None)(1, 5) == found[1:5]).all() and (pieces.carry(to)(1, 5) == found[1:5]).all()


def test_it_is_the_same_without_the_widest_registers():
    """As another processor would compute it, with which a hand-off must agree."""
    narrow = carry.by(library("x86-64-v3"))
    units, ours = [some(3, 2, 5000)], [some(3, 2, 5000, seed=1)]
    found = narrow(KvRuns(units, (2, 0), 0, 2), KvRuns(ours, (0, 1), 0, 2))(0, 2)
    assert (found == BY(KvRuns(units, (2, 0), 0, 2), None)(0, 2)).all()
    assert (ours[0][0] == units[0][2]).all() and (ours[0][1] == units[0][0]).all()


def test_what_changes_meanwhile_is_never_copied_as_something_that_was_not_hashed():
    """Somebody writes while it is read, as where a lease has ended: sum and copy may be of any moment, but of the same one."""
    theirs, stop = np.zeros((1, 1, 1 << 20), np.uint8), threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 256
            theirs[:] = value

    writer = threading.Thread(target=write)
    writer.start()
    try:
        ours, mixed = some(1, 1, 1 << 20), 0
        for _ in range(1000):
            (found,) = BY(KvRuns([theirs], (0,), 0, 1), KvRuns([ours], (0,), 0, 1))(0, 1)
            assert int(found) == xxhash.xxh3_64_intdigest(ours.tobytes())
            mixed += bool((ours != ours[0, 0, 0]).any())
            if mixed == 20:
                break
    finally:
        stop.set()
        writer.join()
    assert mixed, "nobody wrote meanwhile, and nothing was tested"


def test_it_keeps_whatever_it_has_the_address_of():
    """Between two calls: the lists of addresses, and the memory they point to."""
    theirs, ours = some(64, 1, 512), some(64, 1, 512, seed=1)
    wanted, kept = theirs.copy(), ours[:]
    carried = BY(KvRuns([theirs], range(64), 0, 1), KvRuns([ours], range(64), 0, 1))
    del theirs, ours
    others = [np.full(64, kept.ctypes.data + 512, np.uint64) for _ in range(200)]  # as long as the lists: what is let go is theirs now
    carried(0, 64)
    assert (kept == wanted).all() and len(others) == 200


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: BY(KvRuns([a], (0, 4), 0, 1), None),
        lambda a, b: BY(KvRuns([a], (-1,), 0, 1), None),
        lambda a, b: BY(KvRuns([a], (0,), 1, 2), None),
        lambda a, b: BY(KvRuns([a], (0, 1), 0, 1), KvRuns([b], (0,), 0, 1)),
        lambda a, b: BY(KvRuns([a], (0,), 0, 1), KvRuns([b], (9,), 0, 1)),
        lambda a, b: BY(KvRuns([a], (0,), 0, 1), KvRuns([b[:, :, :256].copy()], (0,), 0, 1)),  # it would be written behind its run
        lambda a, b: BY(KvRuns([a], (0,), 0, 2), KvRuns([b], (0,), 0, 1)),
        lambda a, b: BY(KvRuns([a], (0, 1), 0, 1), None)(0, 3),
        lambda a, b: BY(KvRuns([a], (0, 1), 0, 1), None)(1, 1),
        lambda a, b: BY(KvRuns([a[:, :, :240].copy()], (0,), 0, 1), None),
    ],
)
def test_what_is_outside_the_memory_is_refused(wrong):
    with pytest.raises(IndexError):
        wrong(np.zeros((4, 2, 512), np.uint8), np.zeros((4, 2, 512), np.uint8))
