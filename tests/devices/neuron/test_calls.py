"""Calls into the runtime that are waited for, given up, and refused afterwards."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from rayneuron.devices.neuron import calls
from rayneuron.devices.neuron.calls import Calls
from rayneuron.errors import WorkerLost


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """What the runtime waits for; it comes when the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "TELL_S", 0.01)


def fail() -> None:
    raise TimeoutError("of the work itself")


def test_what_is_called_gives_and_raises_as_it_is() -> None:
    made = Calls()
    assert [made(lambda: 3), made.load(lambda: 4, lambda: None)] == [3, 4]
    for call in (made, lambda work: made.load(work, lambda: None)):
        with pytest.raises(TimeoutError, match="of the work itself"):
            call(fail)
    assert made(threading.get_ident) == made(threading.get_ident) != threading.get_ident(), "one thread, and another"
    made.close()


@pytest.mark.parametrize("loading", [False, True])
def test_an_abort_ends_the_wait_and_all_after_it(loading: bool, held: threading.Event) -> None:
    made, inside, late = Calls(), threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        held.wait()
        late.set()

    threading.Thread(target=lambda: (inside.wait(), made.abort("worker 1 is gone"))).start()
    with pytest.raises(WorkerLost, match="worker 1 is gone"):
        made.load(work, lambda: None) if loading else made(work)
    made.abort("another loss")
    with pytest.raises(WorkerLost, match="worker 1 is gone"):
        made(lambda: pytest.fail("called"))
    held.set()
    assert late.wait(10), "what was given up ends by itself"
    made.close()


def test_limits(held: threading.Event) -> None:
    made = Calls()
    made.load_s, made.step_s = 0.2, 0.1
    with pytest.raises(WorkerLost, match="has not ended within 0.1 s"):
        made(held.wait)
    made = Calls()
    made.load_s, made.step_s = 0.2, 0.1
    with pytest.raises(WorkerLost, match="has loaded nothing for 0.2 s"):
        made.load(held.wait, lambda: None)


@pytest.mark.parametrize("kind", [0, 1], ids=["computes", "reads"])
def test_loading_that_works_takes_as_long_as_it_takes(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, told, much = Calls(), threading.Semaphore(0), itertools.count(0, 1000)
    made.load_s = 0.03
    monkeypatch.setattr(calls, "_used", lambda: (next(much) if kind == 0 else 0.0, next(much) if kind == 1 else 0))

    def work() -> float:
        for _ in range(9):
            assert told.acquire(timeout=60)
        return 0.6

    assert made.load(work, told.release) == 0.6


def test_what_a_process_uses_is_the_kernels() -> None:
    before, until = calls._used(), time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    assert calls._used()[0] - before[0] > 0.15


def test_what_tell_raises_ends_it(held: threading.Event) -> None:
    def lost() -> None:
        raise WorkerLost("worker 2 is gone")

    made = Calls()
    with pytest.raises(WorkerLost, match="worker 2"):
        made.load(held.wait, lost)
    with pytest.raises(WorkerLost, match="worker 2"):
        made(lambda: None)
