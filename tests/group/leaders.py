"""A process that owns a group, to be killed by tests at a stage: prints its workers' pids as they start, then what it has reached."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rayneuron import loading
from rayneuron.config import parse
from rayneuron.group.children import Children


class Told(Children):
    """Children whose pids are told at once."""

    def start(self, invitations: Any, nodes: Any) -> None:
        super().start(invitations, nodes)
        print("workers", *self.pids.values(), flush=True)


def main() -> None:
    """`python -m tests.group.leaders CONFIG STAGE`: stop at the stage, or say so at every step from then on."""
    config, stage = parse(json.loads(sys.argv[1])), sys.argv[2]

    def report(reached: str, done: int, total: int) -> None:
        if {"weights": "load", "graphs": "warm"}[reached] == stage:
            print("there", flush=True)
            time.sleep(600)

    opened = loading.open_engine(config, report, processes=Told())
    from rayneuron.engine.loop import EngineLoop
    from rayneuron.types import Request, SamplingParams

    def stepped(info: Any) -> None:
        snapshot = opened.engine.snapshot()
        if stage == "prefill" and snapshot.steps == 3:  # of seven chunks
            print("there", flush=True)
        if stage == "decode" and snapshot.steps == 12:
            print("there", flush=True)

    loop = EngineLoop(opened.engine, lambda deltas: None, on_step=stepped)
    for number in range(1000):
        loop.submit(Request(id=str(number), prompt_ids=[5] * 100, params=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
        while loop.pending():
            time.sleep(0.01)


if __name__ == "__main__":
    main()
