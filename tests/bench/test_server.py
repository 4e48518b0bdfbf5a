"""A server is all it started, also what hides its environment, and nothing of it runs while it is frozen."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from server import Server

# The child has none of the server's environment, as a process that writes its title over it.
PARENT = """
import subprocess, sys, time
hidden = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], env={}, stdout=subprocess.PIPE)
hidden.stdout.readline()
print(hidden.pid, flush=True)
time.sleep(600)
"""


def states(server: Server) -> dict[int, str]:
    return {p.pid: p.state for p in server.processes()}


def test_whoever_hides_its_environment_is_frozen_and_ended_too(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    server = Server("parent", lambda port: [sys.executable, "-c", PARENT], {}, folder)
    deadline = time.monotonic() + 60
    while not server.log_tail().strip() and time.monotonic() < deadline:
        time.sleep(0.01)
    hidden = int(server.log_tail())
    assert set(states(server)) == {server.session, hidden}
    server.freeze()
    while set(states(server).values()) != {"T"} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(states(server).values()) == {"T"}
    server.close()
    assert not server.processes()
