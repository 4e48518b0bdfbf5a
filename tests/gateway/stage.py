"""A host in this process: the real arbiter, table and gateway over scripted replicas; cores and Serve are played."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from rayneuron import gateway_config
from rayneuron.config import Deployment
from rayneuron.frames import Card
from rayneuron.gateway.catalogue import Catalogue
from rayneuron.host.arbiter import Arbiter
from rayneuron.host.seats import words_of
from rayneuron.serve.readiness import State
from tests.gateway.fleet import Member, Wired
from tests.serve.scripted import PATIENCE_S, opener_of


class Stage:
    """Where seats are: Serve, and the ledger of one node of `cores`. `gate`: starts wait while it is shut; `broken`: models that cannot
    start; `keeps`: cores that strangers hold."""

    def __init__(self, path: Path, cores: int) -> None:
        self.path, self.cores = path, cores
        self.loop = asyncio.get_running_loop()
        self.gate = asyncio.Event()
        self.gate.set()
        self.slow = asyncio.Event()  # to know that a replica is ready: Serve
        self.slow.set()
        self.broken: dict[str, str] = {}
        self.progress = ""
        self.keeps: set[int] = set()
        self.held: dict[str, set[int]] = {}  # cores, by application
        self.wired: dict[str, Wired] = {}
        self.states: dict[str, State] = {}
        self.told: dict[str, Mapping[str, Any]] = {}
        self.script: dict[str, Any] = {}
        self.given: list[tuple[str, tuple[int, ...]]] = []
        self.refuse: dict[str, int] = {}  # calls of a kind that raise first
        self._tasks: set[asyncio.Task[None]] = set()

    # As `host.seats.Seats`, called on threads.

    def claim(self) -> None:
        self._maybe("claim")

    def start(self, row: Any, config: Deployment) -> None:
        self._maybe("start")
        cores = set(range(row.first, row.first + row.size))
        assert not cores & self._taken(), f"{row.key} is given cores that are held"
        self.held[row.key] = cores
        self.given.append((row.key, tuple(sorted(cores))))
        self.told[row.key] = {"model": row.model, "node": "n", "cores": sorted(cores), "words": words_of(config), "owner": "gateway"}
        self.states[row.key] = State("DEPLOYING", False)
        self.loop.call_soon_threadsafe(self._spawn, self._open(row.key, row.model, config))

    def drain(self, key: str, within_s: float) -> None:
        self._maybe("drain")
        self.told[key] = {**self.told[key], "words": ""}
        for member in self.wired[key].members:
            asyncio.run_coroutine_threadsafe(member.replica.drain(within_s), self.loop).result(within_s + PATIENCE_S)

    def delete(self, key: str) -> None:
        self._maybe("delete")
        self.told.pop(key, None)
        asyncio.run_coroutine_threadsafe(self._end(key), self.loop).result(PATIENCE_S)

    def look(self) -> dict[str, State]:
        return dict(self.states)

    def seconds(self, key: str) -> dict[str, float]:
        return {"weights": 0.1}

    def known(self, key: str) -> Mapping[str, Any] | None:
        told = self.told.get(key)
        return told if told and told["owner"] == "gateway" else None

    # As `host.seats.Keepers`.

    def weights(self, source: str) -> tuple[int, float]:
        return 1000, 1.0

    def warm(self, sources: list[str], most_bytes: int) -> None:
        raise AssertionError("no budget was given")

    def node(self) -> dict[str, dict[str, Any]]:
        left = list(range(self.cores))
        return {"n": {"free": sorted(set(left) - self._taken()), "left": left, "holders": []}}

    # Inside.

    def _taken(self) -> set[int]:
        return {core for cores in self.held.values() for core in cores} | self.keeps

    def _maybe(self, what: str) -> None:
        if self.refuse.get(what):
            self.refuse[what] -= 1
            raise TimeoutError  # with nothing to say, as Ray's are

    def _spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, key: str, model: str, config: Deployment) -> None:
        self.states[key] = State("DEPLOYING", False, progress=self.progress)
        await self.gate.wait()
        if model in self.broken:
            self.held.pop(key, None)  # the process has ended
            self.states[key] = State("DEPLOY_FAILED", False, self.broken[model])
            return
        member = Member(config.model_dump(exclude_unset=True), opener_of(self.path, **self.script), f"{key}#0")
        await member.open()
        self.wired[key] = Wired([member])
        self.wired[key].unknown = not self.slow.is_set()
        await self.slow.wait()
        self.wired[key].unknown = False
        if key in self.states:
            self.states[key] = State("RUNNING", True)

    async def _end(self, key: str) -> None:
        for member in self.wired.pop(key, Wired([])).members:
            await member.close()
        self.states.pop(key, None)
        self.held.pop(key, None)

    async def close(self) -> None:
        self.gate.set()
        self.slow.set()
        for task in list(self._tasks):
            await task
        for key in list(self.states):
            await self._end(key)


class Followed:
    """The way to an application that may not be there."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage, self.name = stage, name

    async def cards(self) -> list[Card]:
        await self.stage.slow.wait()  # as Serve lets a call wait for the first replica
        wired = self.stage.wired.get(self.name)
        return [] if wired is None else await wired.cards()

    def __getattr__(self, what: str) -> Any:
        return getattr(self.stage.wired.get(self.name) or Wired([]), what)


class Watched:
    """The node's keeper."""

    def __init__(self, stage: Stage) -> None:
        self.look, self.weights, self.warm = stage.node, stage.weights, stage.warm


class Hosted:
    """A gateway, or several, over one arbiter."""

    def __init__(self, stage: Stage, config: dict[str, Any], gateways: int) -> None:
        self.stage, self.config = stage, gateway_config.parse(config)
        self.arbiter = self.arise()
        self.catalogues = [Catalogue(self.config, lambda name: Followed(stage, name), str(i), self) for i in range(gateways)]

    def arise(self) -> Arbiter:
        return Arbiter(self.config, self.stage, Watched(self.stage))

    # What gateways call: whichever arbiter is there now.

    async def want(self, blob: bytes) -> bytes:
        return await self.arbiter.want(blob)

    async def describe(self) -> dict[str, Any]:
        return await self.arbiter.describe()

    async def until(self, true: Any) -> None:
        """Wait for a condition; the clock only bounds it."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.005)

    def rows(self) -> dict[str, str]:
        return {key: row.state for key, row in self.arbiter.table.rows.items()}


@contextlib.asynccontextmanager
async def hosted(path: Path, models: dict[str, int], cores: int = 4, gateways: int = 1, **words: Any) -> AsyncIterator[Hosted]:
    """A host of `cores`; `models`: cores of each. `words`: more of the gateway's file."""
    stage = Stage(path, cores)
    listed = [{"name": name, "args": {"model": {"path": str(path)}, "tensor_parallel": size}} for name, size in models.items()]
    scaling = {"min_life_s": 0.3, "drain_s": 1.0, "hold_s": 60.0, **words.pop("scaling", {})}
    said = {"models": listed, "host": {"instance": f"cores:{cores}"}, "explain": True, "scaling": scaling, **words}
    made = Hosted(stage, said, gateways)
    await made.arbiter.open()
    for catalogue in made.catalogues:
        await catalogue.open()
    await made.until(lambda: made.arbiter._nodes and all(entry.standing for c in made.catalogues for entry in c.entries))
    try:
        yield made
    finally:
        for catalogue in made.catalogues:
            await catalogue.close()
        made.arbiter.close()
        await stage.close()
