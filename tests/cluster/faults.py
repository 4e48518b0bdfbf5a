"""What fault tests need: a client that notes when each line came, stages held open by a pipe, and a count of what Ray ever started."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.conftest import Cluster
from tests.serve.scripted import eventually, sse


class Client(threading.Thread):
    """One stream, read to its end. Times are of the monotonic clock, which all processes of a machine share."""

    def __init__(self, cluster: Cluster, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.url, self.body = f"{cluster.url}/v1/completions", body
        self.lines: list[str] = []
        self.times: list[float] = []
        self.broken = ""
        self.status = 0
        self.ended_s = 0.0
        self.begun, self.ended = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=120) as reply:
                self.status = reply.status_code
                for line in reply.iter_lines():
                    self.lines.append(line)
                    self.times.append(time.monotonic())
                    if len(sse(self.lines)) >= 3:
                        self.begun.set()
        except httpx.HTTPError as error:
            self.broken = f"{type(error).__name__}: {error}"
        self.ended_s = time.monotonic()
        self.ended.set()

    @property
    def error_s(self) -> float | None:
        """When the error event came."""
        return next((at for line, at in zip(self.lines, self.times, strict=False) if line.startswith("data: ") and '"error"' in line), None)

    def last(self, killed_s: float) -> float:
        """Seconds from the kill to the word that the stream has failed; waits for it."""
        self.join(60)
        assert not self.is_alive(), "the stream never ended"
        assert self.error_s is not None, (self.broken, self.lines[-4:])
        return self.error_s - killed_s


@contextmanager
def held(path: Path) -> Iterator[Hold]:
    """A pipe instead of the file at `path`: whoever opens it to read is held there until the end of the block."""
    pipe = path.with_name(path.name + ".pipe")
    os.mkfifo(pipe)
    os.replace(pipe, path)
    hold = Hold(path)
    try:
        yield hold
    finally:
        hold.release()


class Hold:
    """Processes that are held in the middle of reading a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer = -1

    def wait(self, pids: list[int], timeout_s: float = 120.0) -> None:
        """Until every one of `pids` has the pipe open."""
        eventually(lambda: all(self._opened_by(pid) for pid in pids), timeout_s, lambda: f"{pids} have not come to {self.path}")

    def replace(self, source: Path) -> None:
        """Whoever comes from now on finds the file; those held stay held."""
        draft = self.path.with_name(self.path.name + ".draft")
        shutil.copyfile(source, draft)
        os.replace(draft, self.path)

    def release(self) -> None:
        """Let everybody read the end of the file."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def _opened_by(self, pid: int) -> bool:
        if self._writer < 0:
            try:
                self._writer = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return False  # nobody is there yet
            os.set_inheritable(self._writer, False)
        mine = os.fstat(self._writer)
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                found = os.stat(entry.path)
                if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                    return True
        except OSError:
            pass
        return False


def ever() -> tuple[int, int]:
    """Replicas of the model and rank actors that Ray has started in this cluster, the dead ones among them."""
    from ray._private.state import actors

    found = list(actors().values())
    replicas = [a for a in found if str(a["Name"]).startswith("SERVE_REPLICA::model#")]
    return len(replicas), len([a for a in found if a["ActorClassName"] == "RankActor"])


def holders(cluster: Cluster) -> list[int]:
    """Pids that hold cores on any node of the cluster."""
    from rayneuron.placement.instances import declared
    from rayneuron.placement.ledger import Ledger

    nodes = (cluster.folder / "cores").glob("*")
    return sorted(holder.pid for node in nodes for holder in Ledger(node, declared(4, 4)).holders())
