"""Who holds cores: records that owners leave beside the lock, checked against what the kernel says.

A record is only a name tag. Whether a core is taken is decided by the lock alone, so a record that outlived its owner means nothing.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rayneuron.processes import process_started


@dataclass(frozen=True, slots=True)
class Holder:
    """One owner of a run of cores. `since_s` is Unix time; `started` the owner's start in kernel ticks: a reused pid is not blamed."""

    cores: tuple[int, ...]
    pid: int
    deployment: str
    since_s: float
    started: int | None = None

    @property
    def alive(self) -> bool:
        """True while the very process that wrote the record runs (a zombie does not)."""
        return process_started(self.pid) == self.started is not None


def write(directory: Path, holder: Holder) -> Path:
    """Leave a record; visible whole or not at all."""
    path = directory / f"{holder.cores[0]}-{holder.cores[-1]}.{holder.pid}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(
        json.dumps(
            {
                "first": holder.cores[0], "last": holder.cores[-1], "pid": holder.pid, "deployment": holder.deployment,
                "since_s": holder.since_s, "started": holder.started,
            }
        )
    )  # fmt: skip
    os.replace(draft, path)
    return path


def read(directory: Path) -> Iterator[tuple[Path, Holder | None]]:
    """All records with their files; None for a file that cannot be read as one."""
    for path in sorted(directory.glob("*.json")):
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise ValueError("no regular file")
            r = json.loads(path.read_text())
            cores = tuple(range(int(r["first"]), int(r["last"]) + 1))
            started = r["started"]
            yield path, Holder(cores, int(r["pid"]), str(r["deployment"]), float(r["since_s"]), None if started is None else int(started))
        except FileNotFoundError:
            continue  # its owner has just released
        except (OSError, ValueError, KeyError, TypeError):
            yield path, None


def remove(directory: Path, cores: Collection[int]) -> list[Path]:
    """Delete the records that touch `cores`; for one who holds their locks, hence knows that nobody else does."""
    gone = []
    for path, holder in read(directory):
        if holder is None or set(holder.cores) & set(cores):
            try:
                path.unlink(missing_ok=True)
                gone.append(path)
            except OSError:
                continue  # another user's, in a sticky directory: ignored by readers, since its process is dead
    return gone


def lockers(lock: Path) -> dict[int, tuple[int, ...]]:
    """pid -> locked cores, from the kernel: every process we may look at that has the lock file open and a range of it locked.

    Finds what a record cannot: a forked child, or a process whose record is gone. Other users' processes are invisible unless we are root.
    """
    target = os.path.realpath(lock)
    found: dict[int, tuple[int, ...]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            cores = _locked_by(process, target)
            if cores:
                found[int(process.name)] = tuple(sorted(cores))
    return found


def _locked_by(process: Path, target: str) -> set[int]:
    cores: set[int] = set()
    try:
        for entry in os.scandir(process / "fd"):
            if os.readlink(entry.path) != target:
                continue
            for line in (process / "fdinfo" / entry.name).read_text().splitlines():
                if line.startswith("lock:"):
                    first, last = line.split()[-2:]
                    cores.update(range(int(first), int(last) + 1) if last.isdigit() else ())
    except OSError:
        pass  # ended meanwhile, or not ours to look at
    return cores
