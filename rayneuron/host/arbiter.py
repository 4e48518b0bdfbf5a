"""Arbiter: carries out what the table of seats decides, and tells gateways how it stands. One for all gateways of an application."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rayneuron import settings
from rayneuron.config import Deployment
from rayneuron.frames import Standing, Wanting
from rayneuron.gateway_config import GatewayConfig, hosted_model
from rayneuron.host.seats import words_of
from rayneuron.host.table import Action, HostedModel, SeatTable
from rayneuron.placement.instances import instance
from rayneuron.policies.seats import HostNode, ScalingLimits, Wish
from rayneuron.serve.readiness import State, cause

log = logging.getLogger(__name__)

TICK_S = 0.1
WARM_S = 10.0
GIB = 2**30


class SeatCalls(Protocol):
    """Where seats are: `host.seats.Seats`, of Ray."""

    def start(self, row: Any, config: Deployment) -> None: ...

    def drain(self, key: str, within_s: float) -> None: ...

    def delete(self, key: str) -> None: ...

    def look(self) -> dict[str, State]: ...

    def seconds(self, key: str) -> dict[str, float]: ...

    def known(self, key: str) -> Mapping[str, Any] | None: ...


class Watchers(Protocol):
    """What nodes say: `host.seats.Keepers`, of Ray."""

    def look(self) -> dict[str, dict[str, Any]]: ...

    def weights(self, source: str) -> tuple[int, float]: ...

    def warm(self, sources: list[str], most_bytes: int) -> None: ...


class Arbiter:
    """Belongs to an event loop; what blocks is done on threads."""

    def __init__(self, config: GatewayConfig, stage: SeatCalls, watchers: Watchers, clock: Callable[[], float] = time.monotonic) -> None:
        assert config.host is not None
        self.config, self._stage, self._watchers, self._clock = config, stage, watchers, clock
        self._kind = instance(config.host.instance)
        self._configs = {name: hosted_model(config, name) for name in config.hosted}
        said, once = config.scaling, config.host.starts_at_once
        limits = ScalingLimits(said.min_life_s, said.cooldown_s, said.horizon_s, said.drain_s, said.target_ttft_ms / 1e3, once)
        self.table = SeatTable({name: self._hosted(name) for name in config.hosted}, limits)
        self._nodes: dict[str, dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._warmed_s = 0.0

    def _hosted(self, name: str) -> HostedModel:
        listed, config = self.config.hosted[name], self._configs[name]
        words = (listed.min, listed.max, listed.pinned, listed.priority, listed.weight, listed.idle_s)
        parts = _remembered().get(words_of(config), {})
        return HostedModel(Wish(name, config.tensor_parallel, (), *words), load_s=config.group.load_s, parts=parts)

    async def open(self) -> None:
        """Find the seats that are there: those of the same words stay, the others end. Then keep the host until told to end."""
        there = await asyncio.to_thread(self._stage.look)
        for key in there:
            said = await asyncio.to_thread(self._stage.known, key)
            if said is None or key.rpartition(".")[0] != said["model"]:
                continue
            keep = said["model"] in self._configs and said["words"] == words_of(self._configs[said["model"]])
            if said["model"] in self._configs:
                self.table.adopt(key, said["model"], said["node"], said["cores"], self._clock(), keep)
            if not keep:
                self._spawn(self._leave(key))
        self._spawn(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("the host could not be looked at; trying again")
            await asyncio.sleep(TICK_S)

    async def look(self) -> None:
        """Once: see, decide, do."""
        told, there = await asyncio.gather(asyncio.to_thread(self._watchers.look), asyncio.to_thread(self._stage.look))
        self._nodes, now_s = told, self._clock()
        actions: list[Action] = []
        for key, row in list(self.table.rows.items()):
            state = there.get(key)
            if state is None:
                if row.state in ("ready", "moving"):
                    self.table.rows.pop(key, None)  # somebody else has deleted it
            elif row.state == "starting" and state.status == "RUNNING" and state.ready:
                self.table.ready(key, await self._seconds(key), self._clock())
                self._remember(row.model)
            elif row.state == "starting" and state.status == "DEPLOY_FAILED":
                actions += self.table.failed(key, cause(state.message), now_s)
            elif row.state == "starting":
                self.table.progress(key, state.progress, now_s)
            elif not state.ready:
                self.table.lost(key, now_s)
        nodes = [HostNode(name, self._kind.cores, frozenset(one["free"]), self._kind.kept) for name, one in told.items()]
        for action in actions + self.table.tick(nodes, there, self._clock()):
            self._spawn(self._do(action))
        if self._clock() - self._warmed_s > WARM_S:
            self._warmed_s = self._clock()
            await asyncio.to_thread(self._warm)

    async def _do(self, action: Action) -> None:
        row = action.row
        try:
            if action.what == "start":
                await asyncio.to_thread(self._stage.start, row, self._configs[row.model])
            elif action.what == "drain":
                await self._leave(row.key)
            else:
                await asyncio.to_thread(self._stage.delete, row.key)
        except Exception as wrong:
            log.exception("%s: %s did not work", row.key, action.what)
            if action.what == "start":
                for then in self.table.failed(row.key, str(wrong).splitlines()[0], self._clock()):
                    await self._do(then)

    async def _leave(self, key: str) -> None:
        """Streams end, then the application goes."""
        try:
            await asyncio.to_thread(self._stage.drain, key, self.table.limits.drain_s)
        except Exception as wrong:
            log.warning("%s did not say that its streams have ended: %r", key, wrong)
        if self.table.rows.get(key) is None:
            return await asyncio.to_thread(self._stage.delete, key)
        for action in self.table.drained(key, self._clock()):
            await self._do(action)

    async def _seconds(self, key: str) -> dict[str, float]:
        try:
            return await asyncio.to_thread(self._stage.seconds, key)
        except Exception as wrong:
            log.warning("%s does not say what its start took: %r", key, wrong)
            return {}

    def _warm(self) -> None:
        """See how much of each model is in memory, and read ahead what will be woken first, within the budget."""
        sleeping = []
        for wish in self.table.wishes(self._clock()):
            model = self.table.models[wish.model]
            model.weight_bytes, model.resident = self._watchers.weights(self._configs[wish.model].model.source)
            if not wish.standing:
                sleeping.append((wish.rate * wish.start_s, wish.model))
        assert self.config.host is not None
        budget = int(self.config.host.page_cache_gib * GIB)
        cold = [name for _, name in sorted(sleeping, reverse=True) if self.table.models[name].resident < 0.99]
        if budget and cold:
            self._watchers.warm([self._configs[name].model.source for name in cold], budget)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _remember(self, model: str) -> None:
        file = _starts_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**_remembered(), words_of(self._configs[model]): self.table.models[model].parts}))

    def close(self) -> None:
        """Look no more; the seats stay."""
        for task in self._tasks:
            task.cancel()

    # What gateways ask.

    async def want(self, blob: bytes) -> bytes:
        """What a gateway wants (frames.Wanting); how it stands with each model."""
        said = msgspec.msgpack.decode(blob, type=Wanting)
        self.table.heard(said.gateway, said.models, self._clock())
        standings: dict[str, Standing] = self.table.standings()
        return msgspec.msgpack.encode(standings)

    async def describe(self) -> dict[str, Any]:
        """Nodes, cores, seats, models and what they wait for, for people."""
        now_s = self._clock()
        wishes = {wish.model: wish for wish in self.table.wishes(now_s)}
        seats = [
            {
                "seat": row.key, "model": row.model, "node": row.node, "cores": list(range(row.first, row.first + row.size)),
                "state": row.state, "for_s": round(now_s - row.since_s, 1), "busy_s": row.work_s, "progress": row.progress,
            }
            for row in self.table.rows.values()
        ]  # fmt: skip
        models = {
            name: {
                **msgspec.to_builtins(standing), "cores": self.table.models[name].wish.size, "rate": self.table.models[name].rate,
                "start_s": round(self.table.start_s(name), 1), "guessed": not self.table.models[name].parts,
                "resident": round(self.table.models[name].resident, 3), "held": wishes[name].waiting,
                "eta_error": self.table.models[name].eta_error,
            }
            for name, standing in self.table.standings().items()
        }  # fmt: skip
        counts = [{"model": model, "what": what, "count": count} for (model, what), count in self.table.counts.items()]
        nodes = {name: {"instance": self._kind.name, "cores": self._kind.cores, **one} for name, one in self._nodes.items()}
        return {"nodes": nodes, "seats": seats, "models": models, "counts": counts}


def _starts_file() -> Path:
    return settings.cache_dir() / "starts.json"


def _remembered() -> dict[str, dict[str, float]]:
    """What starts took before, by the words of their models."""
    try:
        found: dict[str, dict[str, float]] = json.loads(_starts_file().read_text())
        return found
    except (OSError, ValueError):
        return {}
