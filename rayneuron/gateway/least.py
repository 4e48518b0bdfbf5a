"""Who goes next, and where: first come, first served, to the least loaded; stands where `policies.desk` will."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from rayneuron.news import Pressure


@dataclass(slots=True)
class Ask:
    """One request that wants a worker; `avoid`: workers it has been lost on."""

    key: int
    sequences: int
    front: bool = False
    avoid: frozenset[int] = frozenset()
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Send:
    """An order that goes now."""

    key: int
    worker: int
    number: int


@dataclass(slots=True)
class _Worker:
    rows: int
    number: int = 0
    pressure: Pressure = field(default_factory=Pressure)
    booked: dict[int, tuple[int, int]] = field(default_factory=dict)  # key -> number, sequences
    accepting: bool = True

    def load(self) -> float:
        unseen = sum(sequences for number, sequences in self.booked.values() if number > self.pressure.seen)
        return (self.pressure.rows + self.pressure.waiting + unseen) / self.rows


class Desk:
    """Holds who waits and who is where; takes the time, does nothing by itself."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Ask] = OrderedDict()
        self._workers: dict[int, _Worker] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def join(self, worker: int, rows: int) -> None:
        self._workers[worker] = _Worker(rows)

    def drain(self, worker: int) -> None:
        self._workers[worker].accepting = False

    def offer(self, ask: Ask, now_s: float) -> None:
        self._waiting[ask.key] = ask
        if ask.front:
            self._waiting.move_to_end(ask.key, last=False)

    def heard(self, worker: int, pressure: Pressure, now_s: float) -> None:
        self._workers[worker].pressure = pressure

    def ended(self, key: int, tokens: int, now_s: float) -> None:
        self._waiting.pop(key, None)
        for worker in self._workers.values():
            worker.booked.pop(key, None)

    def lost(self, worker: int, now_s: float) -> list[int]:
        gone = self._workers.pop(worker, None)
        return [] if gone is None else list(gone.booked)

    def next(self, now_s: float) -> list[Send]:
        sends = []
        for key, ask in list(self._waiting.items()):
            there = {w: held for w, held in self._workers.items() if held.accepting and held.pressure.accepting}
            able = [w for w in there if w not in ask.avoid] or list(there)
            if not able or ask.not_before_s > now_s:
                continue
            chosen = min(able, key=lambda w: (there[w].load(), there[w].number))
            held = there[chosen]
            held.number += 1
            held.booked[key] = (held.number, ask.sequences)
            del self._waiting[key]
            sends.append(Send(key, chosen, held.number))
        return sends
