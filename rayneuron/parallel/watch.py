"""A thread that notices the end of any worker of the group at once, and says so once."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence

from rayneuron.parallel import wire
from rayneuron.parallel.meeting import Member


class Watch:
    """Waits for hang-ups of the workers' connections, which the kernel closes with their processes. `on_loss`: called once."""

    def __init__(self, members: Sequence[Member], on_loss: Callable[[str], None]) -> None:
        self.lost: str | None = None
        self._on_loss = on_loss
        self._once = threading.Lock()
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        self._names = {member.channel.fileno(): member.name for member in members}
        self._thread = threading.Thread(target=self._run, name="rayneuron-group", daemon=True)
        self._thread.start()

    def lose(self, reason: str) -> None:
        """Note a loss seen elsewhere; only the first counts."""
        with self._once:
            if self.lost is not None or self._stopping:
                return
            self.lost = reason
        self._on_loss(reason)

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
        for fd in self._names:
            wire.hang_up(poll, fd)
        gone = [self._names[fd] for fd, _ in poll.poll() if fd in self._names]
        if gone:
            self.lose(f"{' and '.join(gone)} is gone: its connection was closed")
