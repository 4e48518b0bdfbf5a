"""What worker 0 and the other workers of a group say to each other (msgspec structs). Free of torch: a worker reads Begin before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rayneuron.engine.buckets import Capacity
from rayneuron.transfer.layout import KvLayout

VERSION = 13  # raised with every change of a message: workers of another version are refused at Hello


class Array(msgspec.Struct, array_like=True, frozen=True):
    """A tensor. `data` looks into the received frame, which is therefore never reused."""

    kind: str
    shape: tuple[int, ...]
    data: memoryview


class Part(msgspec.Struct, array_like=True, frozen=True):
    """One micro-batch: the graph (a Shape, which a worker knows by its bytes), and the arrays of a Batch in the order of its schema, one
    behind the other."""

    shape: msgspec.Raw
    data: memoryview


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First words of a worker. `started` in kernel ticks, so that a reused pid is not taken for it."""

    token: bytes
    index: int
    pid: int
    started: int
    version: int = VERSION


class Place(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker 0: take what others will ask you about. Zero and empty mean not you.

    `take` cores of `instance` from the ledger in `directory`, out of `allowed` (None: any); shared memory for `share` ranks of this
    node; a store for `gather` nodes; a listener for the previous stage, "unix" or "tcp".
    """

    deployment: str
    index: int
    node_ip: str
    token: bytes
    take: int = 0
    instance: str | None = None
    directory: str = ""
    wait_s: float = 0.0
    allowed: list[int] | None = None
    share: int = 0
    gather: int = 0
    listen: str = ""


class Placed(msgspec.Struct, tag=True, frozen=True):
    """A worker: here it is. `ports`: for device collectives of the stage, and for host messages, should it be the one who hosts them."""

    cores: tuple[int, ...] = ()
    segment: tuple[int, int] | None = None
    store: str = ""
    link: str = ""
    ports: tuple[int, int] = (0, 0)


class Spot(msgspec.Struct, array_like=True, frozen=True):
    """Where a worker on worker 0's host reads and answers: its place on the board at `address`, (pid, descriptor)."""

    address: tuple[int, int]
    place: int
    places: int
    slot_bytes: int


class Begin(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker 0: who you are. `config`: the deployment as plain data; `capacity`: as worker 0 computed it; `hosts`: nodes that share the
    stage; `peers`: place among the stage's workers of this node -> (pid, started), without oneself; `link`: the next stage's listener,
    empty for the last stage; `spot`: what I say from now on stands there, and there go your answers that say no more than that a step is
    done, where that is on this host."""

    config: Mapping[str, Any]
    capacity: Capacity
    dtype: str
    environment: Mapping[str, str]
    threads: int
    stage: int
    stages: int
    rank: int
    ranks: int
    hosts: int = 1
    segment: tuple[int, int] | None
    store: str
    link: str
    peers: Mapping[int, tuple[int, int]]
    timeout_s: float
    step_timeout_s: float
    model: str
    spot: Spot | None = None


class LoadWeights(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: read the weights."""


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: find or compile the graphs. Nodes may take minutes or hours for it, and the device's own meeting must not wait so long."""


class Warm(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: make every shape ready, with me."""


class HandOver(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker 0: hand KV over to another pool (`lends`) or take it from one, as I tell you at this address, beside the steps. `ip`: of my
    node, where other nodes read KV."""

    address: str = ""
    token: bytes
    layout: KvLayout
    lends: bool
    epoch: int
    ip: str | None
    way: str
    streams: int
    stall_s: float


class Step(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: run these micro-batches, after copying blocks (from, to) and putting adapters into slots."""

    number: int
    copies: Sequence[tuple[int, int]]
    parts: Sequence[Part]
    installs: Sequence[tuple[int, str]] = ()


class Adopt(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: read this adapter too, which is known by `identity` here."""

    path: str
    identity: str


class Disown(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: nobody needs this adapter any more."""

    identity: str


class Reweigh(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: read these weights too, which are known by `identity` here, beside those there are."""

    path: str
    identity: str


class Turn(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: go on with the weights beside, or `drop` them."""

    drop: bool = False


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Worker 0, to other hosts: nothing, but your kernel acknowledges it."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Worker 0: give everything back and end."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A worker: Begin, LoadWeights, Prepare, Warm or HandOver is done."""


class Adopted(msgspec.Struct, tag=True, frozen=True):
    """A worker: it has read the adapter, or the weights, or why it has not."""

    wrong: str = ""


class Advance(msgspec.Struct, tag=True, frozen=True):
    """A worker: `done` of `total` parts of LoadWeights, Prepare, Warm or Reweigh."""

    done: int
    total: int


class Done(msgspec.Struct, tag=True, frozen=True):
    """A worker: the step is done; rank 0 of the last stage of several says what came out, the arrays of a StepOutput a part.

    `busy_s`: how long it worked, without waiting for the stage before it.
    """

    number: int
    outputs: Sequence[Sequence[Array | None]] = ()
    busy_s: float = 0.0


class Failed(msgspec.Struct, tag=True, frozen=True):
    """A worker: an error, and the end of it. `kind` names the exception."""

    kind: str
    error: str


ToWorker = Place | Begin | LoadWeights | Prepare | Warm | HandOver | Step | Adopt | Disown | Reweigh | Turn | Stop | Beat
FromWorker = Hello | Placed | Ready | Adopted | Advance | Done | Failed
