"""A prefill replica in another process that is stopped, goes on, and is killed, with prompts out at every stage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tests.engine.test_fuzz import drain
from tests.serve.scripted import eventually
from tests.transfer.pair import Decoding, at_baseline, open_engine
from tests.transfer.test_pools import ask, prompt

STALL_S, LEASE_S = 0.6, 2.0
COUNT = 20


def start(tiny) -> tuple[subprocess.Popen[str], list[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer.prefill_process", str(tiny), str(LEASE_S)],
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
    with ExitStack() as stack:
        d = Decoding(open_engine(tiny, rows=COUNT), stall_s=STALL_S)
        stack.callback(d.close)
        child, addresses = start(tiny)
        stack.callback(child.kill)
        count = 0

        def met() -> bool:
            d.pulls.meet({"p": addresses})
            return d.pulls.ready == ["p"]

        def run(then, adopted: int) -> float:
            """All of them, with what happens after `adopted` prompts have come; how long they took from then on."""
            nonlocal count
            eventually(met, 20)
            count += 1
            before = d.counts["adopted"]
            named = [ask(f"{r.id}-{count}", r.prompt_ids, 6) for r in requests]
            for request in named:
                d.loop.submit(request)
            eventually(lambda: d.counts["adopted"] >= before + adopted, 30)
            then()
            began = time.monotonic()
            d.heard.wait(named, 30)
            took = time.monotonic() - began
            for request in named:
                deltas = d.heard.out[request.id, 0]
                assert (tuple(t for x in deltas for t in x.token_ids), deltas[-1].finish_reason) == wanted[request.id.split("-")[0]]
            eventually(lambda: at_baseline(d.engine, d.loop), 10, d.engine.snapshot)
            return took

        run(lambda: None, 0)
        assert d.counts["adopted"] >= 15 and not d.counts["failed"]
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
