"""Ray's workers as forks of a process that has imported what they need: else each is a second of imports, one after the other.

Two processes answer. One has what Serve's own actors need, and becomes the first workers, which are those. The other goes on to import what
an engine needs, and becomes all that come later. Nothing runs in either but imports: no thread, no connection.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import runpy
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from rayneuron import devices, settings
from rayneuron.serve.fork_client import PEER

FIRST = 2  # Serve's controller and its proxy
SERVES = ("ray.serve._private.controller", "ray.serve._private.proxy", "ray.serve._private.replica", "uvicorn", "rayneuron.serve.app")
ENGINES = ("rayneuron.engine.engine", "rayneuron.structured", "rayneuron.group.opening", "rayneuron.text.tokenizer", "tokenizers")
JOB = "01000000"  # of the first driver of a Ray
BACKLOG = 1024
PR_SET_PDEATHSIG = 1
OBJECTS = (700, 10, 10)  # Python's own: new ones before garbage is looked for


def begin(device: str) -> str:
    """Start both, which end with this process; the engine's device is known. Where `fork_client` asks them, which is no file."""
    sys.stdout.flush()
    sys.stderr.flush()
    address, caller = f"@rayneuron-{secrets.token_hex(16)}", os.getpid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address.replace("@", "\0"))
    listener.listen(BACKLOG)
    if "ray" not in sys.modules and os.fork() == 0:  # it could not be told any more: workers start by themselves
        _end_after(_answer, listener, caller, devices.imports(device))
    listener.close()
    return address


def _answer(listener: socket.socket, caller: int, device: Sequence[str]) -> None:
    _fate_shared(caller)
    os.setpgid(0, 0)  # Ctrl-C is for the one that started us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    # Read as Ray is imported. Workers end with the process named here; that their raylet has ended they see by its socket.
    settings.export({"RAY_JOB_ID": JOB, "RAY_RAYLET_PID": str(caller)})
    with _undrawn():
        _import(SERVES)
    if _drawn():  # forks would go on with the same random numbers: workers start by themselves
        return
    import_module("ray._raylet").setproctitle("rayneuron::forks")
    reading, writing = os.pipe()
    first = os.getpid()
    if os.fork() == 0:
        _fate_shared(first)
        settings.export({"OMP_NUM_THREADS": "1"})  # as Ray has it in its workers; what computes says how many it takes
        _import([*device, *ENGINES] if device else [])
        os.read(reading, 1)  # the other has had its share
        _fork(listener, None)
    _fork(listener, FIRST)
    os.write(writing, b"\0")
    signal.pause()


def _import(names: Sequence[str]) -> None:
    for name in names:
        try:
            import_module(name)
        except ImportError:  # a Ray that has it elsewhere imports it in its worker
            continue


@contextmanager
def _undrawn() -> Iterator[None]:
    """Classes of actors that are declared meanwhile get numbers of the system: Ray's own generator is seeded where it is used first."""
    from ray import actor

    kept = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: kept(os.urandom(kept.size())))
    try:
        yield
    finally:
        actor.ActorClassID = kept


def _drawn() -> bool:
    """Whether two forks draw the same from Ray's generator."""
    from ray import NodeID

    drawn = []
    for _ in range(2):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, NodeID.from_random().binary())
            os._exit(0)
        os.close(writing)
        drawn.append(os.read(reading, NodeID.size()))
        os.close(reading)
    return drawn[0] == drawn[1]


def _fate_shared(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _fork(listener: socket.socket, most: int | None) -> None:
    """Become `most` workers, None: all that are asked for."""
    gc.freeze()  # what forks share stays shared
    made = 0
    while most is None or made < most:
        asking, _ = listener.accept()
        with asking:
            try:
                command, standard, client = _asked(asking)
            except (OSError, ValueError):
                continue  # whoever asked has ended, or gets no answer and starts by itself
            if os.fork() == 0:
                listener.close()
                _end_after(_become, asking, command, standard, client)
            made += 1
            for descriptor in standard:
                os.close(descriptor)


def _asked(asking: socket.socket) -> tuple[list[str], list[int], Path]:
    """The command of a worker, its standard streams, and where the system tells of its client. Raises OSError, ValueError."""
    pid, user, _ = PEER.unpack(asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    if user != os.getuid():
        raise ValueError("somebody else")
    _, standard, _, _ = socket.recv_fds(asking, 1, 3)
    if len(standard) != 3:
        raise ValueError("a client without standard streams")
    return os.fsdecode(b"".join(iter(lambda: asking.recv(65536), b""))).split("\0"), standard, Path(f"/proc/{pid}")


def _become(asking: socket.socket, command: Sequence[str], standard: Sequence[int], client: Path) -> None:
    """The worker that Ray meant to start: its streams, its environment, its place among processes."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    pairs = (pair.partition("=") for pair in os.fsdecode((client / "environ").read_bytes()).split("\0") if pair)
    variables = {name: value for name, _, value in pairs}
    if variables.get("RAY_JOB_ID") != JOB:
        return  # for another driver's work: the client has no answer, and starts by itself
    settings.become(variables)
    import_module("ray._raylet").Config.initialize("")  # read as Ray was imported, before `ray.init` has said whether it asks for a token
    os.chdir((client / "cwd").readlink())
    Path("/proc/self/oom_score_adj").write_text((client / "oom_score_adj").read_text())
    os.setpgid(0, os.getpgid(int(client.name)))
    status = dict(line.split(":", 1) for line in (client / "status").read_text().splitlines())
    blocked = int(status["SigBlk"], 16)
    signal.pthread_sigmask(signal.SIG_SETMASK, {number for number in signal.valid_signals() if blocked >> (number - 1) & 1})
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger().handlers.clear()  # what the command line has set up for itself
    logging.getLogger("rayneuron").setLevel(logging.NOTSET)
    gc.set_threshold(*OBJECTS)
    if "numpy.random" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own is seeded anew in every fork
    asking.sendall(b"\0")
    asking.close()
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


def _end_after(work: Callable[..., None], *arguments: Any) -> NoReturn:
    """Do it and end as an interpreter does, without what the process this is a fork of has still to do."""
    code = 0
    try:
        work(*arguments)
    except SystemExit as wanted:
        code = wanted.code if isinstance(wanted.code, int) else wanted.code is not None
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
