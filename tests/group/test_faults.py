"""A rank or the leader killed at every stage of a group without Ray: told in time, nobody left, cores free."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rayneuron import loading
from rayneuron.config import parse
from rayneuron.errors import WorkerLost
from rayneuron.group.children import Children
from rayneuron.placement.instances import instance
from rayneuron.placement.ledger import Ledger
from rayneuron.processes import process_started
from tests.cluster.faults import held
from tests.group.test_group import PATIENT, SMALL, TOLD_S, children, nothing_stays  # noqa: F401

ROOT = Path(__file__).parents[2]
PROMPT = [5] * 100  # seven chunks of 16
WIDE = {**SMALL, "prefill_chunk_tokens": 16, "buckets": SMALL["buckets"] | {"context_encoding": [16]}, "group": PATIENT,
        "tensor_parallel": 2, "pipeline_parallel": 2, "instance": "cores:8"}  # fmt: skip


def gone(pids: list[int], within_s: float = TOLD_S) -> None:
    """None of the processes is left at the end of that time."""
    until = time.monotonic() + within_s
    while left := [pid for pid in pids if process_started(pid) is not None]:
        assert time.monotonic() < until, f"{left} have not ended"
        time.sleep(0.01)


def free(tmp_path: Path) -> None:
    """Nobody holds a core. A process whose first thread has ended may keep its locks until the last of its threads has."""
    for node in (tmp_path / "cores").glob("*"):
        ledger = Ledger(node, instance("cores:8"))
        wait_until(lambda ledger=ledger: ledger.free() == set(range(8)))
        assert ledger.holders() == []


class Kept(Children):
    """Children whose pids stay known after their end."""

    def __init__(self) -> None:
        super().__init__()
        self.ever: dict[int, int] = {}
        self.blind = False

    def start(self, invitations: Any, nodes: Any) -> None:
        super().start(invitations, nodes)
        self.ever = dict(self.pids)

    def gone(self) -> Mapping[int, str]:
        """Who has ended; nobody where the news is late, as it may be from a cluster."""
        return {} if self.blind else super().gone()


@pytest.mark.parametrize("blind", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_rank_killed_after_its_hello(blind: bool, tiny: Path, tmp_path: Path) -> None:
    """Worker 0 is held by its chat template while the others come; one of them ends before it is given a place."""
    template, processes, problems = tmp_path / "template.jinja", Kept(), []
    config = parse({"model": {"path": str(tiny), "chat_template": str(template)}, **WIDE})
    processes.blind = blind

    def open_it() -> None:
        try:
            loading.open_engine(config, processes=processes)
        except WorkerLost as problem:
            problems.append(str(problem))

    with held(template) as hold:
        opener = threading.Thread(target=open_it)
        opener.start()
        hold.wait([os.getpid()])
        wait_until(lambda: processes.ever and all(_joined(pid) for pid in processes.ever.values()))
        os.kill(processes.ever[2], signal.SIGKILL)
    opener.join(TOLD_S)
    assert not opener.is_alive()
    assert len(problems) == 1 and "worker 2, rank 0 of stage 1" in problems[0], problems
    gone(list(processes.ever.values()), 0)
    free(tmp_path)


def _joined(pid: int) -> bool:
    """Whether a worker has said hello: right afterwards it watches its leader."""
    try:
        return any(os.readlink(entry.path) == "anon_inode:[pidfd]" for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def wait_until(true: Callable[[], Any], within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_killed_in_the_middle_of_a_prefill(victim: int, tiny: Path, tmp_path: Path) -> None:
    """Three chunks of seven are done and the fourth begins."""
    from rayneuron.engine.loop import EngineLoop
    from rayneuron.types import Request, SamplingParams

    processes, lost = Kept(), []
    opened = loading.open_engine(parse({"model": {"path": str(tiny)}, **WIDE}), processes=processes, on_lost=lost.append)
    ended, times, errors = threading.Event(), [], []

    def deliver(deltas: list[Any]) -> None:
        assert all(not delta.token_ids for delta in deltas), "no token before the end of the prompt"
        errors.extend(delta.error for delta in deltas if delta.error)
        times.append(time.monotonic())
        ended.set()

    def stepped(info: Any) -> None:
        if opened.engine.snapshot().steps == 3:
            os.kill(processes.ever[victim], signal.SIGKILL)
            times.append(time.monotonic())

    loop = EngineLoop(opened.engine, deliver, on_step=stepped)
    loop.submit(Request(id="0", prompt_ids=PROMPT, params=SamplingParams(temperature=0.0, max_tokens=4)))
    assert ended.wait(60)
    assert times[1] - times[0] < TOLD_S
    assert len(errors) == 1 and f"worker {victim}," in errors[0], errors
    loop.close()
    assert len(lost) == 1
    gone(list(processes.ever.values()), 0)
    free(tmp_path)


@pytest.fixture
def leader(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `tests.group.leaders`."""
    started: list[subprocess.Popen[str]] = []

    def start(stage: str, model: Path = tiny, **more: Any) -> subprocess.Popen[str]:
        config = {"model": {"path": str(model), **more}, **WIDE}
        command = [sys.executable, "-m", "tests.group.leaders", json.dumps(config), stage]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYNEURON_LEDGER": str(tmp_path / "cores")}
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


LATER = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("rendezvous", "load", "warm", "prefill")]  # four processes each


@pytest.mark.parametrize("stage", ["place", "decode", *LATER])
def test_the_leader_killed(stage: str, leader: Callable[..., subprocess.Popen[str]], tiny: Path, tmp_path: Path) -> None:
    """SIGKILL of worker 0: the others end by themselves and the cores are free. Place: all have come, nobody was told its place."""
    template = tmp_path / "template.jinja"
    with held(template) as hold:
        process = leader(stage, **({"chat_template": str(template)} if stage == "place" else {}))
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[0] == "workers"
        workers = [int(word) for word in words[1:]]
        if stage == "place":
            hold.wait([process.pid])
            wait_until(lambda: all(_joined(pid) for pid in workers))
        elif stage != "rendezvous":
            assert process.stdout.readline() == "there\n"
        assert all(process_started(pid) is not None for pid in workers)
        process.kill()
        process.wait()
    gone(workers)
    free(tmp_path)
