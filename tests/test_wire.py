"""Framed messages: what is right arrives, what is wrong closes the connection and is counted, and nobody can make others wait."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayneuron import wire
from rayneuron.devices.base import SAMPLED, Shape
from rayneuron.engine.buckets import capacity
from rayneuron.errors import ConfigError, WorkerLost
from rayneuron.group import messages
from rayneuron.group.messages import Advance, Array, Begin, Done, Failed, FromWorker, Hello, Part, Placed, Ready, Step, ToWorker
from rayneuron.group.rendezvous import Rendezvous, allow_files
from rayneuron.placement.layout import layout
from tests.drawn import examples

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def pair(kinds: object = FromWorker, limit: int = 4096) -> Iterator[tuple[socket.socket, wire.Channel[object]]]:
    """A raw end, and a channel on the other."""
    raw, other = socket.socketpair()
    channel: wire.Channel[object] = wire.Channel(other, kinds, limit)
    try:
        yield raw, channel
    finally:
        raw.close()
        channel.close()


def test_every_message_survives_the_wire() -> None:
    shape = Shape("decode", 2, 1, 128, SAMPLED)
    array = Array("i4", (2, 1), memoryview(b"\1\0\0\0\2\0\0\0"))
    begin = Begin(
        config={"model": {"path": "/m"}}, capacity=capacity(rows=2, length=64, chunk=32), dtype="float32", environment={"A": "1"},
        threads=1, stage=0, stages=2, rank=1, ranks=2, segment=(1, 2), store="", link="tcp:10.0.0.1:5", peers={0: (7, 8)}, timeout_s=1.5,
        step_timeout_s=2.5, model="/m",
    )  # fmt: skip
    place = messages.Place(deployment="x", index=1, node_ip="::1", token=b"t", take=8, instance="inf2.48xlarge", share=2)
    sent: list[msgspec.Struct] = [
        Hello(b"t" * 32, 3, 17, 99), Placed((0, 1), (5, 6), "a:1", "unix:x", (9, 10)), Ready(), Advance(1, 2),
        Done(4, [[array, None, array]]), Failed("Busy", "no core"),
    ]  # fmt: skip
    told: list[msgspec.Struct] = [
        place,
        begin,
        messages.LoadWeights(),
        messages.Warm(),
        Step(1, [(0, 1)], [Part(msgspec.Raw(msgspec.msgpack.encode(shape)), array.data)], [(0, "a")]),
        messages.Stop(),
    ]
    for kinds, many in ((FromWorker, sent), (ToWorker, told)):
        with pair(kinds, 2**20) as (raw, channel):
            raw.sendall(b"".join(bytes(wire.frame(message)) for message in many))
            assert [channel.receive(60.0) for _ in many] == many


def test_frames_may_arrive_byte_by_byte() -> None:
    with pair() as (raw, channel):
        data = bytes(wire.frame(Failed("x", "y" * 500)))
        for i in range(len(data) - 1):
            raw.send(data[i : i + 1])
            assert channel.receive_now() is None
        raw.send(data[-1:])
        assert channel.receive_now() == Failed("x", "y" * 500)


def test_a_frame_larger_than_every_buffer_arrives() -> None:
    left, right = socket.socketpair()
    a, b = wire.Channel[Failed](left, Failed, 2**26), wire.Channel[Failed](right, Failed, 2**26)
    message = Failed("big", "z" * (12 * 2**20))
    sender = threading.Thread(target=a.send, args=(message,))
    sender.start()
    assert b.receive(60.0) == message
    sender.join(60)
    a.close()
    with pytest.raises(wire.Closed):
        b.receive(60.0)
    b.close()


WRONG = [
    (struct.pack(">I", 5000), "longer than 4096"),
    (struct.pack(">I", 0), "no message"),
    (struct.pack(">I", 2) + b"\xc1\xc1", "no message"),
    (struct.pack(">I", 1) + b"\x80", "no message"),
    (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "longer than"),
    (struct.pack(">I", len(pickle.dumps({"a": 1}))) + pickle.dumps({"a": 1}), "no message"),
    (struct.pack(">I", 60) + b"\x91" * 60, "no message"),
    (bytes(wire.frame(messages.Stop())), "no message"),  # a kind that only goes the other way
]


@pytest.mark.parametrize(("data", "says"), WRONG)
def test_what_is_no_message_is_refused(data: bytes, says: str) -> None:
    with pair() as (raw, channel):
        raw.sendall(data)
        with pytest.raises(wire.WireError, match=says):
            channel.receive(60.0)


class Bomb:
    """What an attacker would send: unpickling it runs a command."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("touch /tmp/rayneuron-was-here",))


def test_a_pickle_is_never_run() -> None:
    Path("/tmp/rayneuron-was-here").unlink(missing_ok=True)
    payload = pickle.dumps(Bomb())
    for form in (payload, struct.pack(">I", len(payload)) + payload):
        with pair(limit=2**31) as (raw, channel):
            raw.sendall(form)
            raw.close()
            with pytest.raises(wire.WireError):
                channel.receive(60.0)
    assert not Path("/tmp/rayneuron-was-here").exists()


@examples(300)
@given(st.one_of(st.binary(max_size=200), st.builds(lambda b: struct.pack(">I", len(b)) + b, st.binary(max_size=200))))
def test_any_bytes_end_in_a_message_or_an_error(data: bytes) -> None:
    with pair() as (raw, channel):
        raw.sendall(data)
        raw.close()
        with contextlib.suppress(wire.WireError):
            while True:
                assert isinstance(channel.receive(60.0), Hello | Placed | Ready | Advance | Done | Failed)


@examples(150)
@given(st.data())
def test_a_flipped_byte_is_never_another_exception(data: st.DataObject) -> None:
    good = wire.frame(Done(4, [(Array("i4", (2,), memoryview(b"12345678")), None, None)]))
    place = data.draw(st.integers(0, len(good) - 1))
    good[place] = data.draw(st.integers(0, 255))
    with pair() as (raw, channel):
        raw.sendall(good)
        raw.close()
        with contextlib.suppress(wire.WireError):
            channel.receive(60.0)


def test_who_does_not_read_is_given_up() -> None:
    left, right = socket.socketpair()
    channel = wire.Channel[Failed](left, Failed)
    with pytest.raises(TimeoutError, match=r"nothing was read for 0\.3 s"):
        channel.send(Failed("x", "y" * 2**22), 0.3)
    right.close()
    with pytest.raises(wire.Closed):
        channel.send(Failed("x", "y"))
    channel.close()


def dial(to: str) -> socket.socket:
    return wire.connect(to, 60.0)


@pytest.mark.parametrize("ips", [("127.0.0.1",), ("127.0.0.2", "127.0.0.3")])
def test_garbage_is_counted_and_keeps_nobody_waiting(ips: tuple[str, ...]) -> None:  # BR-104
    """Silent, oversize, pickled, wrongly authenticated, duplicate and unknown connections, then the true workers: they meet at once."""
    rendezvous = Rendezvous(ips)
    made = layout(3, 1, 1) if len(ips) == 1 else layout(4, 1, 2)
    address = rendezvous.addresses(len(ips) - 1)[0]
    assert address.startswith("unix:" if len(ips) == 1 else "tcp:127.0.0.2:")
    silent = dial(address)
    wrong = [
        bytes(wire.frame(Hello(b"guess" * 6, 1, 1, 1))),
        struct.pack(">I", 2**31),
        struct.pack(">I", wire.FIRST_BYTES + 1) + b"x" * 100,
        pickle.dumps(Bomb()),
        bytes(wire.frame(Hello(rendezvous.token, 99, 1, 1))),
        bytes(wire.frame(Hello(rendezvous.token, 1, 1, 1, messages.VERSION + 1))),
        bytes(wire.frame(Advance(1, 1))),
    ]
    connections = [dial(address) for _ in wrong]
    for connection, data in zip(connections, wrong, strict=True):
        connection.sendall(data)
    others = made.workers[1:]
    true = [dial(rendezvous.addresses(worker.node)[0]) for worker in others]
    for connection, worker in zip(true, others, strict=True):
        connection.sendall(wire.frame(Hello(rendezvous.token, worker.index, 10 + worker.index, 1)))
    members = rendezvous.gather(others, [*ips, *ips][: made.nodes], 30.0, dict)
    assert [m.worker for m in members] == list(others) and [m.hello.pid for m in members] == [10 + w.index for w in others]
    for connection in connections:  # each was shut, or is when the rendezvous closes
        connection.settimeout(5)
    rendezvous.close()
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            assert connection.recv(10) == b""
    assert 1 <= rendezvous.refused <= len(wrong)
    for connection in (*connections, *true, silent):
        connection.close()
    for member in members:
        member.channel.close()


def test_every_wrong_one_is_counted() -> None:
    rendezvous = Rendezvous(("127.0.0.1",))
    others = layout(2).workers[1:]
    for number in range(1, 6):
        with dial(rendezvous.addresses(0)[0]) as connection:
            connection.sendall(pickle.dumps(Bomb()))
            with pytest.raises(WorkerLost, match=r"worker 1, rank 1 of stage 0 on 127\.0\.0\.1: not come within 0\.6 s"):
                rendezvous.gather(others, ("127.0.0.1",), 0.6, dict)
            assert rendezvous.refused == number
    rendezvous.close()


def test_a_dead_process_is_named_at_once() -> None:
    rendezvous = Rendezvous(("127.0.0.1",))
    with pytest.raises(WorkerLost, match="worker 1, rank 1 of stage 0 has not come: signal 9"):
        rendezvous.gather(layout(2).workers[1:], ("127.0.0.1",), 60.0, lambda: {1: "signal 9"})
    rendezvous.close()


def test_six_groups_at_once_have_places_of_their_own() -> None:  # BR-13
    gatherings = [Rendezvous(("127.0.0.2", "127.0.0.3")) for _ in range(6)]
    places = [address for rendezvous in gatherings for node in (0, 1) for address in rendezvous.addresses(node)]
    assert len(set(places)) == 12 and len({rendezvous.token for rendezvous in gatherings}) == 6
    for rendezvous in gatherings:
        rendezvous.close()


def test_listeners_never_face_the_world() -> None:
    with wire.listen("127.0.0.2") as listener:
        assert listener.getsockname()[0] == "127.0.0.2" and listener.getsockname()[1] > 0
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is no address of this host"):
        wire.listen("192.0.2.1")
    with pytest.raises(TimeoutError, match="does not answer"):
        wire.connect("unix:nobody", 0.1)
    with pytest.raises(TimeoutError, match=r"tcp:127\.0\.0\.2:1 does not answer"):
        wire.connect("tcp:127.0.0.2:1", 0.1)


def test_files_limit_is_raised_or_refused_with_the_number() -> None:  # BR-16
    script = """
import resource
from rayneuron.group.rendezvous import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000))
allow_files(500)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
try:
    allow_files(2000)
except Exception as error:
    print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    first, second = ran.stdout.splitlines()
    assert first == "(500, 1000)"
    assert second.startswith("ConfigError") and "ulimit -n 2000" in second
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_files(16)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
