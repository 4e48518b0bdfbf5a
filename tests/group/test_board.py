"""The board of a host: all read all of it in order, nobody's message is written over, and every wait ends when it must."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rayneuron import wire
from rayneuron.errors import WorkerLost
from rayneuron.group.board import Behind, Board, BoardReader
from rayneuron.group.messages import Disown, Step, Stop

SLOT_BYTES = 4096
NEAR: list[Any] = [SimpleNamespace(name=f"worker {index}") for index in (1, 2, 3)]


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.open(NEAR, SLOT_BYTES)
    assert made is not None, "the tests' machine has a C compiler"
    yield made
    made.abort()
    made.close()


def nothing() -> None:
    """A check that finds nothing wrong."""


def reader(board: Board, place: int) -> BoardReader:
    spot = board.spot(NEAR[place])
    assert spot is not None
    return BoardReader(spot)


def test_all_read_all_in_order_however_fast_they_are(board: Board) -> None:
    """Steps, of which two may be under way, and words between them that nobody answers: more than there are slots."""
    draw, heard, readers = random.Random(7), [[] for _ in NEAR], [reader(board, place) for place in range(len(NEAR))]  # type: ignore[var-annotated]

    def serve(place: int) -> None:
        naps = random.Random(place)
        while not isinstance(message := readers[place].receive(), Stop):
            if naps.random() < 0.02:
                time.sleep(0.001)
            heard[place].append(message.number if isinstance(message, Step) else message.identity)  # type: ignore[union-attr]
            if isinstance(message, Step):
                readers[place].answer(message.number, float(place))

    threads = [threading.Thread(target=serve, args=(place,)) for place in range(len(NEAR))]
    for thread in threads:
        thread.start()
    told: list[Any] = []
    for number in range(1, 400):
        for word in range(draw.choice((0, 0, 0, 1, 7))):
            told.append(f"{number}, {word}" + "x" * draw.randrange(2000))
            board.write(wire.frame(Disown(told[-1])), 60.0, nothing)
        told.append(number)
        board.write(wire.frame(Step(number, [], [])), 60.0, nothing)
        if number > 1 and (behind := draw.randrange(2)) == 0:
            assert board.collect(number - behind, 60.0, nothing) == [0.0, 1.0, 2.0]
    board.write(wire.frame(Stop()), 60.0, nothing)
    for thread in threads:
        thread.join(60)
    assert heard == [told] * len(NEAR)


def test_who_has_not_read_or_answered_is_named(board: Board) -> None:
    """The second of three sleeps: four messages wait for it, the fifth does not fit; a step waits for it too."""
    one, _, three = readers = [reader(board, place) for place in range(3)]
    for number in range(1, 5):
        board.write(wire.frame(Disown(str(number))), 60.0, nothing)
        for each in (one, three):
            assert each.receive() == Disown(str(number))
            each.answer(number, 0.5)
    with pytest.raises(Behind, match="worker 2"):
        board.collect(1, 0.01, nothing)
    with pytest.raises(Behind, match="worker 2"):
        board.write(wire.frame(Stop()), 0.01, nothing)
    assert [readers[1].receive() for _ in range(4)] == [Disown(str(number)) for number in range(1, 5)]
    readers[1].answer(4, 0.25)
    assert board.collect(4, 60.0, nothing) == [0.5, 0.25, 0.5]


def test_a_loss_ends_every_wait_at_once(board: Board) -> None:
    readers, lost, ended = [reader(board, place) for place in range(3)], threading.Event(), []

    def serve(each: BoardReader) -> None:
        with pytest.raises(wire.Closed):
            each.receive()
        ended.append(each)

    def check() -> None:
        if lost.is_set():
            raise WorkerLost("worker 2 is gone")

    threads = [threading.Thread(target=serve, args=(each,)) for each in readers]
    for thread in threads:
        thread.start()

    def lose() -> None:
        lost.set()
        board.abort()

    threading.Timer(0.05, lose).start()
    with pytest.raises(WorkerLost, match="worker 2 is gone"):
        board.collect(1, 60.0, check)
    for thread in threads:
        thread.join(60)
    assert len(ended) == 3


def test_a_message_longer_than_a_slot_is_none(board: Board) -> None:
    with pytest.raises(wire.WireError, match="longer than 4096"):
        board.write(wire.frame(Disown("x" * SLOT_BYTES)), 60.0, nothing)
