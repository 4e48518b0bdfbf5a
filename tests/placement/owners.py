"""Real processes that take cores: what the ledger's tests start, stop and kill."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rayneuron.errors import RayNeuronError
from rayneuron.placement.instances import instance
from rayneuron.placement.ledger import Ledger

ANSWER_S = 60.0  # a deadline, not a wait: answers come in milliseconds


class Owner:
    """One process. It answers a take with the visible list or the refusal, then lives until told otherwise."""

    def __init__(self, directory: Path, name: str, kind: str = "inf2.48xlarge") -> None:
        # A fork server: each owner is a real process of its own, made in milliseconds and without this process's threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.placement.owners"])
        self._pipe, theirs = context.Pipe()
        self.name = name
        self.process = context.Process(target=_own, args=(theirs, str(directory), name, kind), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, verb: str, *arguments: Any) -> Any:
        self.send(verb, *arguments)
        return self.answer()

    def send(self, verb: str, *arguments: Any) -> None:
        self._pipe.send((verb, *arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), f"{self.name} does not answer"
        return self._pipe.recv()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(ANSWER_S)
        assert self.process.exitcode == -signal.SIGKILL

    def leave(self) -> None:
        """End by itself, without releasing."""
        self.send("leave")
        self.process.join(ANSWER_S)
        assert self.process.exitcode == 0

    def finish(self) -> None:
        """Release, then end."""
        assert self.ask("release") == "released"
        self.leave()


def _own(pipe: Connection, directory: str, name: str, kind: str) -> None:
    ledger = Ledger(Path(directory), instance(kind))
    grants: list[Any] = []
    while True:
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            return
        if verb == "leave":
            os._exit(0)
        if verb == "take":
            try:
                grants.append(ledger.take(arguments[0], name))
                pipe.send(("granted", ",".join(map(str, grants[-1].cores))))
            except RayNeuronError as error:
                pipe.send((type(error).__name__, str(error)))
        elif verb == "release":
            grants.pop().release()
            pipe.send("released")
        else:
            pipe.send(_LIFE[verb]())


def _fork() -> int:
    """A child by os.fork, as multiprocessing makes them."""
    child = os.fork()
    if child == 0:
        signal.pause()
    return child


def _bare_fork() -> int:
    """A child made behind Python's back, as a C library would."""
    child = ctypes.CDLL(None).fork()
    if child == 0:
        while True:
            signal.pause()
    return int(child)


def _execute() -> int:
    """An executed child that inherits every inheritable descriptor."""
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False).pid


def _become_nobody() -> int:
    os.setuid(65534)
    return os.getuid()


_LIFE = {"become_nobody": _become_nobody, "fork": _fork, "bare_fork": _bare_fork, "execute": _execute}
