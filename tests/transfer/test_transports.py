"""Units from one memory into another, by every way: the right ones, all of them, no others; and what is stale, damaged or foreign never."""

from __future__ import annotations

import mmap
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import zlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rayneuron import wire
from rayneuron.devices.base import KvMemory
from rayneuron.devices.cpu import carry, packing
from rayneuron.devices.cpu.library import library
from rayneuron.errors import ConfigError
from rayneuron.transfer import dialogue, lending, pieces
from rayneuron.transfer.base import Damaged, Halted, Lost, Pull, Stale
from rayneuron.transfer.layout import KvLayout, Reading, Run
from rayneuron.transfer.lending import Lender
from rayneuron.transfer.messages import Get, Knock, Welcome
from rayneuron.transfer.nixl import Nixl
from rayneuron.transfer.pulling import Errand, Halting, Puller
from rayneuron.transfer.shared import Shared
from rayneuron.transfer.sockets import STREAM_BYTES, Sockets
from tests.serve.scripted import PATIENCE_S, eventually

TOKEN, EPOCH, SESSION, TICKET = b"t" * 16, 7, b"s" * 16, b"k" * 16
STALL_S = 2.0
NEVER = threading.Event()
sealed = partial(wire.frame, sealed=True)


def memory(layers: int, blocks: int, heads: int, unit: int, seed: int | None = None, native: bool = False) -> KvMemory:
    """In pages that can be shared, full of random bytes, or of 0xEE. `native`: copied and hashed by the kernels, where they can."""
    size = blocks * heads * unit
    stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    whole, fd = packing.shared(layers * stride)
    made = [whole[i * stride : i * stride + size].view(blocks, heads, unit).numpy() for i in range(layers)]
    for layer, units in enumerate(made):
        units[:] = 0xEE if seed is None else np.random.default_rng(seed + layer).integers(0, 256, units.shape, np.uint8)
    return KvMemory(made, "rows", fd, stride, carry.by(library()) if native and unit >= carry.LEAST_BYTES else None)


@pytest.fixture
def lend():
    made: list[Lender] = []

    def start(held: KvMemory, **options) -> Lender:
        made.append(Lender(held, TOKEN, EPOCH, "127.0.0.1", **options))
        return made[-1]

    yield start
    for lender in made:
        lender.close()


def way(name: str, lender: Lender, stall_s: float = STALL_S):
    unix, tcp = lender.addresses
    if name == "shared":
        return Shared(unix, TOKEN, EPOCH, stall_s)
    if name == "nixl":
        return Nixl([tcp], TOKEN, EPOCH, stall_s)
    return Sockets([unix if name == "unix" else tcp], TOKEN, stall_s, streams=3)


def want(read: Reading, first: int, blocks: tuple[int, ...], ticket: bytes = TICKET, session: bytes = SESSION, epoch: int = EPOCH) -> Pull:
    return Pull(epoch, session, ticket, first, first + len(blocks), read, blocks)


NIXL = ("nixl",) if find_spec("nixl") is not None else ()  # the extra: pip install 'rayneuron[nixl]'
WAYS = ("shared", "unix", "tcp", *NIXL)
SUMS_ONLY = ("shared", *NIXL)  # ways that read memory, and hear only its sums
# layers there and here, heads there and here, unit, what is read
SHAPES = [
    (3, 3, 4, 4, 512, Reading(0, 0, 0, 3, (Run(0, 0, 4),))),  # all heads: blocks side by side are one stretch
    (3, 2, 4, 3, 512, Reading(0, 1, 0, 2, (Run(1, 0, 2),))),  # some heads of some layers
    (2, 4, 4, 4, 96, Reading(0, 0, 2, 2, (Run(3, 0, 1), Run(0, 2, 2)))),  # several runs, in another order
    (2, 2, 2, 1, 300 << 10, Reading(0, 0, 0, 2, (Run(1, 0, 1),))),  # a unit is more than a piece
    (2, 2, 1, 1, 4096, Reading(0, 0, 0, 2, (Run(0, 0, 1),))),
]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("native", [(False, False), (True, False), (False, True), (True, True)], ids=["neither", "there", "here", "both"])
def test_every_unit_arrives_where_it_belongs_and_no_other_is_touched(lend, name, shape, native):
    """Whoever of the two has kernels."""
    layers, mine, heads, here, unit, read = shape
    rng = random.Random(len(WAYS))
    theirs, ours = memory(layers, 9, heads, unit, seed=1, native=native[0]), memory(mine, 12, here, unit, native=native[1])
    lender = lend(theirs, way=name)
    transport = way(name, lender)
    for places, blocks in (
        ((2, 3, 4, 5, 6), (4, 5, 6, 7, 8)),
        (tuple(rng.sample(range(9), 6)), tuple(rng.sample(range(12), 6))),
        ((3,), (11,)),
    ):
        lender.lend(TICKET, SESSION, places)
        for units in ours.units:
            units[:] = 0xEE
        expected = [units.copy() for units in ours.units]
        first = 1 if len(places) > 1 else 0  # what was there before is not read
        for layer in range(read.count):
            for run in read.runs:
                for place, block in zip(places[first:], blocks[first:], strict=True):
                    expected[read.here + layer][block, run.here : run.here + run.count] = theirs.units[read.there + layer][
                        place, run.there : run.there + run.count
                    ]
        size = transport.pull(want(read, first, blocks[first:]), ours, NEVER)
        for got, wanted in zip(ours.units, expected, strict=True):
            assert (got == wanted).all()
        assert size == (len(places) - first) * read.count * sum(run.count for run in read.runs) * unit
    transport.close()


@pytest.mark.parametrize("name", WAYS)
def test_what_is_long_comes_over_several_streams(lend, name, monkeypatch):
    theirs, ours = memory(5, 40, 3, 16 << 10, seed=3), memory(5, 40, 3, 16 << 10)
    assert sum(units.nbytes for units in theirs.units) > STREAM_BYTES
    lender, began = lend(theirs, way=name), []
    monkeypatch.setattr(dialogue.Dialogue, "_open", lambda self, old=dialogue.Dialogue._open: (began.append(id(self)), old(self))[1])
    lender.lend(TICKET, SESSION, range(40))
    transport = way(name, lender)
    transport.pull(want(Reading(0, 0, 0, 5, (Run(0, 0, 3),)), 0, tuple(range(40))), ours, NEVER)
    assert all((a == b).all() for a, b in zip(theirs.units, ours.units, strict=True))
    assert len(set(began)) == (1 if name in SUMS_ONLY else 3)
    transport.close()


ONE = Reading(0, 0, 0, 2, (Run(0, 0, 2),))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("before", [(), (2,)], ids=["of the ticket", "of its last blocks"])
def test_who_reads_may_be_here_before_word_of_it(lend, name, before, monkeypatch):
    """A worker hears of tickets from its replica's first one, on another way than who reads."""
    theirs, ours = memory(2, 4, 2, 256, seed=4), memory(2, 4, 2, 256)
    lender = lend(theirs, way=name)
    if before:
        lender.lend(TICKET, SESSION, before)
    wait = lender._heard.wait_for

    def late(there, seconds):
        threading.Thread(target=lender.lend, args=(TICKET, SESSION, (2, 3))).start()  # it comes to that once this one waits
        return wait(there, seconds)

    monkeypatch.setattr(lender._heard, "wait_for", late)
    transport = way(name, lender)
    transport.pull(want(ONE, 0, (0, 1)), ours, NEVER)
    assert all((ours[:2] == theirs[2:]).all() for ours, theirs in zip(ours.units, theirs.units, strict=True))
    transport.close()


@pytest.mark.parametrize("name", WAYS)
def test_a_ticket_that_is_not_alive_gives_nothing(lend, name):
    theirs, ours = memory(2, 4, 2, 256, seed=4), memory(2, 4, 2, 256)
    lender = lend(theirs, way=name)
    lender.lend(TICKET, SESSION, (0, 1))
    transport = way(name, lender)
    for wrong in (
        want(ONE, 0, (0, 1), ticket=b"x" * 16),
        want(ONE, 0, (0, 1), session=b"x" * 16),
        want(ONE, 0, (0, 1), epoch=EPOCH + 1),
    ):
        with pytest.raises(Stale):
            transport.pull(wrong, ours, NEVER)
    assert all((units == 0xEE).all() for units in ours.units)
    transport.pull(want(ONE, 0, (0, 1)), ours, NEVER)  # the control
    eventually(lambda: not lender._lent[TICKET].readers, PATIENCE_S)  # it learns of our having read a little later than we
    gone = threading.Event()
    lender.withdraw(TICKET, gone.set)
    assert gone.is_set()
    with pytest.raises(Stale):
        transport.pull(want(ONE, 0, (0, 1)), ours, NEVER)
    transport.close()


@pytest.mark.parametrize(
    "read_or_range",
    [
        (ONE, 1, (0, 1)),  # more blocks than may be read yet
        (Reading(0, 1, 0, 2, (Run(0, 0, 2),)), 0, (0,)),
        (Reading(0, 0, 0, 2, (Run(1, 0, 2),)), 0, (0,)),
        (Reading(0, 0, 0, 2, (Run(-1, 0, 1),)), 0, (0,)),
        (Reading(0, -1, 0, 1, (Run(0, 0, 1),)), 0, (0,)),
        (Reading(0, 0, 0, 2, tuple(Run(0, 0, 1) for _ in range(3))), 0, (0,)),
    ],
)
@pytest.mark.parametrize("name", WAYS)
def test_what_is_outside_a_ticket_cannot_be_asked_for(lend, name, read_or_range):
    read, first, blocks = read_or_range
    ours = memory(2, 4, 2, 256)
    lender = lend(memory(2, 4, 2, 256, seed=4), way=name)
    lender.lend(TICKET, SESSION, (0, 1))
    transport = way(name, lender)
    with pytest.raises(Lost):
        transport.pull(want(read, first, blocks), ours, NEVER)
    assert all((units == 0xEE).all() for units in ours.units)
    transport.pull(want(ONE, 0, (0, 1)), ours, NEVER)  # the same lender, and transport, go on
    transport.close()


@pytest.mark.parametrize("name", WAYS)
def test_bytes_that_are_not_those_that_were_meant_are_found(lend, name, monkeypatch):
    """One bit differs, on the way or in what is read: of any piece."""
    theirs, ours = memory(2, 4, 2, 256, seed=5), memory(2, 4, 2, 256)
    lender = lend(theirs, way=name)
    lender.lend(TICKET, SESSION, (0, 1, 2))
    transport = way(name, lender)
    if name in SUMS_ONLY:
        other = [units.copy() for units in theirs.units]
        other[1][2, 1, 17] ^= 4
        monkeypatch.setattr(lender, "_memory", KvMemory(other, "rows", theirs.fd, theirs.stride))
    else:
        send = lending._send

        def damaged(connection, parts, flags=0):
            if pieces.struct.unpack_from("<I", parts[0], 32)[0] == 1:
                if name == "unix":  # which is given the pages themselves
                    theirs.units[1][0, 0, 100] ^= 4
                else:
                    parts = [parts[0], *(np.array(part) for part in parts[1:])]
                    parts[1][100] ^= 4
            send(connection, parts, flags)

        monkeypatch.setattr(lending, "_send", damaged)
    with pytest.raises(Damaged, match="piece 0 is not what was meant" if name in SUMS_ONLY else "piece 1 is not what was sent"):
        transport.pull(want(ONE, 0, (0, 1, 2)), ours, NEVER)
    transport.close()


def test_what_becomes_somebody_elses_while_a_socket_holds_it_is_found(lend, monkeypatch):
    """Its reader has answered and left, the ticket is withdrawn, its blocks are used anew; only then is the answer read."""
    theirs, ours = memory(2, 4, 2, 4096, seed=5), memory(2, 4, 2, 4096)
    lender, gone = lend(theirs), threading.Event()
    lender.lend(TICKET, SESSION, (0, 1, 2))
    head = dialogue.Dialogue.head

    def late(talk, wanted, piece, *rest):
        check = head(talk, wanted, piece, *rest)
        if piece.number == 0:
            eventually(lambda: not lender._lent[TICKET].readers, PATIENCE_S)
            lender.withdraw(TICKET, gone.set)
            assert gone.wait(10)
            theirs.units[1][2] ^= 4
        return check

    monkeypatch.setattr(dialogue.Dialogue, "head", late)
    transport = way("unix", lender)
    with pytest.raises(Damaged, match="piece 1 is not what was sent"):
        transport.pull(want(ONE, 0, (0, 1, 2)), ours, NEVER)
    transport.close()


@pytest.mark.parametrize("field", ["epoch", "ticket", "number", "layer", "head", "heads", "first", "blocks", "size", "magic"])
def test_a_header_of_something_else_is_refused_before_its_bytes(field):
    piece = pieces.KvPiece(3, 1, 0, 2, 4, 2)
    right = pieces.header(EPOCH, TICKET, piece, 512, 99)
    assert pieces.said(right, EPOCH, TICKET, piece, 512) == 99
    if field == "magic":
        wrong = b"x" + right[1:]
    elif field in ("epoch", "ticket", "size"):
        said = {"epoch": EPOCH, "ticket": TICKET, "size": 512} | {field: {"epoch": 8, "ticket": b"x" * 16, "size": 511}[field]}
        wrong = pieces.header(said["epoch"], said["ticket"], piece, said["size"], 99)
    else:
        from dataclasses import replace

        wrong = pieces.header(EPOCH, TICKET, replace(piece, **{field: getattr(piece, field) + 1}), 512, 99)
    with pytest.raises(Damaged):
        pieces.said(wrong, EPOCH, TICKET, piece, 512)
    with pytest.raises(Stale):
        pieces.said(pieces.stale(EPOCH, TICKET), EPOCH, TICKET, piece, 512)


def test_the_memory_can_be_mapped_to_read_and_never_to_write(lend):
    theirs = memory(1, 2, 1, 4096, seed=6)
    lender = lend(theirs)
    with wire.connect(lender.addresses[0], 1) as connection:
        connection.sendall(sealed(Knock(TOKEN, way="shared")))
        _, fds, _, _ = socket.recv_fds(connection, 4096, 1)
    assert bytes(mmap.mmap(fds[0], 4096, prot=mmap.PROT_READ)[:64]) == theirs.units[0][0, 0, :64].tobytes()
    opened = os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR)
    for fd in (fds[0], opened):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        os.close(fd)
    theirs.units[0][0, 0, 0] ^= 1  # who has it writes on


def test_memory_is_not_given_over_the_network_nor_where_it_shall_not_be(lend):
    lender = lend(memory(1, 2, 1, 4096, seed=6), way="sockets")
    with pytest.raises(Lost, match="gives no memory away"):
        Shared(lender.addresses[0], TOKEN, EPOCH, STALL_S)
    with pytest.raises(Lost, match="not on this host"):
        Shared(lender.addresses[1], TOKEN, EPOCH, STALL_S)
    with pytest.raises(Lost, match="not what was promised"):
        Shared(lend(memory(1, 2, 1, 4096, seed=6)).addresses[0], TOKEN, EPOCH + 1, STALL_S)


def test_memory_whose_number_is_another_files_by_now_is_still_that_memory(lend, tmp_path):
    """The device is closed before who lends its memory; the next file that is opened gets the number."""
    theirs, ours = memory(2, 4, 2, 256, seed=12), memory(2, 4, 2, 256)
    lender = lend(theirs)
    lender.lend(TICKET, SESSION, (0, 1))
    (tmp_path / "secret").write_bytes(bytes(1 << 20))
    os.close(theirs.fd)
    other = os.open(tmp_path / "secret", os.O_RDONLY)
    assert other == theirs.fd
    transport = way("shared", lender)
    transport.pull(want(ONE, 0, (0, 1)), ours, NEVER)
    assert all((a[:2] == b[:2]).all() for a, b in zip(theirs.units, ours.units, strict=True))
    transport.close()
    os.close(other)


def test_a_transport_of_one_who_is_gone_is_closed_though_it_was_in_use(monkeypatch):
    """What it has mapped is the dead one's whole memory."""

    class Held:
        def __init__(self) -> None:
            self.closed = 0

        def pull(self, pull, into, stop):
            if into is ours and pull.ticket == b"gone":
                puller.forget(EPOCH)  # its channel has ended meanwhile
            return 1

        def close(self) -> None:
            self.closed += 1

    ours, made, ended = memory(1, 4, 1, 256), [], []
    layout = KvLayout(
        model="m", dtype="", kv_dtype="", quantization="", block=16, unit=256, head_dim=1, kv_heads=1, layers=1, rope="", limit=64,
        shards=1, format="rows", numerics="", stages=((0, 1),), heads=((0,),),
    )  # fmt: skip
    puller = Puller(ours, layout, TOKEN)
    monkeypatch.setattr(puller, "_open", lambda *_: (made.append(Held()), made[-1])[1])
    welcome = Welcome(epoch=EPOCH, session=SESSION, layout=layout, data=((),), lease_s=1.0)
    for ticket in (b"kept", b"gone", b"again"):
        puller.begin(Errand(welcome, ticket, 0, 1, (0,)), Halting(), lambda how, why, size: ended.append(how))
        eventually(lambda ticket=ticket: len(ended) == 1 + [b"kept", b"gone", b"again"].index(ticket), PATIENCE_S)
    assert ended == ["pulled"] * 3 and [one.closed for one in made] == [1, 0]
    puller.close()
    assert [one.closed for one in made] == [1, 1]


class Slow:
    """A reader that asks for all and reads nothing, until the other side's buffers are full."""

    def __init__(self, address: str, count: int) -> None:
        self.connection = wire.connect(address, 1)
        self.connection.sendall(sealed(Knock(TOKEN)))
        self.connection.sendall(sealed(Get(EPOCH, SESSION, TICKET, 0, count, 0, 2, ((0, 2),))))
        assert self.connection.recv(1, socket.MSG_PEEK)  # the answer has begun


@pytest.mark.parametrize("at", [0, 1], ids=["unix", "tcp"])
def test_who_withdraws_waits_for_readers_and_breaks_them(lend, at):
    theirs = memory(2, 64, 2, 256 << 10, seed=7)
    lender = lend(theirs)
    lender.lend(TICKET, SESSION, range(64))
    slow = Slow(lender.addresses[at], 64)
    gone = threading.Event()
    lender.withdraw(TICKET, gone.set)
    assert gone.wait(5), "a reader that does not read holds a ticket for ever"
    theirs.units[0][:] = 0  # somebody else's now
    slow.connection.close()


@pytest.mark.parametrize("name", ["unix", "tcp"])
def test_who_is_told_to_stop_writes_nothing_more(lend, name):
    """Between two pieces of a pull the other side falls silent; whoever has stopped has left our blocks alone for good."""
    theirs, ours = memory(2, 8, 2, 200 << 10, seed=8), memory(2, 8, 2, 200 << 10)
    lender = lend(theirs)
    lender.lend(TICKET, SESSION, range(8))
    transport, stop, ended = way(name, lender, stall_s=60), threading.Event(), []
    hold, held = threading.Event(), threading.Event()
    send, count = lending._send, [0]

    def slowly(connection, parts, flags=0):
        count[0] += 1
        if count[0] == 4:
            held.set()
            assert hold.wait(30)
        send(connection, parts, flags)

    lending._send = slowly
    try:

        def pull():
            try:
                transport.pull(want(ONE, 0, tuple(range(8))), ours, stop)
            except Halted:
                ended.append("halted")

        thread = threading.Thread(target=pull)
        thread.start()
        assert held.wait(30)
        stop.set()
        thread.join(30)
        assert ended == ["halted"]
        before = [units.copy() for units in ours.units]
        hold.set()
        gone = threading.Event()
        lender.withdraw(TICKET, gone.set)
        assert gone.wait(30)
        assert all((a == b).all() for a, b in zip(before, ours.units, strict=True))
    finally:
        lending._send = send
    transport.close()


@pytest.mark.parametrize("name", ["unix", "tcp"])
def test_who_sends_nothing_is_lost_after_a_while(lend, name, monkeypatch):
    ours = memory(2, 4, 2, 256)
    lender = lend(memory(2, 4, 2, 256, seed=9))
    lender.lend(TICKET, SESSION, (0,))
    silent = threading.Event()
    monkeypatch.setattr(lending, "_send", lambda *_: silent.wait(30))
    with pytest.raises(Lost, match=r"nothing for 0\.3 s"):
        way(name, lender, stall_s=0.3).pull(want(ONE, 0, (0,)), ours, NEVER)
    silent.set()


def framed(data: bytes) -> bytes:
    """As a sealed frame, whatever it is."""
    return (len(data) + 4).to_bytes(4, "big") + data + zlib.crc32(data).to_bytes(4, "big")


BAD = {
    "token": bytes(sealed(Knock(b"x" * 16))),
    "unsealed": bytes(wire.frame(Knock(TOKEN))),
    "a wrong bit": bytes(sealed(Knock(TOKEN)))[:-1] + b"x",
    "no knock": bytes(sealed(Get(EPOCH, SESSION, TICKET, 0, 1, 0, 1, ((0, 1),)))),
    "long": (5000).to_bytes(4, "big") + b"x" * 5000,
    "longest": b"\xff" * 8,
    "garbage": framed(bytes(range(100))),
    "pickle": framed(pickle.dumps(Path("/"))),
    "two knocks": bytes(sealed(Knock(TOKEN)) * 2),
    "unknown": framed(msgspec.msgpack.encode({"type": "Steal"})),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [0, 1], ids=["unix", "tcp"])
def test_whoever_says_what_is_no_message_is_counted_and_harms_nobody(lend, bad, at):
    theirs, ours = memory(2, 4, 2, 256, seed=10), memory(2, 4, 2, 256)
    lender = lend(theirs)
    lender.lend(TICKET, SESSION, (0, 1))
    with wire.connect(lender.addresses[at], 1) as connection:
        connection.settimeout(10)
        connection.sendall(BAD[bad])
        try:
            assert connection.recv(1) == b"", "it was answered"
        except ConnectionResetError:
            pass
    assert lender.door.refused == 1
    way("unix", lender).pull(want(ONE, 0, (0, 1)), ours, NEVER)
    assert (ours.units[0][0] == theirs.units[0][0]).all()


CHILD = """
import sys, threading
from tests.transfer.test_transports import EPOCH, SESSION, TICKET, TOKEN, Lender, memory
lender = Lender(memory(3, 16, 2, 64 << 10, seed=11), TOKEN, EPOCH, "127.0.0.1", way=sys.argv[1])
lender.lend(TICKET, SESSION, range(16))
print(*lender.addresses, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module", params=[("auto", "shared"), ("auto", "unix"), ("sockets", "tcp"), *(("nixl", name) for name in NIXL)])
def other_process(request):
    root, (lent, name) = Path(__file__).parents[2], request.param
    arguments = [sys.executable, "-c", CHILD, lent]
    child = subprocess.Popen(arguments, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = child.stdout.readline()
    while not said.startswith("unix:"):  # NIXL tells there what it does
        said = child.stdout.readline()
    yield child, said.split(), name
    child.kill()
    child.wait()


def test_from_another_process_and_after_its_death(other_process):
    child, (unix, tcp), name = other_process
    theirs, ours = memory(3, 16, 2, 64 << 10, seed=11), memory(3, 16, 2, 64 << 10)
    whole = want(Reading(0, 0, 0, 3, (Run(0, 0, 2),)), 0, tuple(range(16)))
    ways = {"shared": lambda: Shared(unix, TOKEN, EPOCH, STALL_S), "nixl": lambda: Nixl([unix, tcp], TOKEN, EPOCH, STALL_S)}
    transport = ways[name]() if name in ways else Sockets([unix if name == "unix" else tcp], TOKEN, STALL_S)
    transport.pull(whole, ours, NEVER)
    assert all((a == b).all() for a, b in zip(theirs.units, ours.units, strict=True))
    child.kill()
    child.wait()
    with pytest.raises(Lost):
        transport.pull(whole, ours, NEVER)
    transport.close()


def test_who_is_to_use_nixl_and_has_it_not_is_told_what_to_install(lend, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    for start in (lambda: lend(memory(1, 2, 1, 256), way="nixl"), lambda: Puller(memory(1, 2, 1, 256), None, TOKEN, way="nixl")):
        with pytest.raises(ConfigError, match=r"rayneuron\[nixl\]") as wrong:
            start()
        assert wrong.value.param == "pools.transport"


@pytest.mark.skipif(not NIXL, reason="the extra nixl is not installed")
def test_who_has_no_agent_and_who_is_another_by_now_is_lost(lend):
    ours, read = memory(2, 4, 2, 256), want(ONE, 0, (0, 1))
    for lender, epoch in ((lend(memory(2, 4, 2, 256, seed=4)), EPOCH), (lend(memory(2, 4, 2, 256, seed=4), way="nixl"), EPOCH + 1)):
        lender.lend(TICKET, SESSION, (0, 1))
        transport = Nixl(lender.addresses, TOKEN, epoch, STALL_S)
        with pytest.raises(Lost):
            transport.pull(read, ours, NEVER)
        transport.close()
    assert all((units == 0xEE).all() for units in ours.units)
