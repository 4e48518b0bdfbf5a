"""KV by NIXL: another worker's memory, read by its descriptors over whatever UCX finds (RDMA, shared memory, TCP), on this host or another.

It comes into memory of our own, whence it is hashed and copied in one pass. As with memory that is mapped, nothing here notices when what
is read belongs to somebody else by now: the sums say that the bytes are those the other side meant, and COMMIT, that they still were.
Who has the descriptors may read all of that memory as long as he lives: this is for pools that trust each other.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayneuron import wire
from rayneuron.devices.base import KvMemory, KvRuns
from rayneuron.errors import ConfigError
from rayneuron.transfer.base import Damaged, Halted, Lost, Pull
from rayneuron.transfer.dialogue import CONNECT_S, Dialogue
from rayneuron.transfer.messages import AgentHere, Knock
from rayneuron.transfer.pieces import KvPiece, carry, check_places, layers_at_once

LOOK_S = 2e-4  # between two looks at a read, with each of which it goes on


def api() -> Any:
    """What NIXL offers. Raises ConfigError where it is not installed."""
    try:
        from nixl import _api

        return _api
    except ImportError as problem:
        said = f"pools.transport is nixl, and it is not here ({problem}); write pip install 'rayneuron[nixl]', or transport: auto"
        raise ConfigError(said, param="pools.transport") from None


def _agent(alone: bool) -> Any:
    """`alone`: with a thread of its own that answers others, at the cost of a quarter of a core; else it works when it is asked."""
    return api().nixl_agent(secrets.token_hex(8), api().nixl_agent_config(enable_prog_thread=alone, backends=["UCX"]))


class NixlMemory:
    """Memory that others may read. `here`: what they need for that. Raises ConfigError."""

    def __init__(self, memory: KvMemory, epoch: int) -> None:
        self._agent = _agent(alone=True)
        self._places = self._agent.register_memory([(units.ctypes.data, units.nbytes, 0, "") for units in memory.units], "DRAM")
        layers = tuple(units.ctypes.data for units in memory.units)
        self.here = AgentHere(epoch, self._agent.get_agent_metadata(), layers, tuple(memory.units[0].shape))

    def close(self) -> None:
        """Nobody reads it any more."""
        self._agent.deregister_memory(self._places)
        self._agent = None  # its thread ends with it


class Nixl:
    """The memory of one worker of a prefill pool. What has gone wrong once is closed; the next pull begins anew."""

    def __init__(self, addresses: Sequence[str], token: bytes, epoch: int, stall_s: float) -> None:
        self._addresses, self._token, self._epoch, self._stall_s = tuple(addresses), token, epoch, stall_s
        self._talk = Dialogue(addresses, token, stall_s)
        self._reader: _Reader | None = None

    def pull(self, want: Pull, into: KvMemory, stop: threading.Event) -> int:
        """As `Transport`."""
        try:
            return self._pull(want, into, stop)
        except BaseException:
            self._forget()
            raise

    def _pull(self, want: Pull, into: KvMemory, stop: threading.Event) -> int:
        talk, read, unit, n, size = self._talk, want.read, into.units[0].shape[-1], want.end - want.first, 0
        with talk.begun(want, sums_only=True):
            places = talk.places(want, stop)
            reader = self._reader = self._reader or _Reader(self._introduced())
            check_places(places, reader.shape, unit)
            ours, how, carried = into.units[read.here : read.here + read.count], into.carry or carry, {}
            shapes = {run: (min(layers_at_once(n * run.count * unit), read.count), n, run.count, unit) for run in read.runs}
            place = reader.landing(max(prod(shape) for shape in shapes.values()))
            for run, shape in shapes.items():
                layers = place[: prod(shape)].reshape(shape)
                landed = KvRuns([layers[i % len(layers)] for i in range(read.count)], range(n), 0, run.count)
                carried[run.there] = how(landed, KvRuns(ours, want.blocks, run.here, run.count))
            for piece in talk.summed(want, unit):
                reader.read(piece, places, stop, self._stall_s)
                found = carried[piece.head](*piece.within(want.first, want.end, read.there))
                talk.agree(want, piece, found, stop)
                size += len(found) * piece.heads * unit
        return size

    def _introduced(self) -> AgentHere:
        problems = []
        for address in self._addresses:
            try:
                with wire.connect(address, CONNECT_S) as connection:
                    channel: wire.Channel[AgentHere] = wire.Channel(connection, AgentHere, wire.MOST_BYTES, sealed=True)
                    channel.send(Knock(self._token, way="nixl"), CONNECT_S)
                    here = channel.receive(self._stall_s)
            except (OSError, wire.WireError) as problem:
                problems.append(f"{address}: {problem}")
                continue
            if here.epoch != self._epoch:
                raise Lost("the memory is not what was promised")
            return here
        raise Lost("; ".join(problems) or "it has no address")

    def _forget(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def close(self) -> None:
        """As `Transport`."""
        self._talk.close()
        self._forget()


class _Reader:
    """An agent of our own that knows another one, and where what it reads lands."""

    def __init__(self, there: AgentHere) -> None:
        self._layers, self.shape = np.array(there.layers, np.uint64), there.shape
        self._landing = np.empty(0, np.uint8)
        self._agent: Any = _agent(alone=False)
        self._registered: Any = None
        with _lost():
            self._name = self._agent.add_remote_agent(there.agent)

    def landing(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, for what is read next."""
        if size > self._landing.nbytes:
            with _lost():
                if self._registered is not None:
                    self._agent.deregister_memory(self._registered)
                self._landing = np.empty(size, np.uint8)
                self._registered = self._agent.register_memory([(self._landing.ctypes.data, size, 0, "")], "DRAM")
        return self._landing[:size]

    def read(self, piece: KvPiece, places: NDArray[Any], stop: threading.Event, stall_s: float) -> None:
        """The blocks of some layers, one behind another. Raises Lost, Halted."""
        _, heads, unit = self.shape
        if piece.layer + piece.layers > len(self._layers) or piece.head + piece.heads > heads:
            raise Damaged("layers or heads outside the memory")
        size, layers = piece.heads * unit, self._layers[piece.layer : piece.layer + piece.layers, None]
        far = (layers + ((places * heads + piece.head) * unit).astype(np.uint64)).ravel()
        near = np.uint64(self._landing.ctypes.data) + np.arange(len(far), dtype=np.uint64) * np.uint64(size)
        with _lost():
            handle = self._agent.initialize_xfer("READ", self._listed(near, size), self._listed(far, size), self._name)
            state = self._agent.transfer(handle)
        until = time.monotonic() + stall_s
        while state == "PROC":
            if stop.wait(LOOK_S):
                raise Halted("nobody wants it any more")
            if time.monotonic() > until:
                raise Lost(f"nothing came within {stall_s:g} s")
            with _lost():
                state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise Lost("the other side cannot be read")
        with _lost():
            self._agent.release_xfer_handle(handle)

    def _listed(self, at: NDArray[np.uint64], size: int) -> Any:
        return self._agent.get_xfer_descs(np.stack([at, np.full_like(at, size), np.zeros_like(at)], 1), "DRAM")

    def close(self) -> None:
        """End what is under way: the agent ends with it, before the memory where it writes."""
        self._agent = None


@contextmanager
def _lost() -> Iterator[None]:
    """NIXL has no exception that all of its own are."""
    try:
        yield
    except Exception as problem:
        raise Lost(f"NIXL: {problem}") from None
