"""Where the workers of a group come together: listeners, the token, and who is still missing."""

from __future__ import annotations

import resource
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rayneuron import wire
from rayneuron.errors import ConfigError, WorkerLost
from rayneuron.group.messages import VERSION, FromWorker, Hello
from rayneuron.placement.layout import Worker

_SHOW_TOKEN_S = 10.0  # how long a connection may stay without having said who it is
_LOOK_S = 0.25


@dataclass(slots=True)
class Member:
    """Another worker of the group, as worker 0 sees it."""

    worker: Worker
    node_ip: str
    channel: wire.Channel[FromWorker]
    hello: Hello

    @property
    def name(self) -> str:
        """Who it is, for people."""
        return f"{label(self.worker)} (pid {self.hello.pid} on {self.node_ip})"


def label(worker: Worker) -> str:
    """A worker by its place."""
    ranks = f"rank {worker.ranks[0]}" if len(worker.ranks) == 1 else f"ranks {worker.ranks[0]}-{worker.ranks[-1]}"
    return f"worker {worker.index}, {ranks} of stage {worker.stage}"


class Rendezvous:
    """Listeners on this host's unix socket and, where there are further nodes, on this node's internal address. `refused` counts others."""

    def __init__(self, node_ips: Sequence[str]) -> None:
        self.token = secrets.token_bytes(32)
        self.refused = 0
        self.unix = wire.listen()
        self.tcp = wire.listen(node_ips[0]) if len(node_ips) > 1 else None
        self._pending: dict[int, tuple[wire.Channel[FromWorker], float]] = {}

    def addresses(self, node: int) -> tuple[str, ...]:
        """Where a worker of that node of the layout connects."""
        return (wire.address(self.tcp),) if node and self.tcp is not None else (wire.address(self.unix),)

    def gather(
        self, workers: Sequence[Worker], node_ips: Sequence[str], timeout_s: float, gone: Callable[[], Mapping[int, str]]
    ) -> list[Member]:
        """Wait until all of `workers` have shown the token. Raises WorkerLost naming those that are missing, and how one has ended.

        A connection that says something else, or nothing, is closed and keeps nobody waiting.
        """
        wanted = {worker.index: worker for worker in workers}
        come: dict[int, Member] = {}
        until = time.monotonic() + timeout_s
        while len(come) < len(wanted):
            for worker in self._come(wanted, node_ips):
                if worker.worker.index in come:
                    self._refuse(worker.channel)
                else:
                    come[worker.worker.index] = worker
            missing = [label(w) + f" on {node_ips[w.node]}" for i, w in wanted.items() if i not in come]
            dead = {index: how for index, how in gone().items() if index in wanted}
            if dead:
                raise WorkerLost("; ".join(f"{label(wanted[i])} has not come: {how}" for i, how in dead.items()))
            if missing and time.monotonic() > until:
                raise WorkerLost(f"{'; '.join(missing)}: not come within {timeout_s:g} s, of {len(wanted)} workers")
        return [come[index] for index in sorted(come)]

    def close(self) -> None:
        """Take nobody any more."""
        for listener in (self.unix, self.tcp):
            if listener is not None:
                listener.close()
        for channel, _ in self._pending.values():
            channel.close()
        self._pending.clear()

    def _come(self, wanted: Mapping[int, Worker], node_ips: Sequence[str]) -> list[Member]:
        """Those who have shown the token since the last look; waits a moment for somebody to stir."""
        poll = select.poll()
        listeners = {listener.fileno(): listener for listener in (self.unix, self.tcp) if listener is not None}
        for fd in (*listeners, *self._pending):
            poll.register(fd, select.POLLIN)
        members = []
        for fd, _ in poll.poll(_LOOK_S * 1000):
            if fd in listeners:
                self._accept(listeners[fd])
                continue
            member = self._heard(fd, wanted, node_ips)
            if member is not None:
                members.append(member)
        now = time.monotonic()
        for fd, (channel, since) in tuple(self._pending.items()):
            if now - since > _SHOW_TOKEN_S:
                del self._pending[fd]
                self._refuse(channel)
        return members

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        channel: wire.Channel[FromWorker] = wire.Channel(connection, FromWorker, wire.FIRST_BYTES)
        self._pending[channel.fileno()] = (channel, time.monotonic())

    def _heard(self, fd: int, wanted: Mapping[int, Worker], node_ips: Sequence[str]) -> Member | None:
        channel, _ = self._pending[fd]
        try:
            hello = channel.receive_now()
            if hello is None:
                return None
            good = isinstance(hello, Hello) and wire.same_token(hello.token, self.token)
        except wire.WireError:
            good = False
        del self._pending[fd]
        if not good or not isinstance(hello, Hello) or hello.index not in wanted or hello.version != VERSION:
            self._refuse(channel)
            return None
        worker = wanted[hello.index]
        return Member(worker, node_ips[worker.node], channel, hello)

    def _refuse(self, channel: wire.Channel[FromWorker]) -> None:
        self.refused += 1
        channel.close()


def allow_files(needed: int) -> None:
    """Raise the limit of open files of this process to `needed`. Raises ConfigError with the number where the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"this process may open {hard} files, the group needs {needed}; "
            f"write `ulimit -n {needed}` (or LimitNOFILE={needed}) before Ray starts"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
