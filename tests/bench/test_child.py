"""A child answers, fails loudly, freezes, and never outlives its owner."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import machine
import pytest
from child import Child, ChildFailed

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench"

PEER = """
import os, sys, time
sys.path.insert(0, {peers!r})
from answer import answer

def open_peer(settings):
    if settings.get("broken"):
        raise ValueError("no such model")
    def run(prompts, new):
        print("noise of a library on standard output")
        if new == 0:
            raise RuntimeError("no tokens wanted")
        if new < 0:
            os._exit(3)
        return [(time.perf_counter(), [i + 1] * len(prompts)) for i in range(new)]
    return run

answer(open_peer)
"""


def state(pid: int) -> str:
    """The state letter of a process, "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def wait_for_state(pid: int, wanted: str, timeout_s: float = 60.0) -> str:
    deadline = time.monotonic() + timeout_s
    while state(pid) not in wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return state(pid)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "peer.py"
    path.write_text(PEER.format(peers=str(BENCH / "peers")))
    return path


@pytest.fixture
def child(script: Path) -> Iterator[Child]:
    child = Child("fake", [sys.executable, str(script), "{}"], os.environ)
    yield child
    child.close()


def test_answers(child: Child) -> None:
    assert child.ask({})["load_s"] >= 0
    began = time.perf_counter()
    steps = child.ask({"prompts": [[1], [2]], "new": 3})["steps"]
    took_s = time.perf_counter() - began
    assert [counts for _, counts in steps] == [[1, 1], [2, 2], [3, 3]]
    assert all(0 <= at <= took_s for at, _ in steps), "times count from the request"


def test_an_error_is_reported_and_the_child_goes_on(child: Child) -> None:
    with pytest.raises(ChildFailed, match="RuntimeError: no tokens wanted"):
        child.ask({"prompts": [[1]], "new": 0})
    assert len(child.ask({"prompts": [[1]], "new": 2})["steps"]) == 2


def test_death_is_reported(child: Child) -> None:
    with pytest.raises(ChildFailed, match="fake ended"):
        child.ask({"prompts": [[1]], "new": -1})


def test_a_peer_that_cannot_open(script: Path) -> None:
    child = Child("fake", [sys.executable, str(script), '{"broken": true}'], os.environ)
    try:
        with pytest.raises(ChildFailed, match="ValueError: no such model"):
            child.ask({})
    finally:
        child.close()


def test_freeze_and_thaw(child: Child) -> None:
    child.ask({})
    child.freeze()
    assert wait_for_state(child.session, "T") == "T"
    assert child.ask({"prompts": [[1]], "new": 1})["steps"], "asking thaws"
    assert state(child.session) in ("S", "R", "D")


def test_a_frozen_child_can_be_closed(script: Path) -> None:
    child = Child("fake", [sys.executable, str(script), "{}"], os.environ)
    child.ask({})
    child.freeze()
    child.close()
    assert state(child.session) == ""


def test_a_frozen_child_ends_with_its_owner(script: Path) -> None:
    """The owner is killed and can clean up nothing."""
    owner = f"""
import os, sys, time
sys.path.insert(0, {str(BENCH)!r})
from child import Child
child = Child("fake", [sys.executable, {str(script)!r}, "{{}}"], os.environ)
child.ask({{}})
child.freeze()
print(child.session, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert wait_for_state(pid, "T") == "T"
    process.kill()
    process.wait()
    process.stdout.close()
    assert wait_for_state(pid, "Z") in ("", "Z")


def mine() -> machine.Process:
    """This process among all of them."""
    return next(p for p in machine.processes() if p.pid == os.getpid())


def test_cpu_seconds_are_the_kernels() -> None:
    gc.collect()  # children another test forgot are waited for now: their time would count as ours
    outer = time.process_time()
    threads_before, before = sum(machine.thread_cpu_s(os.getpid())), mine()
    inner = time.process_time()
    while time.process_time() - inner < 0.3:
        pass
    after, threads_after = mine(), sum(machine.thread_cpu_s(os.getpid()))
    most_s = time.process_time() - outer  # to look at every process of a machine takes time too
    assert 0.3 - 0.05 <= after.cpu_s - before.cpu_s <= most_s + 0.05
    assert after.session == os.getsid(0)
    assert 0.3 - 0.05 <= threads_after - threads_before <= most_s + 0.05


def test_watch_tells_ours_from_others() -> None:
    """A child in a session of its own counts as others until its session is named."""
    burn = "import time\nprint(flush=True)\nwhile input():\n began = time.process_time()\n"
    burn += " while time.process_time() - began < 1.0: pass\n print(flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    for _ in range(5):  # what others do between the two looks is in it, the more the longer this machine stands still there
        alone, with_child = machine.Watch([]), machine.Watch([process.pid])
        began = time.perf_counter()
        process.stdin.write("again\n")
        process.stdin.flush()
        process.stdout.readline()
        took_s = time.perf_counter() - began
        difference = (alone.others() - with_child.others()) * took_s
        if difference == pytest.approx(1.0, abs=0.2):
            break
    process.communicate("\n")
    assert difference == pytest.approx(1.0, abs=0.2)
