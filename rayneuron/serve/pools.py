"""Pools: an engine that computes prompts for others, and one that lets others compute its own; without Ray."""

from __future__ import annotations

import asyncio
import logging
import platform
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rayneuron import config as deployment
from rayneuron import devices, hashing, loading, metrics
from rayneuron.api.adapters import Change
from rayneuron.config import Deployment
from rayneuron.devices.base import KvMemory
from rayneuron.engine.loop import EngineLoop
from rayneuron.engine.remote import Loan
from rayneuron.errors import ConfigError, NotReady, RayNeuronError
from rayneuron.group_config import Pools
from rayneuron.loading import Opened
from rayneuron.news import KvNews
from rayneuron.policies.pools import Rates, measured
from rayneuron.serve import adapters
from rayneuron.serve.health import Heart
from rayneuron.serve.startup import Startup, opened_aside, thread_share
from rayneuron.serve.telemetry import Load, Telemetry, Values
from rayneuron.serve.trace import OnEnd, Tracer
from rayneuron.transfer.base import SHARING
from rayneuron.transfer.layout import KvLayout, layout_of
from rayneuron.transfer.lending import Lender
from rayneuron.transfer.offers import LendingLimits, Offers
from rayneuron.transfer.pulling import Puller
from rayneuron.transfer.pulls import Pulls
from rayneuron.transfer.staging import StagedLends, StagedPrefills, Stages
from rayneuron.types import Request, TokenDelta

log = logging.getLogger(__name__)

SOON_S, LATER_S = 2.0, 10.0  # between two looks for prefill replicas: while something changes, and else
WAITING_CHUNKS = 16  # of prompts at a prefill replica

OpensEngine = Callable[..., Opened]
Addresses = Mapping[str, Sequence[str]]  # prefill replicas by name, and where each is reached


def borrow(config: Deployment, opened: Opened, token: bytes) -> Pulls:
    """Let others compute the prompts of an engine that has no loop yet, as soon as some are known (`follow`)."""
    said = _pools(config)
    layout, pullers, staged = _parts(config, opened, token, 0, None, lends=False)
    local = None if said.local_tokens == "auto" else said.local_tokens
    rates = _rates(opened)
    pulls = Pulls(pullers, layout, token, stall_s=said.stall_s, local_tokens=local, rates=rates, load=opened.engine.snapshot)
    opened.engine.scheduler.prefills = pulls if staged is None else StagedPrefills(pulls, staged, opened.engine.capacity.block)
    return pulls


async def follow(pulls: Pulls, look: Callable[[], Awaitable[Addresses]]) -> None:
    """For ever: tell of the prefill replicas that there are."""
    before: Addresses = {}
    while True:
        found: Addresses = {}
        try:
            found = await look()
        except Exception as wrong:
            log.warning("the prefill replicas did not say where they are: %r", wrong)
        pulls.meet(found)
        steady = bool(found) and found == before and set(pulls.ready) >= set(found)
        before = found
        await asyncio.sleep(LATER_S if steady else SOON_S)


def borrowed(pulls: Pulls) -> Values:
    """What a decode replica's side has to tell."""
    counts = pulls.counts
    return {
        metrics.PREFILLS: {why: float(n) for why, n in pulls.prefills.copy().items()},
        metrics.KV_TRANSFER_BYTES: {(): float(counts["bytes"])},
        metrics.KV_TRANSFER_RETRIES: {(why,): float(counts[why]) for why in ("damaged", "lost", "stale", "other")},
        metrics.EXTERNAL_QUERIES: {(): float(counts["queries"])},
        metrics.EXTERNAL_HITS: {(): float(counts["hits"])},
        metrics.FALLBACKS: {(stage,): float(n) for stage, n in pulls.fallbacks.copy().items()},
    }


class Prefiller:
    """An engine that computes prompts for others: what a replica of the prefill pool is. `open`, then `addresses` say where to ask."""

    def __init__(self, config: Mapping[str, Any] | Deployment, opener: OpensEngine = loading.open_engine, engine_label: str = "0") -> None:
        self.config = deployment.parse(config)
        self.name = self.config.model.served_name
        self.telemetry = Telemetry(self.name, engine_label, self.load)
        self._opener = opener
        self._tracer = Tracer(self.name) if self.config.serving.trace else None
        self._traced: dict[str, OnEnd] = {}
        self._heart = Heart()
        self._engine: EngineLoop | None = None
        self._offers: Offers | None = None

    async def open(self, token: bytes, ip: str | None) -> None:
        """Load and warm the engine, then take those in who show the token. `ip`: of this node, where other nodes may come."""
        startup = Startup(f"{self.name} (prefill)", lambda progress: None)
        config = self.config.model_copy(update={"threads": thread_share(self.config)})
        opened = await opened_aside(partial(self._opener, config, startup.report))
        try:
            await asyncio.to_thread(self._lend, opened, token, ip)
        except BaseException:
            await asyncio.to_thread(opened.engine.close)
            raise
        startup.done(opened.seconds)

    def _lend(self, opened: Opened, token: bytes, ip: str | None) -> None:
        said, epoch = _pools(self.config), secrets.randbits(63)
        capacity = opened.engine.capacity
        waiting = WAITING_CHUNKS * capacity.chunk if said.max_waiting_tokens is None else said.max_waiting_tokens
        limits = LendingLimits(said.lease_s, int(said.max_pinned * capacity.blocks), waiting)
        layout, lenders, staged = _parts(self.config, opened, token, epoch, ip, lends=True)
        self._chosen = opened.chosen
        self._engine = EngineLoop(opened.engine, self._deliver, on_step=self.telemetry.timed)
        lends = self if staged is None else StagedLends(self, staged, self._between)
        self._offers = Offers(lends, layout, lenders, token, epoch, ip, limits)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where decode replicas knock, the nearest first. Raises NotReady."""
        return self._ready()[1].addresses

    def submit(self, request: Request, loan: Loan | None = None) -> None:
        """As the engine's; with a span of its own under the caller's."""
        engine, _ = self._ready()
        if self._tracer is not None:  # before: its first token may be there at once
            self._traced[request.id] = self._tracer.begin(request, {b"traceparent": request.trace.encode()}, "prefill")
        try:
            engine.submit(request, loan)
        except RayNeuronError:
            self._traced.pop(request.id, None)
            raise

    def abort(self, request_id: str) -> None:
        """As the engine's."""
        self._ready()[0].abort(request_id)

    def unpin(self, ticket: bytes) -> None:
        """As the engine's."""
        self._ready()[0].unpin(ticket)

    def news(self, epoch: int, number: int) -> Future[KvNews | None] | None:
        """As the engine's."""
        return self._ready()[0].news(epoch, number)

    async def change_adapters(self, change: Change) -> None:
        """Load or unload an adapter. What is asked for with one that is not here is computed where it was asked for."""
        await adapters.change(self.config, self._ready()[0], change)

    async def replica_forget_prefixes(self) -> int:
        """Empty the prefix cache; how many blocks were known."""
        return await asyncio.wrap_future(self._ready()[0].ask(lambda engine: engine.scheduler.blocks.reset()))

    def load(self) -> Load:
        """The engine's snapshot and the tickets."""
        engine, offers = self._ready()
        ended: dict[tuple[str, ...], float] = {(how,): float(n) for how, n in offers.counts.copy().items()}
        live = offers.phases()
        tickets: dict[tuple[str, ...], float] = {(phase,): float(live[phase]) for phase in ("queued", "running", "offered")}
        told: Values = {metrics.TICKETS: tickets, metrics.TICKETS_ENDED: ended}
        return Load(engine.snapshot(), offers.live, offers.live, None, self._chosen, told=told)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What a scaling policy decides on: the prompts that are to be computed, by tokens, and the share of KV kept for others."""
        engine, offers = self._ready()
        snapshot = engine.snapshot()
        pinned = snapshot.blocks_pinned / snapshot.blocks_total if snapshot.blocks_total else 0.0
        return {"waiting": float(snapshot.waiting), "prompt_tokens": float(offers.unfinished), "kv_used": pinned}

    def stats(self) -> dict[str, Any]:
        """The load, for people."""
        load = self.load()
        tickets = {",".join(labels): n for of in load.told.values() for labels, n in of.items()}
        _, offers = self._ready()
        pinned, total = load.snapshot.blocks_pinned, load.snapshot.blocks_total
        return {"tickets": tickets, "pinned_blocks": pinned, "blocks": total, "strangers": offers.door.refused}

    def check_health(self) -> None:
        """For Serve: raise where the engine is dead or stalled."""
        if self._engine is not None:
            self._heart.check(self._engine, self.config.serving.stall_timeout_s)

    async def drain(self, within_s: float) -> None:
        """Take no more prompts; what is lent is given back by then, or its lease is over."""
        _, offers = self._ready()
        if not await asyncio.to_thread(offers.drain, within_s):
            log.warning("%d tickets were still out when this prefill replica left", offers.live)

    async def close(self) -> None:
        """End what is left and give the engine back."""
        engine, offers = self._engine, self._offers
        self._engine = self._offers = None
        if engine is not None and offers is not None:
            await asyncio.to_thread(offers.close)
            await asyncio.to_thread(engine.close)

    def _between(self, work: Callable[[], None]) -> None:
        """Have something done between two steps. What fails is told here: nobody waits for it."""

        def done(answer: Future[None]) -> None:
            if (wrong := answer.exception()) is not None:
                log.error("KV could not be copied out, and is computed where it was asked for: %r", wrong)

        self._ready()[0].ask(lambda engine: work()).add_done_callback(done)

    def _ready(self) -> tuple[EngineLoop, Offers]:
        if self._engine is None or self._offers is None:
            raise NotReady("the prefill replica is not ready")
        return self._engine, self._offers

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        offers = self._offers
        if offers is not None:
            offers.deliver(deltas)
        for delta in deltas:
            ended = self._traced.pop(delta.request_id, None) if delta.finish_reason is not None else None
            if ended is not None and delta.finish_reason is not None and delta.stamps is not None:
                ended(delta.index, delta.finish_reason, len(delta.token_ids), delta.stamps)


def _rates(opened: Opened) -> Rates | None:
    """What a prompt's token takes here, in the largest prefill step, which is taken for what it takes there too; None: not measured."""
    timing = opened.engine.timing
    if timing is None:
        return None
    profile = timing.profile()
    return measured(profile, profile)


def _pools(config: Deployment) -> Pools:
    if config.pools is None:
        raise ConfigError("this deployment has no pools; write pools: {prefill: {...}}", param="pools")
    return config.pools


def _parts(
    config: Deployment, opened: Opened, token: bytes, epoch: int, ip: str | None, lends: bool
) -> tuple[KvLayout, list[Any], Stages | None]:
    """How an engine's KV lies, what reads or lends the part of each of its workers, and where copies lie if KV itself lies out of reach.
    Raises ConfigError."""
    from rayneuron.group.group import Group
    from rayneuron.group.messages import HandOver

    said, runner = _pools(config), opened.engine.runner
    group = runner if isinstance(runner, Group) else None
    device: Any = getattr(runner if group is None else group.rank.runner, "device", None)
    staged = devices.stage_kv(device, opened.engine.capacity.space.total, shared=lends and said.transport in SHARING)
    memory = devices.kv_memory(staged or device)
    layout: KvLayout = _layout(config, opened, memory, 1 if staged is not None else None)
    how: dict[str, Any] = {"way": said.transport, "streams": said.streams, "stall_s": said.stall_s}
    mine: Any = Lender(memory, token, epoch, ip, way=said.transport) if lends else Puller(memory, layout, token, **how)
    if staged is not None:
        staged.close()  # of what others map the lender has a number of its own
    if group is None:
        return layout, [mine], staged
    return layout, [mine, *group.exchange(HandOver(token=token, layout=layout, lends=lends, epoch=epoch, ip=ip, **how))], staged


def _layout(config: Deployment, opened: Opened, memory: KvMemory, workers: int | None) -> KvLayout:
    dtype = str(opened.chosen.get("dtype", config.dtype))
    return layout_of(
        opened.arch,
        opened.engine.capacity.space,
        memory,
        model=opened.engine.scheduler.model or hashing.fingerprint(opened.path),
        dtype=dtype,
        kv_dtype=config.kv_dtype or dtype,
        quantization=config.quantization or "",
        numerics=f"{config.device} on {platform.machine()}",
        ranks=config.tensor_parallel,
        stages=config.pipeline_parallel,
        workers=workers,
    )
