"""How busy an engine is, as those hear it who choose among engines."""

from __future__ import annotations

from rayneuron.engine.scheduler import Scheduler
from rayneuron.news import Pressure
from rayneuron.policies.cost import Costs, expected
from rayneuron.types import Snapshot


def pressure(scheduler: Scheduler, costs: Costs, output: float, seen: int = 0, accepting: bool = True, longest: int = 0) -> Pressure:
    """That of a scheduler. `output`: tokens of an answer of late; `longest`: of some sequence, where those do not say it themselves."""
    running, waiting, blocks = scheduler.running, scheduler.waiting, scheduler.blocks
    before = []
    for s in running:
        length = len(s.ids) + s.unseen
        if length > longest:
            longest = length
        if s.phase == "prefill":
            before.append((length - s.computed, s.computed))
    decoding, slots_free, space = len(running) - len(before), blocks.free_rows, blocks.space
    if waiting:
        before += [(s.remaining, s.computed) for s in waiting]
    step_ms = costs.decode_ms(decoding, longest) if decoding else 0.0
    slot_ms = 0.0
    holding = [*running, *(s for _, s in scheduler.remote.values() if s is not None)] if scheduler.remote else running
    if holding and not slots_free:
        each = sum(expected(output, s.max_tokens) for s in holding) / len(holding)  # how far one is says little of how far it goes
        slot_ms = each * costs.decode_ms(len(holding), longest) / len(holding)
    return Pressure(
        seen=seen,
        backlog_ms=costs.backlog_ms(before, decoding, longest) if before else 0.0,
        rows=len(running),
        longest=longest,
        slots_free=slots_free,
        slot_ms=slot_ms,
        kv_free=(space.blocks - blocks.used) * space.block,
        step_ms=step_ms,
        waiting=len(waiting),
        accepting=accepting,
    )


def snapshot(scheduler: Scheduler, steps: int, ledger_wrong: int, last_step_s: float, step_started_s: float) -> Snapshot:
    """The load of a scheduler and of its engine; every field is one read."""
    blocks, waiting = scheduler.blocks, scheduler.waiting
    return Snapshot(
        running=len(scheduler.running),
        waiting=len(waiting),
        remote=len(scheduler.remote),
        slots_free=blocks.free_rows,
        slots_total=scheduler.capacity.rows,
        kv_tokens_used=blocks.used * blocks.space.block,
        kv_tokens_total=blocks.total_tokens,
        blocks_free=blocks.free,
        blocks_cached=blocks.cached.count,
        blocks_limbo=len(blocks.limbo),
        blocks_pinned=blocks.pinned,
        blocks_total=blocks.space.blocks,
        prefix_evictions=blocks.evictions,
        waiting_tokens=scheduler.waiting_tokens,
        preemptions=scheduler.preemptions,
        steps=steps,
        ledger_wrong=ledger_wrong,
        last_step_s=last_step_s,
        step_started_s=step_started_s,
    )
