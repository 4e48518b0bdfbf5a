"""Whether an engine lives and goes on; of any replica that holds one."""

from __future__ import annotations

import time

from rayneuron.errors import RayNeuronError
from rayneuron.serve.seams import Computes


class Heart:
    """Remembers when an engine was last seen without work."""

    def __init__(self) -> None:
        self._idle_s = 0.0

    def check(self, engine: Computes, limit_s: float) -> None:
        """Raise where the engine is dead, or has had work for so long without finishing a step. Takes no lock."""
        if not engine.alive:
            raise RayNeuronError(f"the engine has stopped: {engine.error or 'its thread ended'}")
        snapshot = engine.snapshot()
        if not engine.pending():
            self._idle_s = time.monotonic()
            return
        still_s = time.monotonic() - max(snapshot.last_step_s, snapshot.step_started_s, self._idle_s)
        if still_s > limit_s:
            raise RayNeuronError(f"the engine has work but has not finished a step for {still_s:.0f} s")
