"""A second engine in this process as the one that computes prompts: all that a prefill pool says, without a socket, and its misfortunes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from rayneuron.engine.engine import Engine
from rayneuron.engine.remote import Absent, Arrived, First, Lent, Loan, Prefill
from rayneuron.types import TokenDelta


@dataclass
class Under:
    """One prompt under way. `fails`: how many more looks until it does, if it does; `late`: looks until its KV moves."""

    prefill: Prefill
    ticket: bytes
    fails: int | None
    late: int
    lent: Lent | None = None
    moved: int = 0  # blocks
    firsts: list[TokenDelta] = field(default_factory=list)
    given: bool = False
    cancelled: bool = False


class Beside:
    """`Prefills` by the engine `there`, for the engine `here`. Each `take` lets the other one run a step. `faults`: how often one fails."""

    def __init__(self, here: Engine, there: Engine, rng: random.Random, faults: float = 0.0, refuses: float = 0.0) -> None:
        self.here, self.there, self.rng, self.faults, self.refuses = here, there, rng, faults, refuses
        self.under: dict[str, Under] = {}
        self.adopted = self.failed = self.cancelled = 0
        here.scheduler.prefills = self

    def wake(self) -> None:
        pass

    def ask(self, prefill: Prefill) -> bool:
        assert prefill.key not in self.under and prefill.known % self.here.capacity.block == 0
        assert len(prefill.blocks) == self.here.capacity.space.width(len(prefill.request.prompt_ids))
        if self.rng.random() < self.refuses:
            return False
        fails = self.rng.randrange(12) if self.rng.random() < self.faults else None
        under = Under(prefill, self.rng.randbytes(16), fails, self.rng.choice([0, 0, 3]))
        self.under[prefill.key] = under
        self.there.add(replace(prefill.request, id=under.ticket.hex()), Loan(under.ticket, lambda lent: self.told(under, lent)))
        return True

    def told(self, under: Under, lent: Lent) -> None:
        before = under.lent
        assert before is None or (lent.settled >= before.settled and lent.blocks[: len(before.blocks)] == before.blocks)
        assert len(lent.blocks) == self.there.capacity.space.width(lent.settled)
        under.lent = lent

    def kept(self, why: str) -> None:
        """As the protocol's."""

    def cancel(self, key: str) -> None:
        if key in self.under:  # else its end has been taken and not been looked at yet
            self.under[key].cancelled = True
            self.cancelled += 1

    def take(self) -> list[First | Arrived | Absent]:
        by_ticket = {under.ticket.hex(): under for under in self.under.values()}
        for delta in self.there.step() if self.there.has_work else ():
            if delta.request_id in by_ticket:
                by_ticket[delta.request_id].firsts.append(delta)
        self.there.check_ledger()
        events: list[First | Arrived | Absent] = []
        for under in list(self.under.values()):
            events += self._look(under)
        return events

    def _look(self, under: Under) -> list[First | Arrived | Absent]:
        key, request = under.prefill.key, under.prefill.request
        events: list[First | Arrived | Absent] = []
        lost = any(delta.finish_reason == "error" for delta in under.firsts) and len(under.firsts) == request.params.n and not under.lent
        if under.cancelled or under.fails == 0 or lost:
            self._spoil(under)
            self._end(under)
            self.failed += 1
            return [Absent(key, "cancelled" if under.cancelled else "a fault")]
        under.fails = None if under.fails is None else under.fails - 1
        if len(under.firsts) == request.params.n and not under.given:
            under.given = True
            events.append(First(key, under.firsts))
        under.late -= 1
        if under.lent is not None and under.late < 0:
            self._move(under, under.lent)
            if under.given and under.lent.settled == len(request.prompt_ids):
                self._end(under)
                self.adopted += 1
                events.append(Arrived(key))
        return events

    def _move(self, under: Under, lent: Lent) -> None:
        first = max(under.moved, under.prefill.known // self.here.capacity.block)
        if first < len(lent.blocks):
            values = self.there.runner.device.kv_read(lent.blocks[first:])
            self.here.runner.device.kv_write(under.prefill.blocks[first : len(lent.blocks)], values)
        under.moved = len(lent.blocks)

    def _spoil(self, under: Under) -> None:
        """A pull that broke has written anything."""
        mine = under.prefill.blocks[under.prefill.known // self.here.capacity.block :]
        if mine:
            self.here.runner.device.kv_write(mine, torch.full_like(self.here.runner.device.kv_read(mine), 1e4))

    def _end(self, under: Under) -> None:
        del self.under[under.prefill.key]
        self.there.abort(under.ticket.hex())
        self.there.unpin(under.ticket)

    def close(self) -> None:
        self.under.clear()
