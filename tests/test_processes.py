"""Which process a pid is, and the end of what others have started: real processes of a shell."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from rayneuron.processes import kill_started_by, process_started, this_process
from tests.serve.scripted import PATIENCE_S, eventually

TWO = "import os, subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"


def two() -> tuple[subprocess.Popen[str], int]:
    """A process and the pid of one that it has started."""
    child = subprocess.Popen([sys.executable, "-c", TWO], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def test_who_is_gone_or_another_is_told() -> None:
    pid, started = this_process()
    assert pid == os.getpid() and process_started(pid) == started > 0
    child = subprocess.Popen(["sleep", "600"])
    assert process_started(child.pid) is not None
    child.kill()
    eventually(lambda: process_started(child.pid) is None, PATIENCE_S)  # a zombie, as nobody has waited for it
    child.wait()


def test_children_and_theirs_end_and_nobody_else() -> None:
    (parent, below), others = two(), subprocess.Popen(["sleep", "600"])
    kill_started_by(parent.pid)
    eventually(lambda: process_started(below) is None, PATIENCE_S)
    assert parent.wait(PATIENCE_S) == 0 and others.poll() is None
    found: list[tuple[subprocess.Popen[str], int]] = []
    let_go = threading.Event()

    def start() -> None:
        found.append(two())
        thread.append(threading.get_native_id())
        let_go.wait()

    thread: list[int] = []
    starting = threading.Thread(target=start)
    starting.start()
    eventually(lambda: bool(thread), PATIENCE_S)
    kill_started_by(os.getpid(), thread[0])
    eventually(lambda: process_started(found[0][1]) is None, PATIENCE_S)
    assert found[0][0].wait(PATIENCE_S) == -9 and others.poll() is None, "of one thread only"
    let_go.set()
    starting.join()
    others.kill()
    others.wait()
