"""The seats of a host and what becomes of each: a state machine that is told what was seen and says what is to be done. Pure."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rayneuron.frames import Asked, Standing
from rayneuron.policies import packing, scaling
from rayneuron.policies.seats import HostNode, ScalingLimits, Seat, SeatState, Wish
from rayneuron.policies.starts import expected_s, learned

log = logging.getLogger(__name__)

SILENT_S = 5.0  # a gateway that says nothing for so long wants nothing
FREE_S = 60.0  # for cores that nobody of ours holds any more
ENDED_S = 30.0  # for a process to let go of its cores
BACKOFF_S, MOST_BACKOFF_S = 30.0, 900.0


@dataclass(slots=True)
class HostedModel:
    """A model, by its file, and what has been seen of it."""

    wish: Wish
    weight_bytes: int = 0
    load_s: float = 600.0  # without any progress of a start
    parts: dict[str, float] = field(default_factory=dict)  # of a start
    resident: float = 0.0  # share of its weights in memory
    rate: float = 0.0
    asked_s: float = -math.inf
    unmet_s: float | None = None  # since when it is wanted and not there, those counted that have given up meanwhile
    failures: int = 0
    barred_s: float = -math.inf  # until when nothing is started
    failed: str = ""
    eta_error: float | None = None  # of its last start: how wrong the prediction was, as a part of what it took


@dataclass(slots=True)
class SeatRow:
    """One seat. `since_s`: in this state; `busy_s`, `work_s`: when it was last seen with work, and how much."""

    key: str
    model: str
    node: str
    first: int
    size: int
    state: SeatState
    since_s: float
    busy_s: float
    work_s: float = 0.0
    progress: str = ""
    progress_s: float = 0.0  # when that was said
    eta_s: float | None = None  # as it was when the start began; None: this table has not seen it begin

    def seen(self, now_s: float) -> Seat:
        """As the policy sees it."""
        return Seat(self.key, self.node, self.first, self.size, self.state, now_s - self.since_s, self.work_s, now_s - self.busy_s)


@dataclass(frozen=True, slots=True)
class Action:
    """What is to be done for a seat: bring its application, let its streams end, take it away."""

    what: Literal["start", "drain", "delete"]
    row: SeatRow


class SeatTable:
    """Every seat from its plan to its cores being free. `counts`: starts and dismissals by (model, what)."""

    def __init__(self, models: Mapping[str, HostedModel], limits: ScalingLimits) -> None:
        self.models = dict(models)
        self.limits = limits
        self.rows: dict[str, SeatRow] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.blind = False  # what nodes have is not known in full: what cannot be had now may be there in a moment
        self._heard: dict[bytes, tuple[float, Mapping[str, Asked]]] = {}
        self._moved_s = self._looked_s = -math.inf
        self._eta_s: Mapping[str, float] = {}
        self._reason: Mapping[str, str] = {}

    # What is seen.

    def heard(self, gateway: bytes, asked: Mapping[str, Asked], now_s: float) -> None:
        """What a gateway wants."""
        self._heard[gateway] = (now_s, asked)
        for name, one in asked.items():
            if one.arrived and name in self.models:
                model = self.models[name]
                model.rate += one.arrived / self.limits.horizon_s
                model.asked_s = now_s
        for row in self.rows.values():
            works = [one.busy.get(row.key, 0.0) for _, all_asked in self._heard.values() for one in all_asked.values()]
            row.work_s = max(works, default=0.0)
            if row.work_s:
                row.busy_s = now_s

    def adopt(self, key: str, model: str, node: str, cores: Sequence[int], now_s: float, keep: bool) -> None:
        """A seat that was there before this table: it stays, or ends."""
        state: SeatState = "starting" if keep else "draining"
        self.rows[key] = SeatRow(key, model, node, min(cores), len(cores), state, now_s, now_s)

    def state(self, key: str) -> SeatState | None:
        """Of a seat; None where there is none."""
        row = self.rows.get(key)
        return None if row is None else row.state

    def progress(self, key: str, said: str, now_s: float) -> None:
        """How far a start has come."""
        row = self.rows.get(key)
        if row is not None and row.state == "starting" and row.progress != said:
            row.progress, row.progress_s = said, now_s

    def ready(self, key: str, parts: Mapping[str, float], now_s: float) -> None:
        """A start is over. `parts`: the seconds of its parts, as it measured them."""
        row = self.rows.get(key)
        if row is None or row.state != "starting":
            return
        model, took_s = self.models[row.model], now_s - row.since_s
        if parts and row.eta_s is not None:
            model.parts = learned(model.parts, {"spawn": max(0.0, took_s - sum(parts.values())), **parts})
            model.eta_error = abs(took_s - row.eta_s) / max(took_s, 1e-9)
            log.info("%s is ready after %.1f s; %.1f s were expected", key, took_s, row.eta_s)
        model.failures, model.failed, model.barred_s = 0, "", -math.inf
        self._become(row, "ready", now_s)
        row.busy_s = now_s
        self._count(row.model, "started")

    def lost(self, key: str, now_s: float) -> None:
        """A seat that was ready has no replica: Serve brings it again, on the same cores."""
        row = self.rows.get(key)
        if row is not None and row.state in ("ready", "moving"):
            self._become(row, "starting", now_s)
            row.progress, row.eta_s = "", self.start_s(row.model)

    def failed(self, key: str, why: str, now_s: float) -> list[Action]:
        """A start has failed; the next one waits, ever longer."""
        row = self.rows.get(key)
        if row is None or row.state not in ("starting", "reserved"):
            return []
        model = self.models[row.model]
        model.failed = why
        model.barred_s = now_s + min(BACKOFF_S * 2**model.failures, MOST_BACKOFF_S)
        model.failures += 1
        self._count(row.model, "failed")
        log.error("%s cannot start: %s", key, why)
        if row.state == "reserved":
            del self.rows[key]
            return []
        return [self._end(row, now_s)]

    def drained(self, key: str, now_s: float) -> list[Action]:
        """The streams of a seat that goes have ended."""
        row = self.rows.get(key)
        return [self._end(row, now_s)] if row is not None and row.state == "draining" else []

    # What is to be done.

    def tick(self, nodes: Sequence[HostNode], there: Iterable[str], now_s: float) -> list[Action]:
        """What is to be done now. `nodes`: as their ledgers say; `there`: applications that Serve has."""
        present, free = set(there), {node.name: node.free for node in nodes}
        self._age(now_s)
        actions: list[Action] = []
        for row in list(self.rows.values()):
            actions += self._step(row, free.get(row.node), present, now_s)
        made = scaling.decide(nodes, self.wishes(now_s), self.limits, now_s - self._moved_s)
        self._eta_s, self._reason = made.eta_s, made.reason
        for gone in made.dismiss:
            row = self.rows[gone.key]
            self._count(row.model, gone.why.partition(" ")[0])
            log.info("%s goes: %s", gone.key, gone.why)
            self._become(row, "draining", now_s)
            actions.append(Action("drain", row))
        for bring in made.bring:
            if bring.instead is not None:
                self._become(self.rows[bring.instead], "moving", now_s)
                self._moved_s = now_s
            key = self._key(bring.model, present)
            self.rows[key] = SeatRow(key, bring.model, bring.node, bring.first, bring.size, "reserved", now_s, now_s)
        for row in [row for row in self.rows.values() if row.state == "reserved"]:
            actions += self._begin(row, free.get(row.node, frozenset()), now_s)
        return actions

    def wishes(self, now_s: float) -> list[Wish]:
        """The models as the policy sees them."""
        return [self._wish(name, now_s) for name in self.models]

    def start_s(self, model: str) -> float:
        """What the next start of a model is expected to take."""
        one = self.models[model]
        return expected_s(one.parts, one.weight_bytes, one.resident if not one.parts else 0.0)

    def standings(self) -> dict[str, Standing]:
        """How it stands with each model, for gateways."""
        return {name: self._standing(name) for name in self.models}

    # Inside.

    def _standing(self, name: str) -> Standing:
        rows = [row for row in self.rows.values() if row.model == name]
        seats = [row.key for row in rows if row.state in ("ready", "moving")]
        coming = [row for row in rows if row.state == "starting"]
        eta_s = self._eta_s.get(name, 0.0 if seats else self.start_s(name))
        planned = any(row.state == "reserved" for row in rows)
        state = "ready" if seats else "loading" if coming else "waiting for cores" if planned else "sleeping"
        why = next((row.progress for row in coming if row.progress), "") if coming else self._reason.get(name, "")
        if self.blind and eta_s == math.inf:
            eta_s = self.start_s(name)
        failed = self.models[name].failed
        return Standing(state, seats, [row.key for row in coming], eta_s if eta_s < math.inf else None, why, failed)

    def _wish(self, name: str, now_s: float) -> Wish:
        model = self.models[name]
        asked = [all_asked[name] for _, all_asked in self._heard.values() if name in all_asked]
        waiting = sum(one.waiting for one in asked)
        if any(row.model == name and row.state == "ready" for row in self.rows.values()) or now_s - model.asked_s > self.limits.horizon_s:
            model.unmet_s = None
        elif waiting and model.unmet_s is None:
            model.unmet_s = now_s
        unmet_s = 0.0 if model.unmet_s is None else now_s - model.unmet_s
        return replace(
            model.wish,
            seats=tuple(row.seen(now_s) for row in self.rows.values() if row.model == name),
            waiting=waiting,
            oldest_s=max([unmet_s, *(one.oldest_s for one in asked if one.waiting)]) if waiting else 0.0,
            backlog_s=max([one.backlog_s for one in asked], default=0.0),
            rate=model.rate,
            quiet_s=now_s - model.asked_s,
            start_s=self.start_s(name),
            barred_s=max(0.0, model.barred_s - now_s),
        )

    def _age(self, now_s: float) -> None:
        for gateway, (at_s, _) in list(self._heard.items()):
            if now_s - at_s > SILENT_S:
                del self._heard[gateway]
        if self._looked_s > -math.inf:
            for model in self.models.values():
                model.rate *= math.exp((self._looked_s - now_s) / self.limits.horizon_s)
        self._looked_s = now_s

    def _step(self, row: SeatRow, free: frozenset[int] | None, present: set[str], now_s: float) -> list[Action]:
        """What time alone does to a seat. `free` None: its node is gone."""
        age_s = now_s - row.since_s
        if row.state == "stopping" and row.key not in present:
            ours = free is None or set(row.seen(now_s).cores) <= free
            if ours or age_s > ENDED_S:
                if not ours:
                    cores = packing.compact(row.seen(now_s).cores)
                    log.error("%s has gone, but cores %s of %s are held: see `rayneuron doctor` there", row.key, cores, row.node)
                del self.rows[row.key]
        elif row.state == "stopping" and age_s > ENDED_S:
            return [self._end(row, now_s)]  # it was not heard
        elif free is None and row.state not in ("stopping", "draining"):
            return [self._end(row, now_s)]
        elif row.state == "moving" and not any(
            other.model == row.model and other.state in ("reserved", "starting", "ready") for other in self.rows.values()
        ):
            self._become(row, "ready", now_s)  # nobody comes in its place any more
        elif row.state == "starting" and now_s - max(row.since_s, row.progress_s) > self.models[row.model].load_s:
            return self.failed(row.key, f"no progress after {row.progress or 'it was begun'}", now_s)
        elif row.state == "reserved" and age_s > FREE_S and not self._before(row):
            return self.failed(row.key, f"cores {packing.compact(row.seen(now_s).cores)} of {row.node} are held by others", now_s)
        return []

    def _begin(self, row: SeatRow, free: frozenset[int], now_s: float) -> list[Action]:
        """Start a planned seat, once the ledger says that its cores are free."""
        starting = sum(other.state == "starting" and other.node == row.node for other in self.rows.values())
        if self._before(row):
            row.since_s = now_s
        elif set(row.seen(now_s).cores) <= free and starting < self.limits.starts_at_once:
            row.eta_s = self.start_s(row.model)
            self._become(row, "starting", now_s)
            return [Action("start", row)]
        return []

    def _before(self, row: SeatRow) -> list[SeatRow]:
        """Seats of ours that still have cores of a planned one."""
        mine = set(range(row.first, row.first + row.size))
        others = [other for other in self.rows.values() if other is not row and other.node == row.node and other.state != "reserved"]
        return [other for other in others if mine & set(range(other.first, other.first + other.size))]

    def _end(self, row: SeatRow, now_s: float) -> Action:
        self._become(row, "stopping", now_s)
        return Action("delete", row)

    def _become(self, row: SeatRow, state: SeatState, now_s: float) -> None:
        row.state, row.since_s = state, now_s

    def _key(self, model: str, present: set[str]) -> str:
        """A seat's name is that of its application; a small number, so that Serve's metrics do not grow for ever."""
        return next(key for n in itertools.count() if (key := f"{model}.{n}") not in self.rows and key not in present)

    def _count(self, model: str, what: str) -> None:
        self.counts[model, what] = self.counts.get((model, what), 0) + 1
