"""A thread that notices the end of any worker of the group at once, and says so once."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from rayneuron import wire
from rayneuron.errors import Busy, CheckpointError, CompileError, ConfigError, DeviceError, RayNeuronError, WorkerLost
from rayneuron.group.messages import Beat, Failed
from rayneuron.group.rendezvous import Member

BEATS = 5  # in the time after which a silent host is lost
_BLAME_S = 0.5  # for the cause of a broken wait to show
# Said by a worker, raised as they are.
KINDS = {kind.__name__: kind for kind in (Busy, CheckpointError, CompileError, ConfigError, DeviceError)}


def error_of(member: Member, said: Failed) -> RayNeuronError:
    """What a worker failed with, as the error to raise here: of its kind where that is one of ours that means something beyond a loss."""
    text = said.error if said.kind in KINDS else f"failed: {said.kind}: {said.error}"
    return KINDS.get(said.kind, WorkerLost)(f"{member.name}: {text}")


class Watch:
    """Waits for hang-ups of the workers' connections, which the kernel closes with their processes. `on_loss`: called once.

    A host that is cut off closes nothing. Its kernel is therefore made to acknowledge something all the time: nothing acknowledged for
    `silence_s`, and the connection breaks, `silence_s * (1 + 1 / BEATS)` after the last packet at the latest.
    """

    def __init__(self, members: Sequence[Member], on_loss: Callable[[str], None], silence_s: float) -> None:
        self.lost: str | None = None
        self._gone: Sequence[Member] = ()
        self._words: tuple[Member, Failed] | None = None
        self._on_loss = on_loss
        self._once = threading.Lock()
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        self._members = {member.channel.fileno(): member for member in members}
        self._far = [member.channel for member in members if member.channel.far]
        self._beat_s = silence_s / BEATS
        for channel in self._far:
            wire.keep_alive(channel.socket, silence_s)
        self._thread = threading.Thread(target=self._run, name="rayneuron-group", daemon=True)
        self._thread.start()

    def lose(self, reason: str, gone: Sequence[Member] = ()) -> None:
        """Note a loss, and whose connection it was seen by; only the first counts."""
        with self._once:
            if self.lost is not None or self._stopping:
                return
            self._gone, self.lost = gone, reason
        self._on_loss(reason)

    def why(self) -> RayNeuronError:
        """What to raise after a loss: the last words of who was lost, else how it was noticed. For the thread that reads the channels.

        A worker that fails says what with and ends, and its end may be seen before its words are read.
        """
        for member in self._gone if self._words is None else ():
            try:
                while (said := member.channel.receive_now()) is not None:
                    if isinstance(said, Failed) and said.kind != WorkerLost.__name__:
                        self._words = member, said
            except wire.WireError:
                continue
        return error_of(*self._words) if self._words is not None else WorkerLost(self.lost or "")

    def blame(self) -> None:
        """A wait broke before its cause was seen: take the words of a worker that could still say it, or see whose connection ends. For the
        thread that reads the channels.

        A process is seen to be gone when its first thread has ended; its connections end with the last.
        """
        until = time.monotonic() + _BLAME_S
        while self.lost is None and time.monotonic() < until:
            for member in self._members.values():
                try:
                    answer = member.channel.receive_now()
                except wire.WireError as problem:
                    return self.lose(f"{member.name} is gone ({problem})", [member])
                if isinstance(answer, Failed) and answer.kind != WorkerLost.__name__:
                    return self.lose(error_of(member, answer).message)
            time.sleep(0.01)

    def stop(self) -> None:
        """From now on hang-ups are wanted."""
        with self._once:
            if self._stopping:
                return
            self._stopping = True
        os.write(self._wake_write, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        os.close(self._wake_write)
        os.close(self._wake_read)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for fd in self._members:
            wire.hang_up(poll, fd)
        beat, timeout_ms = wire.frame(Beat()), self._beat_s * 1000 if self._far else None
        while not (stirred := poll.poll(timeout_ms)):
            for channel in self._far:
                channel.beat(beat)
        gone = [self._members[fd] for fd, _ in stirred if fd in self._members]
        if gone:
            self.lose("; ".join(f"{member.name} is gone: {wire.broke(member.channel.socket)}" for member in gone), gone)
