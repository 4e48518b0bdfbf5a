"""How busy an engine is, as those hear it who choose among engines."""

from __future__ import annotations

from rayneuron.engine.scheduler import Scheduler
from rayneuron.news import Pressure
from rayneuron.policies.cost import Costs, expected


def pressure(scheduler: Scheduler, costs: Costs, output: float, seen: int = 0, accepting: bool = True) -> Pressure:
    """That of a scheduler. `output`: tokens of an answer of late."""
    running, waiting, blocks = scheduler.running, scheduler.waiting, scheduler.blocks
    decoding = [s for s in running if s.remaining <= 1]
    longest = max([s.length for s in running], default=0)
    rest = [s for s in running if s.remaining > 1]
    before = [(s.remaining, s.computed) for s in (*rest, *waiting)]
    step_ms = costs.decode_ms(len(decoding), longest) if decoding else 0.0
    slot_ms = 0.0
    if not blocks.free_rows:
        left = sorted(max(1.0, expected(output, s.max_tokens) - s.generated) for s in running)
        slot_ms = left[min(len(waiting), len(left) - 1)] * costs.decode_ms(len(running), longest)
    return Pressure(
        seen=seen,
        backlog_ms=costs.backlog_ms(before, len(decoding), longest),
        rows=len(running),
        longest=longest,
        slots_free=blocks.free_rows,
        slot_ms=slot_ms,
        kv_free=blocks.total_tokens - blocks.used * blocks.space.block,
        step_ms=step_ms,
        waiting=len(waiting),
        accepting=accepting,
    )
