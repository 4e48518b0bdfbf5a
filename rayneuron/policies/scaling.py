"""Which models of a host are awake, and where: one decision over a picture of its cores, seats and demand. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rayneuron.policies import packing
from rayneuron.policies.packing import Blocker, Clearing
from rayneuron.policies.seats import COMING, GOING, Bring, Dismissal, HostDecision, HostNode, ScalingLimits, Seat, SeatState, Wish

HYSTERESIS = 1.5  # what comes must be worth so many times what goes: else two models would push each other out for ever
MOST_MISSED = 3.0  # calls: so that whoever waits for what is always in use waits some starts, not for ever
TARGET_MS = 2000.0  # of work that a replica may have waiting
SHIFTED = 0.2  # of a start, where another seat of the model answers meanwhile


def decide(nodes: Sequence[HostNode], wishes: Sequence[Wish], limits: ScalingLimits, since_move_s: float = math.inf) -> HostDecision:
    """What to do now. `since_move_s`: since a seat was moved only to make a large run whole."""
    board = _Board(nodes, wishes, limits)
    for wish in wishes:
        board.release(wish)
    for wish in sorted(wishes, key=lambda w: (len(w.standing) >= w.least, -w.priority, -w.oldest_s, w.model)):
        wanted = wanted_seats(wish, limits)
        while len(board.wishes[wish.model].standing) < wanted and board.place(board.wishes[wish.model]):
            pass
    if not board.bring and not board.dismiss and since_move_s >= limits.cooldown_s:
        board.mend()
    return HostDecision(tuple(board.bring), tuple(board.dismiss), board.etas(), board.reasons)


def wanted_seats(wish: Wish, limits: ScalingLimits) -> int:
    """Seats a model should have now: none where nobody has asked for long, as many as its work needs else."""
    least = wish.least
    if not wish.waiting and wish.quiet_s > wish.idle_s:
        return least
    asked = math.ceil(wish.backlog_s / limits.target_ttft_s) if wish.backlog_s else 0
    now = max(asked, 1) if wish.waiting else max(asked, min(1, len(wish.standing)))
    return max(least, min(now, wish.max))


def replicas(backlog_ms: Sequence[float], kv_used: Sequence[float], target_ms: float, least: int, most: int) -> int:
    """How many replicas a model of its own application should have: so that each has `target_ms` of work, one more where KV runs out."""
    wanted = math.ceil(sum(backlog_ms) / target_ms) if backlog_ms else least
    if kv_used and max(kv_used) > 0.9:
        wanted = max(wanted, len(kv_used) + 1)
    return max(least, min(wanted, most))


class _Board:
    """The picture while it is decided on."""

    def __init__(self, nodes: Sequence[HostNode], wishes: Sequence[Wish], limits: ScalingLimits) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.wishes = {wish.model: wish for wish in wishes}
        self.limits = limits
        self.bring: list[Bring] = []
        self.dismiss: list[Dismissal] = []
        self.reasons: dict[str, str] = {}

    def release(self, wish: Wish) -> None:
        """Let go what has been replaced, what is idle and what is too much."""
        ready = [seat for seat in wish.standing if seat.state == "ready"]
        for seat in wish.seats:
            if seat.state == "moving" and ready:
                self._go(wish.model, seat.key, "moved")
        wanted, standing = wanted_seats(wish, self.limits), len(wish.standing)
        last_s = wish.idle_s if wanted == 0 else self.limits.cooldown_s
        for seat in sorted(ready, key=lambda seat: (-seat.quiet_s, seat.key)):
            old = seat.age_s >= self.limits.min_life_s and not seat.busy_s
            if standing > wanted and old and seat.quiet_s >= last_s:
                self._go(wish.model, seat.key, "idle" if wanted == 0 else "fewer")
                standing -= 1

    def place(self, wish: Wish) -> bool:
        """Plan one more seat for a model. False where it has to wait, and says why."""
        if wish.barred_s > 0:
            self.reasons[wish.model] = f"its last start failed; the next is tried in {wish.barred_s:.0f} s"
            return False
        found = self._room(wish)
        if found is None:
            return False
        node, made = found
        for key, to in made.moved:
            self._move(node.name, key, to)
        for key in made.away:
            self._go(self._owner(key), key, f"room for {wish.model}")
        self._add(Bring(wish.model, node.name, made.start, wish.size))
        return True

    def mend(self) -> None:
        """Move one idle seat where that makes a run whole for a model that sleeps and has none."""
        missing = {w.size for w in self.wishes.values() if not w.seats}
        for size in sorted(missing, reverse=True):
            for node in self.nodes.values():
                held = [self._held(one, wish) for wish, one in self._on(node.name)]
                idle = [replace(h, away=math.inf) for h in held if self._idle(h.key)]
                if packing.runs(self._unplanned(node), size, node.total) or self._starting(node.name) >= self.limits.starts_at_once:
                    continue
                made = packing.clear(self._unplanned(node), idle, size, node.total, node.sizes)
                if made is not None and len(made.moved) == 1:
                    return self._move(node.name, *made.moved[0])

    def etas(self) -> dict[str, float]:
        """For each model that has no seat that is ready."""
        return {name: self._eta_s(wish) for name, wish in self.wishes.items() if not self._answers(wish)}

    def _answers(self, wish: Wish) -> bool:
        return any(seat.state in ("ready", "moving") for seat in wish.seats)

    def _eta_s(self, wish: Wish) -> float:
        coming = [seat for seat in wish.standing if seat.state in COMING]
        if not coming:
            blocked = self.reasons.get(wish.model) and not wish.barred_s
            return self._soonest_s(wish) + wish.start_s if blocked else wish.barred_s + wish.start_s
        reserved = [self._left_s(seat) + wish.start_s for seat in coming if seat.state == "reserved"]
        return min(reserved + [max(1.0, wish.start_s - seat.age_s) for seat in coming if seat.state == "starting"])

    def _left_s(self, seat: Seat) -> float:
        """Until the cores of a planned seat are free."""
        others = [(w, o) for w, o in self._on(seat.node) if o.key != seat.key and set(o.cores) & set(seat.cores)]
        standing = [wish.start_s for wish, other in others if other.state == "moving"]
        return max([0.0, *standing]) + (min(self.limits.drain_s, max(o.busy_s for _, o in others)) if others else 0.0)

    def _soonest_s(self, wish: Wish) -> float:
        """Until some run could be had where none can be now: when the youngest of those in the way may go."""
        best = math.inf
        for node in self.nodes.values():
            on = self._on(node.name)
            kept = [(w, o) for w, o in on if o.state not in GOING]
            ours = self._unplanned(node) | {core for _, o in on for core in o.cores}
            for start in packing.runs(ours, wish.size, node.total):
                inside = [(w, o) for w, o in kept if set(o.cores) & set(range(start, start + wish.size))]
                if not any(w.pinned or len(w.standing) <= w.least for w, _ in inside):
                    best = min(best, max([0.0, *(self._life_s(w, o) for w, o in inside)]))
        return best

    def _life_s(self, wish: Wish, seat: Seat) -> float:
        """Until a seat may go."""
        coming_s = wish.start_s if seat.state in COMING else 0.0
        return max(0.0, coming_s + self.limits.min_life_s - (seat.age_s if not coming_s else 0.0))

    def _room(self, wish: Wish) -> tuple[HostNode, Clearing] | None:
        """Where a seat of a model goes, and who makes room."""
        best: tuple[float, int, str] | None = None
        found, busy = None, False
        for node in self.nodes.values():
            if self._starting(node.name) >= self.limits.starts_at_once:
                busy = True
                continue
            free = self._unplanned(node)
            held = [self._held(seat, other, wish) for other, seat in self._on(node.name)]
            made = packing.clear(free, held, wish.size, node.total, node.sizes)
            score = None if made is None else (made.cost, len(free), node.name)
            if made is not None and score is not None and (best is None or score < best):
                best, found = score, (node, made)
        if found is None:
            self.reasons[wish.model] = "other models are starting" if busy else f"no run of {wish.size} cores can be had now"
        elif found[1].cost and wish.least <= len(wish.standing) and not self._pays(wish, found[1]):
            self.reasons[wish.model] = f"what has its {wish.size} cores is worth more now"
            return None
        return found

    def _pays(self, wish: Wish, made: Clearing) -> bool:
        """Whether what comes is worth what goes: always where all that goes has less priority."""
        touched = [*made.away, *(key for key, _ in made.moved)]
        if all(self.wishes[self._owner(key)].priority < wish.priority for key in touched):
            return True
        return HYSTERESIS * made.cost < wish.weight * (wish.oldest_s + wish.start_s)

    def _held(self, seat: Seat, owner: Wish, wish: Wish | None = None) -> Blocker:
        """A seat as packing sees it: what it costs to send it away for `wish`, or to move it."""
        if seat.state in GOING:
            return Blocker(seat.key, seat.first, seat.size, 0.0)
        if seat.state in COMING or seat.age_s < self.limits.min_life_s:
            return Blocker(seat.key, seat.first, seat.size, math.inf)
        alone = len(owner.standing) == 1
        work_s = min(seat.busy_s, self.limits.drain_s)
        # Calls that will miss it in the time that whoever comes has its cores at least; each waits for a start.
        used = min(MOST_MISSED, owner.rate * (owner.start_s + self.limits.min_life_s))
        above = wish is not None and owner.priority > wish.priority and (seat.busy_s or owner.waiting)
        kept = owner.pinned or len(owner.standing) <= owner.least or above or (wish is not None and owner.model == wish.model)
        away = math.inf if kept else owner.weight * used * owner.start_s * (1.0 if alone else SHIFTED) + work_s
        # Whoever moves answers until the other stands, so that a kept one may be moved too.
        elsewhere = SHIFTED * owner.start_s + work_s
        return Blocker(seat.key, seat.first, seat.size, away, elsewhere if owner.barred_s <= 0 else math.inf)

    def _idle(self, key: str) -> bool:
        seat = next(s for w in self.wishes.values() for s in w.seats if s.key == key)
        return seat.state == "ready" and not seat.busy_s and seat.quiet_s >= self.limits.cooldown_s

    def _unplanned(self, node: HostNode) -> set[int]:
        """Free cores that no seat is planned for."""
        return set(node.free) - {core for _, seat in self._on(node.name) for core in seat.cores}

    def _on(self, node: str) -> list[tuple[Wish, Seat]]:
        return [(wish, seat) for wish in self.wishes.values() for seat in wish.seats if seat.node == node]

    def _starting(self, node: str) -> int:
        return sum(seat.state in COMING for _, seat in self._on(node))

    def _owner(self, key: str) -> str:
        return next(wish.model for wish in self.wishes.values() if any(seat.key == key for seat in wish.seats))

    def _add(self, bring: Bring) -> None:
        self.bring.append(bring)
        wish = self.wishes[bring.model]
        seat = Seat(f"{bring.model} planned {len(self.bring)}", bring.node, bring.first, bring.size, "reserved")
        self.wishes[bring.model] = replace(wish, seats=(*wish.seats, seat))

    def _move(self, node: str, key: str, to: int) -> None:
        owner = self.wishes[self._owner(key)]
        self._state(owner.model, key, "moving")
        self._add(Bring(owner.model, node, to, owner.size, instead=key))

    def _go(self, model: str, key: str, why: str) -> None:
        """A seat goes; one that goes already only makes room later."""
        seat = next(seat for seat in self.wishes[model].seats if seat.key == key)
        if seat.state not in ("draining", "stopping") and not (seat.state == "moving" and why != "moved"):
            self.dismiss.append(Dismissal(key, why))
            self._state(model, key, "draining")

    def _state(self, model: str, key: str, state: SeatState) -> None:
        wish = self.wishes[model]
        seats = tuple(replace(seat, state=state) if seat.key == key else seat for seat in wish.seats)
        self.wishes[model] = replace(wish, seats=seats)
