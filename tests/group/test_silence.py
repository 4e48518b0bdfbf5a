"""A host that is cut off without a word (power, network) against one that is only busy: what the watch makes of either."""

from __future__ import annotations

import ctypes
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rayneuron import wire
from rayneuron.errors import Busy, RayNeuronError, WorkerLost
from rayneuron.group.group import Group
from rayneuron.group.messages import VERSION, Advance, Beat, Failed, FromWorker, Hello, Ready, ToWorker
from rayneuron.group.rendezvous import Member
from rayneuron.group.watch import Watch
from rayneuron.group.worker import LOST
from rayneuron.placement.layout import Worker, layout

SO_ATTACH_FILTER = 26
SILENCE_S = 0.8


def cut_off(connection: socket.socket) -> None:
    """From now on the kernel drops every packet of this connection before TCP sees it, hence acknowledges none (classic BPF: return 0)."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


@pytest.fixture
def ends() -> Iterator[tuple[wire.Channel[FromWorker], wire.Channel[ToWorker]]]:
    """Worker 0's end and the worker's, over TCP."""
    with wire.listen("127.0.0.2") as listener:
        theirs: wire.Channel[ToWorker] = wire.Channel(wire.connect(wire.address(listener), 60.0), ToWorker)
        ours: wire.Channel[FromWorker] = wire.Channel(listener.accept()[0], FromWorker)
    yield ours, theirs
    ours.close()
    theirs.close()


class Lateness(threading.Thread):
    """How late this machine is in the meantime: the sum of what short waits took beyond their time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.late_s = 0.0
        self._over = threading.Event()

    def __enter__(self) -> Lateness:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        ended = False
        while not ended:
            began = time.monotonic()
            ended = self._over.wait(0.02)
            self.late_s += max(0.0, time.monotonic() - began - 0.02)


class Watched:
    """A watch over one worker, and what it said when."""

    def __init__(self, channel: wire.Channel[FromWorker]) -> None:
        self.said: list[str] = []
        self.lost = threading.Event()
        member = Member(Worker(1, 0, 1, (1,), 0), "127.0.0.2", channel, Hello(b"", 1, 4711, 0, VERSION))
        self.watch = Watch([member], self._lost, SILENCE_S)

    def _lost(self, reason: str) -> None:
        self.said.append(reason)
        self.lost.set()


def test_a_silent_host_is_lost_within_its_time(ends: tuple[wire.Channel[FromWorker], wire.Channel[ToWorker]]) -> None:
    ours, theirs = ends
    watched = Watched(ours)
    with Lateness() as machine:
        began = time.monotonic()
        cut_off(theirs.socket)
        assert watched.lost.wait(60)
        took_s = time.monotonic() - began
    assert SILENCE_S / 2 <= took_s < SILENCE_S * 6 / 5 + 0.3 + machine.late_s  # the kernel's timers are not finer
    assert watched.said == ["worker 1, rank 1 of stage 0 (pid 4711 on 127.0.0.2) is gone: its node does not answer any more"]
    watched.watch.stop()


@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (Failed("Busy", "no core is free"), Busy, "no core is free"),
        (Failed("ValueError", "odd"), WorkerLost, "failed: ValueError: odd"),
        (Failed("WorkerLost", "rank 3 is gone"), WorkerLost, "is gone: its connection was closed"),
        (None, WorkerLost, "is gone: its connection was closed"),
    ],
)
def test_who_fails_has_the_last_word(said: Failed | None, kind: type[RayNeuronError], text: str, far: bool) -> None:
    """A worker says what it failed with and ends. Where its end is seen before its words are read, they are what is raised."""
    if far:
        with wire.listen("127.0.0.2") as listener:
            there = socket.create_connection(listener.getsockname()[:2])
            here, _ = listener.accept()
    else:
        here, there = socket.socketpair()
    ours: wire.Channel[FromWorker] = wire.Channel(here, FromWorker)
    watched = Watched(ours)
    theirs: wire.Channel[ToWorker] = wire.Channel(there, ToWorker)
    theirs.send(Advance(1, 2))
    if said is not None:
        theirs.send(said)
    theirs.close()
    assert watched.lost.wait(60)
    ours.shutdown()  # as a group does with every channel on the first loss
    for _ in range(2):
        why = watched.watch.why()
        assert type(why) is kind and str(why).startswith("worker 1, rank 1 of stage 0 (pid 4711 on 127.0.0.2)") and str(why).endswith(text)
    watched.watch.stop()
    ours.close()


def test_a_worker_is_named_whose_connection_ends_a_little_later(ends: tuple[wire.Channel[FromWorker], wire.Channel[ToWorker]]) -> None:
    """Shared memory sees a process gone when its first thread has ended, its connections end with the last: the name is waited for."""
    ours, theirs = ends
    told: list[str] = []
    model: Any = SimpleNamespace(config=SimpleNamespace(instance=None), capacity=None)
    group = Group(model, layout(2), on_lost=told.append)
    group.members = [Member(layout(2).workers[1], "127.0.0.2", ours, Hello(b"", 1, 4711, 0, VERSION))]
    group._watch = Watch(group.members, group._break, 60.0)

    def broken() -> None:
        threading.Timer(0.1, theirs.close).start()
        raise WorkerLost("rank 1 (pid 4711) is gone")

    with pytest.raises(WorkerLost, match=r"^worker 1, rank 1 of stage 0 \(pid 4711 on 127\.0\.0\.2\) is gone"):
        group._locally(broken)
    assert len(told) == 1 and told[0].startswith("worker 1,")
    group.close()


def test_who_waited_for_the_lost_is_not_blamed() -> None:
    """A worker has seen through shared memory that another is gone, and says so before that one's connection ends."""
    pairs = [socket.socketpair() for _ in range(2)]
    theirs: list[wire.Channel[ToWorker]] = [wire.Channel(there, ToWorker) for _, there in pairs]
    told: list[str] = []
    model: Any = SimpleNamespace(config=SimpleNamespace(instance=None), capacity=None)
    group = Group(model, layout(3), on_lost=told.append)
    group.members = [
        Member(worker, "127.0.0.2", wire.Channel(here, FromWorker), Hello(b"", worker.index, 4711, 0, VERSION))
        for worker, (here, _) in zip(layout(3).workers[1:], pairs, strict=True)
    ]
    group._watch = Watch(group.members, group._break, 60.0)
    theirs[0].send(Failed("WorkerLost", "rank 2 (pid 4711) is gone"))
    threading.Timer(0.1, theirs[1].close).start()
    with pytest.raises(WorkerLost, match=r"^worker 2, rank 2 of stage 0 \(pid 4711 on 127\.0\.0\.2\) is gone"):
        group._all(Ready, "has not come", 60.0)
    assert len(told) == 1 and told[0].startswith("worker 2,")
    group.close()
    theirs[0].close()


ENDS = """
import sys
from rayneuron.errors import WorkerLost
from rayneuron.group import worker
def fail(channel, rank):
    raise {kind}("rank 2 is gone")
worker._serve = fail
worker.serve_rank(worker.Invitation(1, b"token", (sys.argv[1],), 60.0))
"""


@pytest.mark.parametrize(("kind", "code"), [("WorkerLost", LOST), ("ValueError", 1)])
def test_who_fails_hangs_up_at_once_and_who_waited_behind_worker_0(kind: str, code: int) -> None:
    """The kernel tells worker 0 of hang-ups in their order, so the first has to be that of who was lost."""
    with wire.listen("127.0.0.2") as listener:
        process = subprocess.Popen([sys.executable, "-c", ENDS.format(kind=kind), wire.address(listener)], stderr=subprocess.DEVNULL)
        ours: wire.Channel[FromWorker] = wire.Channel(listener.accept()[0], FromWorker)
    assert isinstance(ours.receive(60.0), Hello) and ours.receive(60.0) == Failed(kind, "rank 2 is gone")
    if kind == "ValueError":
        with pytest.raises(wire.Closed):
            ours.receive(60.0)
    ours.close()
    assert process.wait(60) == code


def test_a_busy_process_is_not_lost(ends: tuple[wire.Channel[FromWorker], wire.Channel[ToWorker]]) -> None:
    """It reads nothing for several times as long; its kernel acknowledges, and the beats are there when it reads again."""
    ours, theirs = ends
    watched = Watched(ours)
    assert not watched.lost.wait(4 * SILENCE_S)
    assert [type(theirs.receive(60.0)) for _ in range(6)] == [Beat] * 6
    watched.watch.stop()


def test_beats_never_cut_into_a_message(ends: tuple[wire.Channel[FromWorker], wire.Channel[ToWorker]]) -> None:
    """A long message that the other side reads slowly, with a beat tried after every piece of it."""
    ours, theirs = ends
    far: wire.Channel[FromWorker] = wire.Channel(theirs.socket, FromWorker | Beat, 2**26)
    long = Failed("long", "x" * (2**25))
    sender = threading.Thread(target=lambda: ours.send(long))
    sender.start()
    beat = wire.frame(Beat())
    got = None
    while got is None:
        ours.beat(beat)
        got = far.receive_now()
        got = None if isinstance(got, Beat) else got
    sender.join()
    assert got == long
    ours.beat(beat)
    while isinstance(got := far.receive(60.0), Beat):
        if not far.frames:
            break
    assert isinstance(got, Beat)


def test_a_worker_notices_a_silent_leader(ends: tuple[wire.Channel[FromWorker], wire.Channel[ToWorker]]) -> None:
    """The other direction: nothing is sent, so probes of the idle connection have to do it."""
    ours, theirs = ends
    wire.keep_alive(theirs.socket, SILENCE_S)
    cut_off(ours.socket)
    with Lateness() as machine:
        began = time.monotonic()
        with pytest.raises(wire.Closed, match="timed out"):
            theirs.receive(60.0)
        took_s = time.monotonic() - began
    assert took_s < 2 * 1.0 + SILENCE_S + 0.5 + machine.late_s


def test_a_link_waits_for_a_stage_that_computes() -> None:
    """A full socket whose reader is away for longer than the silence of a control connection is no fault between stages."""
    from rayneuron.group import links

    with wire.listen("127.0.0.2") as listener:
        near = socket.create_connection(listener.getsockname()[:2])
        far, _ = listener.accept()
    for connection in (near, far):
        wire.keep_alive(connection, 0.5)
        links.patient(connection)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    near.setblocking(False)
    sent = 0
    try:
        while True:
            sent += near.send(b"x" * 65536)
    except BlockingIOError:
        pass
    assert not threading.Event().wait(2.0)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    while sent:
        sent -= len(far.recv(2**20))
    near.close()
    far.close()
