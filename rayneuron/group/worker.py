"""The loop of every worker but the first: come, take a place, connect, load, warm, then step after step until told to stop.

One function, `serve_rank`, for both ways a worker starts: as a child process (`python -m rayneuron.group.worker`, the invitation on
standard input) and inside a Ray actor. The process ends with the group: a second thread ends it when worker 0 is gone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from rayneuron import wire
from rayneuron.errors import RayNeuronError, WorkerLost
from rayneuron.group import messages
from rayneuron.group.adopting import adopt
from rayneuron.group.messages import (
    Adopt,
    Advance,
    Beat,
    Begin,
    Disown,
    Failed,
    HandOver,
    Hello,
    LoadWeights,
    Place,
    Prepare,
    Ready,
    Reweigh,
    Step,
    Stop,
    Turn,
    Warm,
)
from rayneuron.group.rank import Rank
from rayneuron.group.rendezvous import allow_files
from rayneuron.group.swapping import reweigh, turn
from rayneuron.models import Progress
from rayneuron.processes import process_started

if TYPE_CHECKING:
    from rayneuron.group.board import BoardReader

log = logging.getLogger(__name__)

LOST = 70  # exit code of a worker whose group has ended without saying so
_SEND_S = 30.0
_BEHIND_S = 2.0  # at most: worker 0 ends the connections of a group that is lost at once
_PROGRESS_S = 0.5  # no more often; also what keeps worker 0 patient


class Invitation(msgspec.Struct, frozen=True):
    """What a worker needs to find its group. `addresses`: worker 0's listeners, the nearest first; `files`: how many it will open."""

    index: int
    token: bytes
    addresses: tuple[str, ...]
    timeout_s: float
    leader: tuple[int, int] | None = None  # pid and start of worker 0, where it is on this host
    limit_bytes: int = wire.MOST_BYTES
    files: int = 1024


def serve_rank(invitation: Invitation) -> None:
    """Serve one rank to the end of its group. Returns after Stop; on any failure it tells worker 0, and the process ends."""
    allow_files(invitation.files)
    channel = _join(invitation)
    rank = Rank()
    threading.Thread(target=_watch, args=(channel, invitation, rank), name="rayneuron-watch", daemon=True).start()
    try:
        _serve(channel, rank)
    except wire.Closed:
        log.error("worker %d: worker 0 is gone", invitation.index)
        os._exit(LOST)
    except BaseException as error:
        log.exception("worker %d has failed", invitation.index)
        _tell(channel, Failed(type(error).__name__, str(error)))
        rank.abort()
        if isinstance(error, WorkerLost):  # who hangs up first is blamed: that shall be who was lost, not who waited for it
            time.sleep(_BEHIND_S)
        os._exit(1)
    rank.close()
    channel.close()


def _join(invitation: Invitation) -> wire.Channel[messages.ToWorker]:
    problems = []
    for address in invitation.addresses:
        try:
            connection = wire.connect(address, invitation.timeout_s)
        except TimeoutError as problem:
            problems.append(str(problem))
            continue
        channel: wire.Channel[messages.ToWorker] = wire.Channel(connection, messages.ToWorker, invitation.limit_bytes)
        pid = os.getpid()
        channel.send(Hello(invitation.token, invitation.index, pid, process_started(pid) or 0))
        return channel
    raise WorkerLost(f"worker {invitation.index} cannot reach worker 0: {'; '.join(problems)}")


def _serve(channel: wire.Channel[messages.ToWorker], rank: Rank) -> None:
    board: BoardReader | None = None
    while True:
        message = channel.receive() if board is None else board.receive()
        match message:
            case Step():
                _step(channel, board, rank, message)
            case Place():
                channel.send(rank.place(message))
            case Begin():
                rank.begin(message, _nothing)
                board = _reader(message)
                channel.send(Ready())
            case LoadWeights():
                rank.load(_reporter(channel))
                channel.send(Ready())
            case Prepare():
                rank.prepare(_reporter(channel))
                channel.send(Ready())
            case Warm():
                rank.warm(_reporter(channel))
                channel.send(Ready())
            case Adopt():
                channel.send(adopt(rank.shelf, message))
            case Disown():
                if rank.shelf is not None:
                    rank.shelf.drop(message.identity)
            case Reweigh():
                channel.send(reweigh(rank.runner, message, _reporter(channel)))
            case Turn():
                turn(rank.runner, message)
            case HandOver():
                rank.exchange(message)
                channel.send(Ready())
            case Beat():
                pass
            case Stop():
                return


def _reader(begin: Begin) -> BoardReader | None:
    from rayneuron.group.board import BoardReader  # torch too

    return BoardReader(begin.spot) if begin.spot is not None else None


def _step(channel: wire.Channel[messages.ToWorker], board: BoardReader | None, rank: Rank, step: Step) -> None:
    from rayneuron.group import arrays  # torch: only once the environment is as Begin said

    outputs = rank.run(step.copies, [rank.batches.read(place, part) for place, part in enumerate(step.parts)], step.installs)
    sent = () if not rank.reports else [arrays.output(out) for out in outputs]
    if rank.reports or board is None:
        channel.send(messages.Done(step.number, sent, rank.busy_s if board is None else 0.0), _SEND_S)
    if board is not None:
        board.answer(step.number, rank.busy_s)


def _reporter(channel: wire.Channel[messages.ToWorker]) -> Progress:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_S:
            last = time.monotonic()
            channel.send(Advance(done, total))

    return report


def _watch(channel: wire.Channel[messages.ToWorker], invitation: Invitation, rank: Rank) -> None:
    """End this process when worker 0 is gone, whatever the other thread is doing: computing, loading, or waiting for a dead rank."""
    poll = select.poll()
    wire.hang_up(poll, channel.fileno())
    if invitation.leader is not None and process_started(invitation.leader[0]) == invitation.leader[1]:
        poll.register(os.pidfd_open(invitation.leader[0]), select.POLLIN)  # its socket may live on in a process it has forked
    poll.poll()
    if channel.fileno() >= 0:  # else it was closed here, after Stop
        try:
            rank.abort()  # compilers would go on without us
        finally:
            os._exit(LOST)


def _tell(channel: wire.Channel[messages.ToWorker], message: Failed) -> None:
    try:
        channel.send(message, 1.0)
    except (wire.WireError, TimeoutError):
        pass  # nobody is there any more


def _nothing() -> None:
    return None


def main() -> None:
    """A child process: the invitation is on standard input, since arguments and environments can be read by others."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; worker 0 says when to end
    invitation = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Invitation)
    try:
        serve_rank(invitation)
    except RayNeuronError as error:
        log.error("worker %d: %s", invitation.index, error)
        os._exit(1)
    os._exit(0)  # nothing is left to give back, and taking an interpreter with torch apart takes a second


if __name__ == "__main__":
    main()
