"""Facts of this machine, and who used its CPU time (Linux, /proc; standard library only)."""

from __future__ import annotations

import gc
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

SWITCH_S = 0.0002  # between threads of an interpreter, as every replica has it (serve/deployed.py, which imports Ray)
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


def facts() -> dict[str, str | int | float]:
    """What a reader needs to judge a figure: processor, cores, memory, versions."""
    info = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    )
    flags = set(info.get("flags", "").split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": f"{info.get('model name', platform.machine())} (family {info.get('cpu family', '?')}, model {info.get('model', '?')})",
        "cores": len(os.sched_getaffinity(0)),
        "flags": " ".join(f for f in TELLING_FLAGS if f in flags),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version for name in ("torch", "transformers", "ray") if (version := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment; `cpu_s` includes children it has waited for. State "Z": it has ended and nobody has asked how."""

    pid: int
    state: str
    session: int
    name: str
    cpu_s: float


def processes() -> list[Process]:
    """All processes of this machine. `man 5 proc`: name is field 2, state 3, session 6, utime, stime, cutime, cstime 14 to 17."""
    found = []
    for folder in os.listdir("/proc"):
        if not folder.isdigit():
            continue
        try:
            text = Path("/proc", folder, "stat").read_text()
        except OSError:
            continue  # it ended while we were reading
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        found.append(Process(int(folder), fields[0], int(fields[3]), head.partition("(")[2], sum(map(int, fields[11:15])) * TICK_S))
    return found


def environment(pid: int) -> str:
    """The environment a process was started with; "" where it has ended or is not ours to read."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def command(pid: int) -> str:
    """The command line or title of a process; "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def thread_cpu_s(pid: int) -> list[float]:
    """CPU seconds of every thread of a process."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            fields = Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found.append((int(fields[11]) + int(fields[12])) * TICK_S)
    return found


def busy_s() -> float:
    """CPU seconds all processes of this machine have used since it started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) * TICK_S


class Watch:
    """How many cores processes outside the given sessions (and this process) kept busy since `start`."""

    def __init__(self, sessions: Collection[int]) -> None:
        self._sessions = frozenset(sessions)
        self._from = self._read()

    def others(self) -> float:
        """Cores, averaged since the beginning; about 0 on a quiet machine."""
        now, busy, mine = self._read()
        before, busy_before, mine_before = self._from
        return max(0.0, ((busy - busy_before) - (mine - mine_before)) / max(now - before, TICK_S))

    def facts(self) -> dict[str, str | int | float]:
        """`facts()`, and what others used meanwhile."""
        return facts() | {"cores used by others": round(self.others(), 2)}

    def _read(self) -> tuple[float, float, float]:
        here = os.getpid()
        mine = sum(p.cpu_s for p in processes() if p.pid == here or p.session in self._sessions)
        return time.perf_counter(), busy_s(), mine


def prefer(session: int) -> None:
    """Let one session's processes run before everybody else's (as nice -15); needs root.

    Where the kernel groups tasks by session (sched_autogroup), `nice` alone only counts inside a session.
    """
    Path(f"/proc/{session}/autogroup").write_text("-15")
    os.setpriority(os.PRIO_PGRP, session, -15)


def rerun_preferred() -> int:
    """Run this very command again without --urgent, in a preferred session of its own; its exit code."""
    command = [sys.executable, *(argument for argument in sys.argv if argument != "--urgent")]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            prefer(process.pid)
            return process.wait()
        finally:
            process.terminate()


def begin(urgent: bool) -> None:
    """What comes before anything is measured in this process; where it is `urgent`, that is done by another one, and this one ends."""
    if urgent:
        raise SystemExit(rerun_preferred())


def settle() -> None:
    """Have this process as a replica's is before it serves: threads wait little for each other, and what start-up made is not collected."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()


def leave_cleanly_when_told() -> None:
    """Turn SIGTERM into SystemExit, so that whoever ends a benchmark also ends what it started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
