"""A prefill replica in another process that is stopped, goes on, and is killed, with prompts out at every stage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engine.test_fuzz import drain
from tests.serve.scripted import PATIENCE_S, eventually
from tests.transfer.pair import Decoding, at_baseline, open_engine
from tests.transfer.proxy import Proxy
from tests.transfer.test_pools import ask, prompt

STALL_S, LEASE_S = 0.6, 2.0
COUNT = 20


def start(tiny, *said: str) -> tuple[subprocess.Popen[str], list[str]]:
    """`said`: where it says its KV is read. Where it is asked, in the host and in the network, and where its KV is read."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer.prefill_process", str(tiny), str(LEASE_S), *said],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    return child, child.stdout.readline().split()


def test_a_replica_that_is_frozen_or_killed_costs_time_and_never_a_token(tiny):
    """Twenty prompts out each time. Who is frozen is noticed after `stall_s`, who is killed at once; and who comes back is asked again."""
    requests = [ask(str(i), prompt(20 + 3 * i, i), 6) for i in range(COUNT)]
    solo = open_engine(tiny, rows=1, block=96, chunk=96)
    wanted = {key[0]: out for request in requests for key, out in drain(solo, [request]).items()}
    before_any = mapped()
    with ExitStack() as stack:
        d = Decoding(open_engine(tiny, rows=COUNT), stall_s=STALL_S)
        stack.callback(d.close)
        child, (*addresses, _) = start(tiny)
        stack.callback(child.kill)
        count = 0

        def met() -> bool:
            d.pulls.meet({"p": addresses})
            return d.pulls.ready == ["p"]

        def run(then, adopted: int) -> None:
            """All of them, with what happens after `adopted` prompts have come."""
            nonlocal count
            eventually(met, PATIENCE_S)
            count += 1
            before = d.counts["adopted"]
            named = [ask(f"{r.id}-{count}", r.prompt_ids, 6) for r in requests]
            for request in named:
                d.loop.submit(request)
            eventually(lambda: d.counts["adopted"] >= before + adopted, PATIENCE_S)
            then()
            d.heard.wait(named)
            for request in named:
                deltas = d.heard.out[request.id, 0]
                assert (tuple(t for x in deltas for t in x.token_ids), deltas[-1].finish_reason) == wanted[request.id.split("-")[0]]
            eventually(lambda: at_baseline(d.engine, d.loop), PATIENCE_S, d.engine.snapshot)

        for _ in range(8):  # a machine that stands still looks frozen too
            before = d.counts.copy()
            run(lambda: None, 0)
            if d.counts["failed"] == before["failed"]:
                break
        assert d.counts["adopted"] - before["adopted"] >= 15 and d.counts["failed"] == before["failed"]
        for adopted in (0, 3):
            failed = d.counts["failed"]
            run(lambda: child.send_signal(signal.SIGSTOP), adopted)
            assert d.counts["failed"] > failed
            child.send_signal(signal.SIGCONT)
        before = d.counts["adopted"]
        run(lambda: None, 1)  # it is asked again, and its leases were not in the way
        assert d.counts["adopted"] > before
        run(child.kill, 3)
        child.wait()
        d.loop.submit(ask("alone", prompt(40, 1), 3))  # nobody is there
        d.heard.wait([ask("alone", [1], 1)])
        assert d.pulls.ready == []
        eventually(lambda: mapped() == before_any, PATIENCE_S, mapped)  # of the dead nothing is kept, not even what was being read


def mapped() -> int:
    """Stretches of other processes' KV that this one has mapped: its own it may write."""
    return sum("memfd:rayneuron-kv" in line and " r--s " in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("way", ["shared", pytest.param("sockets", marks=pytest.mark.slow)])
def test_one_that_comes_back_at_the_same_addresses_is_another(tiny, way):
    """Killed with prompts out, at several stages; the next process answers at the very addresses of the one before, with tickets, sums and
    memory of its own. Nothing of the first is taken for the second's."""
    control, data = Proxy("unix:nobody", data=False), Proxy("unix:nobody", data=True)
    solo = open_engine(tiny, rows=1, block=96, chunk=96)
    with ExitStack() as stack:
        d = Decoding(open_engine(tiny, rows=COUNT), way, stall_s=STALL_S)
        for one in (d, control, data):
            stack.callback(one.close)

        def met() -> bool:
            d.pulls.meet({"p": (control.address,)})
            return d.pulls.ready == ["p"]

        epochs, before_any = set(), mapped()
        for turn, adopted in enumerate((0, 4)):
            child, (control.to, _, data.to) = start(tiny, data.address)
            stack.callback(child.kill)
            eventually(met, PATIENCE_S)
            epochs.add(d.pulls._roster.get("p").welcome.epoch)
            requests = [ask(f"{turn}-{i}", prompt(20 + 3 * i, 100 * turn + i), 6) for i in range(COUNT)]
            before = d.counts["adopted"]
            for request in requests:
                d.loop.submit(request)
            eventually(lambda before=before, adopted=adopted: d.counts["adopted"] >= before + adopted, PATIENCE_S)
            child.kill()
            child.wait()
            d.heard.wait(requests)
            for request in requests:
                deltas = d.heard.out[request.id, 0]
                got = tuple(t for x in deltas for t in x.token_ids), deltas[-1].finish_reason
                assert got == drain(solo, [ask("solo", request.prompt_ids, 6)])["solo", 0]
            eventually(lambda: at_baseline(d.engine, d.loop), PATIENCE_S, d.engine.snapshot)
        assert len(epochs) == 2 and d.counts["adopted"] >= 4 and d.counts["failed"] > 0
        eventually(lambda: mapped() == before_any, PATIENCE_S, mapped)
