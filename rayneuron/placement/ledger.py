"""The core ledger of a node: contiguous, aligned, disjoint core sets, held as kernel locks on one byte a core.

One file, one byte a core, open-file-description locks: a run of cores is locked by one system call, all of it or nothing, and the kernel
frees it the moment its owner is gone, SIGKILL included. Unlike classic record locks they outlive other descriptors of the file.
A forked child would share them, so it closes its copy at once; an executed one never gets it (O_CLOEXEC).
Which run to take is `policies.packing.choose`; the ledger locks it, and chooses again when somebody was faster.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import struct
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from rayneuron.errors import Busy, ConfigError
from rayneuron.placement import records
from rayneuron.placement.instances import Instance
from rayneuron.placement.records import Holder
from rayneuron.policies import packing
from rayneuron.processes import process_started

_FLOCK = "hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Grant:
    """A run of cores held by this process until `release`, the end of a `with` block, or the end of the process."""

    def __init__(self, cores: tuple[int, ...], deployment: str, lock: _Lock, record: Path) -> None:
        self.cores = cores
        self.deployment = deployment
        self._lock = lock
        self._record = record

    @property
    def held(self) -> bool:
        """False after `release`, and in a forked child."""
        return self._lock.descriptor >= 0

    def release(self) -> None:
        """Give the cores back. Call it only when nothing can touch them any more; a Neuron process simply ends instead."""
        if self.held:
            self._record.unlink(missing_ok=True)  # before the lock: afterwards the place may carry another owner's record
            self._lock.close()

    def __enter__(self) -> Grant:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Ledger:
    """The cores of one node. Every process that may hold cores of the node must use the same `directory`, a local one.

    `clock` (monotonic) and `sleep` are arguments so that waiting can be tested without waiting.
    """

    def __init__(
        self,
        directory: Path,
        instance: Instance,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.directory = directory
        self.instance = instance
        self._path = directory / "cores.lock"
        self._clock = clock
        self._sleep = sleep

    def free(self) -> frozenset[int]:
        """Cores nobody holds now. Takes no lock, hence never stands in another's way."""
        descriptor = self._open()
        try:
            return frozenset(core for core in range(self.instance.cores) if not _locked(descriptor, core))
        finally:
            os.close(descriptor)

    def take(self, size: int, deployment: str, *, wait_s: float = 0.0, allowed: Collection[int] | None = None) -> Grant:
        """Take `size` cores, out of `allowed` if given (what a plan reserved), waiting up to `wait_s` for processes that are still ending.

        Raises ConfigError where it can never be, Busy where it cannot be now: wanted, free, holders, the nearest that would fit.
        """
        self.instance.check_degree(size)
        within = frozenset(range(self.instance.cores) if allowed is None else allowed)
        if not packing.runs(within, size, self.instance.cores):
            fits = packing.nearest(within, size, self.instance.cores, self.instance.kept)
            raise ConfigError(
                f"{deployment}: no aligned run of {size} cores in {packing.compact(within)} of {self.instance.name}"
                + ("" if allowed is None else ", all that is here or left to us (the container's devices, NEURON_RT_VISIBLE_CORES)")
                + (f"; write tensor_parallel: {fits[0]}" if fits else ""),
                param="tensor_parallel",
            )
        deadline_s, pause_s = self._clock() + wait_s, _FIRST_PAUSE_S
        while True:
            grant = self._attempt(size, deployment, within)
            if grant is not None:
                return grant
            left_s = deadline_s - self._clock()
            if left_s <= 0:
                raise self._refusal(size, deployment, within, wait_s)
            self._sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def holders(self) -> list[Holder]:
        """Who holds what, ascending. Records count only where the lock is held and their process lives; the rest comes from the kernel."""
        held = set(range(self.instance.cores)) - self.free()
        known: list[Holder] = []
        for _, holder in records.read(self.directory):
            if holder is not None and set(holder.cores) <= held and holder.alive:
                known.append(holder)
                held -= set(holder.cores)
        if held:
            for pid, cores in records.lockers(self._path).items():
                if held & set(cores):
                    known.append(Holder(cores, pid, "", 0.0, process_started(pid)))
                    held -= set(cores)
        return sorted(known, key=lambda holder: holder.cores)

    def clean(self) -> list[Path]:
        """Delete records of free cores, and unreadable ones; returns them. A core is locked meanwhile, so no new owner loses its record."""
        gone: list[Path] = []
        for core in sorted(self.free()):
            lock = self._lock(core, 1)
            if lock is not None:
                gone += records.remove(self.directory, [core])
                lock.close()
        return gone

    def _attempt(self, size: int, deployment: str, within: frozenset[int]) -> Grant | None:
        while True:
            start = packing.choose(self.free() & within, size, self.instance.cores, self.instance.kept)
            if start is None:
                return None
            lock = self._lock(start, size)
            if lock is not None:  # else somebody was faster: look again
                return self._record(tuple(range(start, start + size)), deployment, lock)

    def _record(self, cores: tuple[int, ...], deployment: str, lock: _Lock) -> Grant:
        try:
            records.remove(self.directory, cores)
            pid = os.getpid()
            record = records.write(self.directory, Holder(cores, pid, deployment, time.time(), process_started(pid)))
        except BaseException:
            lock.close()
            raise
        return Grant(cores, deployment, lock, record)

    def _lock(self, start: int, size: int) -> _Lock | None:
        lock = _Lock(self._open())  # before the lock is taken: another thread may fork at any moment
        try:
            fcntl.fcntl(lock.descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, size, 0))
        except OSError as problem:
            lock.close()
            if problem.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise ConfigError(f"{self._path} cannot be locked ({problem.strerror}); put the ledger on a local file system") from None
        return lock

    def _open(self) -> int:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o777)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as problem:
            raise ConfigError(f"the core ledger {self._path} cannot be opened: {problem.strerror}{_owner(self._path)}") from None
        if os.fstat(descriptor).st_uid == os.geteuid():
            _open_to_all(self.directory, descriptor)
        return descriptor

    def _refusal(self, size: int, deployment: str, within: Collection[int], waited_s: float) -> Busy:
        free = self.free() & frozenset(within)
        held = self.holders()
        total = self.instance.cores
        text = [f"{deployment} wants {size} of the {total} cores of {self.instance.name}; free: {packing.compact(free)}"]
        if len(within) < total:
            text[0] += f" of {packing.compact(within)}, all that is left to us"
        if len(free) >= size:
            text[0] += f" ({len(free)} cores, but no {size} in one run that starts at a multiple of {size})"
        text.append("held: " + ("; ".join(_describe(holder) for holder in held) or "by a process that cannot be seen from here"))
        fits = packing.nearest(free, size, total, self.instance.kept)
        if fits is not None:
            text.append(f"nearest that fits now: tensor_parallel: {fits[0]} on {packing.compact(range(fits[1], fits[1] + fits[0]))}")
        if waited_s:
            text.append(f"waited {waited_s:g} s for them")
        return Busy(". ".join(text), param="tensor_parallel", retry_after_s=_LONGEST_PAUSE_S)


class _Lock:
    """One open file description that carries the lock; -1 once closed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        # The child shares the description: were its copy left open, the cores would stay taken after the parent's death.
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _locked(descriptor: int, core: int) -> bool:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, core, 1, 0)
    answer = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
    return bool(answer[0] != fcntl.F_UNLCK)


def _open_to_all(directory: Path, descriptor: int) -> None:
    """Cores belong to the node, not to a user: others may lock too, and add records, but not delete ours (sticky)."""
    os.fchmod(descriptor, 0o666)
    if directory.stat().st_uid == os.geteuid():
        directory.chmod(0o1777)


def _owner(path: Path) -> str:
    try:
        uid = path.lstat().st_uid
    except OSError:
        return ""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "?"
    return f"; it belongs to {name} (uid {uid}): delete it as that user, or name another directory"


def _describe(holder: Holder) -> str:
    return f"{packing.compact(holder.cores)} by pid {holder.pid} ({holder.deployment or 'left no record; a child?'})"
