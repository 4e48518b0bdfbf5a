"""One rank of a group, from its place to its steps: the same in worker 0 and in every other worker.

`place` takes what others ask about (cores, shared memory, listeners), `begin` connects, `load`, `warm` and `run` work, `abort` breaks
every wait.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayneuron import devices, settings, sources, wire
from rayneuron.config import Deployment, parse
from rayneuron.devices.base import Ended, Meets, Pending, StepOutput
from rayneuron.devices.neuron import releases
from rayneuron.errors import CheckpointError, ConfigError
from rayneuron.group.messages import Begin, HandOver, Place, Placed
from rayneuron.placement import cores, instances, outside, ports
from rayneuron.placement.ledger import Grant, Ledger

if TYPE_CHECKING:
    from rayneuron.devices.base import Batch, Shape
    from rayneuron.engine.runner import Runner
    from rayneuron.engine.shelf import Keeps
    from rayneuron.group.arrays import Batches
    from rayneuron.group.links import Incoming, Outgoing
    from rayneuron.models import Progress
    from rayneuron.models.collectives import Collectives

log = logging.getLogger(__name__)

_REACH_S = 10.0  # a packet that a firewall drops is sent again for minutes

Check = Callable[[], None]  # raises when the group is lost
Copies = Sequence[tuple[int, int]]  # as in messages.Step
Installs = Sequence[tuple[int, str]]


class Rank:
    """What one process holds for the group; `close` gives it back, however far it came. Methods belong to one thread, `abort` to any."""

    def __init__(self) -> None:
        self._held = ExitStack()  # what was taken, to be given back in the opposite order
        self._aborts: list[Callable[[], None]] = []
        self.grant: Grant | None = None
        self.runner: Runner | None = None
        self.busy_s = 0.0  # of the last step: without the time it waited for the stage before
        self._listener: socket.socket | None = None
        self._probes: list[socket.socket] = []
        self._store: Any = None
        self._segment: Any = None
        self._comm: Any = None
        self._before: Incoming | None = None
        self._after: Outgoing | None = None
        self.batches: Batches
        self._place: Place
        self._begin: Begin
        self._config: Deployment

    @property
    def shelf(self) -> Keeps | None:
        """Its adapters on the host."""
        return self.runner.shelf if self.runner is not None else None

    @property
    def reports(self) -> bool:
        """Whether worker 0 needs this rank's outputs: rank 0 of the last of several stages."""
        return self._begin.stages > 1 and self._begin.stage == self._begin.stages - 1 and self._begin.rank == 0

    def place(self, place: Place) -> Placed:
        """Take cores, memory and listeners. Raises ConfigError or Busy with who holds the cores."""
        self._place = place
        if place.take:
            kind = cores.this_node(place.instance, None, 1)
            left = cores.left_here(kind, settings.given(releases.VISIBLE))
            left = left if place.allowed is None else left & set(place.allowed)
            ledger = Ledger(Path(place.directory), kind)
            self.grant = self._held.enter_context(outside.take(ledger, place.take, place.deployment, left, place.wait_s))
        if place.share:
            from rayneuron.collectives.shared_memory import Segment

            self._segment = Segment.create(place.share)
            self._held.callback(self._segment.close)
        if place.listen:
            self._listener = self._held.enter_context(wire.listen(place.node_ip if place.listen == "tcp" else None, backlog=4))
        return Placed(
            cores=self.grant.cores if self.grant else (),
            segment=self._segment.address if self._segment else None,
            store=self._open_store(place) if place.gather else "",
            link=wire.address(self._listener) if self._listener else "",
            ports=self._hold_ports(place.node_ip),
        )

    def begin(self, begin: Begin, check: Check) -> None:
        """Check and export the environment, then join the stage's collectives and the neighbouring stages. Raises ConfigError."""
        self._begin, self._config = begin, parse(begin.config)
        self._export(begin.environment, self._config)
        root = begin.environment.get(releases.ROOT)
        if root is not None and begin.hosts > 1 and devices.ranks_per_process(self._config.device) > 1:
            ports.reach(root, min(_REACH_S, begin.timeout_s))
        import torch

        torch.set_num_threads(begin.threads)
        self._connect(begin, check)
        self._comm = self._collectives(begin)

    def load(self, progress: Progress) -> None:
        """Read this rank's share of the weights. Raises CheckpointError."""
        from rayneuron import models
        from rayneuron.group.arrays import Batches
        from rayneuron.group.opening import Runnable, open_rank
        from rayneuron.models.config_json import read_config
        from rayneuron.sources.drafts import draft_model

        begin, config, source = self._begin, self._config, self._begin.model
        self.batches = Batches(begin.capacity.space)
        find = lambda named: sources.resolve(named, progress, allow_pickle=config.model.allow_pickle).path  # noqa: E731
        try:
            path = find(source)
        except ConfigError as absent:
            raise CheckpointError(f"{source} is not on this node, and every node of a group needs the model: {absent.message}") from None
        raw = read_config(path)
        arch = models.check(raw, tp=config.tensor_parallel, max_model_len=begin.capacity.length, **config.model_options())
        draft = draft_model(config, path, arch, begin.capacity.length, find)
        model = Runnable(config, path, raw, arch, begin.capacity, begin.dtype, source, draft)
        stage, worker, workers = begin.stage, begin.rank, begin.ranks
        self.runner = open_rank(model, begin.threads, progress, stage=stage, worker=worker, workers=workers, comm=self._comm)
        self._held.callback(self.runner.close)
        if isinstance(device := self.runner.device, Meets):
            device.patience(config.group.load_s, begin.step_timeout_s)
            self._aborts.append(device.abort)

    def prepare(self, progress: Progress) -> None:
        """Find or compile the graphs."""
        assert self.runner is not None
        self.runner.prepare(progress)

    def warm(self, progress: Progress) -> None:
        """Make every shape ready; all ranks of the group do so together."""
        assert self.runner is not None
        while self._probes:  # until now: compiling and loading take from minutes to hours, and the runtime binds its port after them
            self._probes.pop().close()
        self.runner.warm(progress)

    def run(self, copies: Copies, parts: Sequence[tuple[Shape, Batch]], installs: Installs = ()) -> list[StepOutput]:
        """One step: copies of blocks and adapters into slots, then the micro-batches in order."""
        assert self.runner is not None
        began, before_s = time.perf_counter(), self._waited_s()
        outputs = [self._part(copies if i == 0 else (), shape, batch, installs if i == 0 else ()) for i, (shape, batch) in enumerate(parts)]
        self.busy_s = time.perf_counter() - began - (self._waited_s() - before_s)
        return outputs

    def exchange(self, said: HandOver) -> None:
        """Hand KV over, or take it, on threads of its own, as worker 0 says. Raises ConfigError."""
        from rayneuron.transfer.agent import attend
        from rayneuron.transfer.lending import Lender
        from rayneuron.transfer.pulling import Puller

        assert self.runner is not None
        memory, begin = devices.kv_memory(self.runner.device), self._begin
        puller = lender = None
        if said.lends:
            lender = Lender(memory, said.token, said.epoch, self._place.node_ip if said.ip else None, way=said.way)
            self._held.callback(lender.close)
        else:
            how: dict[str, Any] = {"way": said.way, "streams": said.streams, "stall_s": said.stall_s}
            puller = Puller(memory, said.layout, said.token, stage=begin.stage, rank=begin.rank, **how)
            self._held.callback(puller.close)
        attending = (said.address, said.token, self._place.index, said.layout, puller, lender)
        threading.Thread(target=attend, args=attending, name="rayneuron-agent", daemon=True).start()

    def _waited_s(self) -> float:
        return self._before.waited_s if self._before is not None else 0.0

    def start(self, copies: Copies, parts: Sequence[tuple[Shape, Batch]], installs: Installs = ()) -> Sequence[Pending]:
        """As `run`; where steps overlap, without waiting for the end, and no slot of an adapter changes."""
        assert self.runner is not None
        if not self.runner.overlaps:
            return [Ended(out) for out in self.run(copies, parts, installs)]
        return [self.runner.begin(copies if i == 0 else (), shape, batch) for i, (shape, batch) in enumerate(parts)]

    def _part(self, copies: Copies, shape: Shape, batch: Batch, installs: Installs) -> StepOutput:
        """One micro-batch; hidden states come from the previous stage and go to the next."""
        import torch

        from rayneuron import models

        assert self.runner is not None
        if self._before is not None:
            made = torch.empty(shape.rows, shape.tokens, self.runner.arch.hidden, dtype=models.compute_type(self._begin.dtype))
            batch.hidden = self._before.receive(made)
        out = self.runner.begin(copies, shape, batch, installs).wait()
        if self._after is None:
            return out
        assert out.hidden is not None
        self._after.send(out.hidden)
        return StepOutput()

    def abort(self) -> None:
        """Break every wait of this rank, and of the ranks it shares memory with. For any thread."""
        for abort in tuple(self._aborts):
            abort()

    def close(self) -> None:
        """Give everything back, the cores last. Harmless twice."""
        try:
            self._held.close()
        finally:
            self._aborts.clear()
            self.runner = self._comm = self._store = self._segment = self._before = self._after = None

    def _export(self, ours: Mapping[str, str], config: Deployment) -> None:
        """This node's operator may have said something too; the runtime reads all of it once."""
        if not config.instance:
            return
        cores.check_claim(ours.get(releases.VISIBLE), instances.instance(config.instance))
        if devices.ranks_per_process(config.device) > 1:  # then it is this process that drives the cores
            releases.check_bound(settings.bound_cores(), ours[releases.VISIBLE], self._place.deployment)
        values, notes = releases.agreed(ours, settings.given)
        for note in notes:
            log.info("%s: %s", self._place.deployment, note)
        settings.export(values)

    def _open_store(self, place: Place) -> str:
        """The meeting point of gloo, on this node's own address and a port that is bound before anybody hears of it."""
        import torch.distributed as dist

        bound = self._held.enter_context(wire.listen(place.node_ip))
        port, descriptor = bound.getsockname()[1], bound.dup().detach()
        limit = timedelta(seconds=place.wait_s + 120)
        store: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store = store(place.node_ip, port, place.gather, True, limit, wait_for_workers=False, master_listen_fd=descriptor)
        return f"{place.node_ip}:{port}"

    def _hold_ports(self, ip: str) -> tuple[int, int]:
        """Two ports for the runtime's own meetings; held until just before it binds them."""
        pool = ports.pool(settings.root_ports())
        risk = ports.endangered(pool)
        if risk is not None and self.grant is not None:
            log.warning("%s", risk)
        for pair in ports.pairs(pool, self.grant.cores[0] if self.grant is not None else 0):
            held = ports.hold(ip, pair)
            if held is not None:
                self._probes = [self._held.enter_context(probe) for probe in held]
                return pair
        raise ConfigError(f"all ports {pool[0]}-{pool[-1]} of {ip} are taken; write {ports.NAME}=FIRST-LAST with others")

    def _connect(self, begin: Begin, check: Check) -> None:
        from rayneuron.group import links

        place, rank, keep = self._place, begin.rank, self._held
        if begin.link:
            name = f"rank {rank} of stage {begin.stage + 1}"
            connection = keep.enter_context(links.dial(begin.link, place.token, place.index, name, begin.timeout_s))
            self._after = links.Outgoing(connection, name)
            self._aborts.append(self._after.abort)
            keep.callback(self._after.close)
        if self._listener is not None:
            name = f"rank {rank} of stage {begin.stage - 1}"
            connection = keep.enter_context(links.accept(self._listener, place.token, name, begin.timeout_s, check))
            self._before = links.Incoming(connection, name, begin.step_timeout_s)
            self._aborts.append(self._before.abort)
            keep.callback(self._before.close)
            self._listener.close()
            self._listener = None

    def _collectives(self, begin: Begin) -> Collectives:
        """Shared memory within this node, and between nodes one rank of each."""
        near = self._near(begin)
        if begin.hosts == 1:
            return near
        from rayneuron.collectives.gloo import meet
        from rayneuron.collectives.two_levels import TwoLevels

        host, limits, ip = begin.rank // near.ranks, (begin.timeout_s, begin.step_timeout_s), self._place.node_ip
        far = meet(self._store, begin.store, ip, host, begin.hosts, *limits) if near.rank == 0 else None
        return far if near.ranks == 1 and far is not None else TwoLevels(near, far, host, begin.hosts)

    def _near(self, begin: Begin) -> Collectives:
        here = begin.ranks // begin.hosts
        if here == 1 or begin.segment is None:
            from rayneuron.models.collectives import Solo

            return Solo()
        from rayneuron.collectives.shared_memory import Segment, SharedMemory

        if self._segment is None:
            self._segment = Segment.attach(begin.segment, here)
            self._held.callback(self._segment.close)
        comm = SharedMemory(self._segment, begin.rank % here, here, peers=begin.peers, timeout_s=begin.step_timeout_s)
        self._aborts.append(comm.abort)
        self._held.callback(comm.close)
        return comm
