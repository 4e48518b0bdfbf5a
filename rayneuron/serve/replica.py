"""Replica: starting, serving or leaving; what a Ray Serve replica of one model is, without Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import msgspec

from rayneuron import config as deployment
from rayneuron import keys, loading, metrics
from rayneuron.api.adapters import Change
from rayneuron.config import Deployment, Serving
from rayneuron.engine.loop import EngineLoop
from rayneuron.engine.pressure import pressure
from rayneuron.errors import RayNeuronError
from rayneuron.news import KvNews, Pressure
from rayneuron.policies.cost import Costs
from rayneuron.policies.step_times import flat
from rayneuron.serve import adapters, weights
from rayneuron.serve.flight import Flights
from rayneuron.serve.handles import Handles
from rayneuron.serve.hot import hot
from rayneuron.serve.served import Served, start
from rayneuron.serve.startup import Startup, opened_aside, thread_share
from rayneuron.serve.telemetry import Load, Telemetry
from rayneuron.serve.trace import Tracer
from rayneuron.serve.verbs import Json, Shut, Verbs

log = logging.getLogger(__name__)

PRICES_S = 5.0  # how often what steps take is read anew

Opener = Callable[..., loading.Opened]


class Replica(Handles):
    """Owns one engine. Its methods are what other Ray applications call through a handle; `serve.ingress` puts HTTP in front of it.

    `open` returns when the engine is warm, so a replica is never ready too early. `opener` turns the configuration into an engine.
    """

    state: Literal["starting", "serving", "leaving"] = "starting"
    now: Verbs  # what answers calls in this state
    _costs: Costs | None = None  # of steps, as they were at _priced_s
    _priced_s = 0.0
    _user_config: dict[str, Any] | None = None  # the last that was taken
    _served: Served | None = None  # from the end of the start to the end of everything

    def __init__(self, config: Mapping[str, Any] | Deployment, opener: Opener = loading.open_engine, engine_label: str = "0") -> None:
        self.config = deployment.parse(config)
        self.name = self.config.model.served_name
        self.keys = keys.read(self.config.serving.api_keys or ())
        self.telemetry = Telemetry(self.name, engine_label, self.load)
        self.now = self._shut = Shut("the engine is still loading", self.config.limits)
        self._opener = opener
        self._tracer = Tracer(self.name) if self.config.serving.trace else None

    @property
    def door(self) -> Serving:
        """What the deployment file says of who may call what."""
        return self.config.serving

    def account(self, key: bytes) -> str | None:
        """Whose a key is: nobody's in particular here."""
        return "" if keys.accepts(self.keys, key) else None

    async def open(self) -> None:
        """Load and warm the engine on a thread of its own, then take calls. Whatever was made is given back where it fails."""
        startup = Startup(self.name, self._publish)
        config = self.config.model_copy(update={"threads": thread_share(self.config)})
        opened = await opened_aside(partial(self._opener, config, startup.report))
        try:
            await asyncio.to_thread(self.equip, opened)
        except BaseException:
            await asyncio.to_thread(opened.engine.close)
            raise
        self._served = await start(self.config, opened, self.telemetry, self._tracer, lambda: self.now.limits)
        if self.state == "starting":
            self.state, self.now = "serving", self._served
        startup.done(opened.seconds)

    def equip(self, opened: loading.Opened) -> None:
        """What an engine gets before it runs: nothing more."""

    def leave(self) -> None:
        """Refuse new calls with 503 from now on."""
        self.state = "leaving"
        self.now = self._shut = Shut("the server is shutting down", self.now.limits)

    async def drain(self, within_s: float | None = None) -> None:
        """Leave; running calls finish, those that have not after `within_s` with an error."""
        self.leave()
        if within_s is not None and self._served is not None:
            await self._served.end(within_s, self._shut.refusal)

    async def close(self) -> None:
        """Leave, end what is left and give the engine back."""
        self.leave()
        served, self._served = self._served, None
        if served is not None:
            await served.close()

    @property
    def served(self) -> Served:
        """What is behind the verbs, also while it drains. Raises NotReady before and after."""
        if self._served is None:
            raise self._shut.refusal
        return self._served

    def load(self) -> Load:
        """The engine's snapshot and the calls in flight."""
        return self.served.load()

    @property
    def flights(self) -> Flights:
        """The calls under way. Raises NotReady."""
        return self.served.flights

    @property
    def failed(self) -> bool:
        """Whether a step has failed, so that nothing goes on."""
        return self._served is not None and self._served.engine.error is not None

    def pressure(self, seen: int) -> Pressure:
        """How busy the engine is, as gateways hear it: `seen` is the last of the asking one's orders."""
        served = self._served
        if self.state != "serving" or served is None or not served.engine.alive or not isinstance(opened := served.opened, loading.Opened):
            return Pressure(seen, accepting=False)
        timing, now_s = opened.engine.timing, time.monotonic()
        if self._costs is None or now_s - self._priced_s > PRICES_S:
            held = opened.engine.capacity
            self._costs = Costs(timing.profile() if timing is not None else flat(held.rows, held.length))
            self._priced_s = now_s
        return pressure(opened.engine.scheduler, self._costs, self._costs.profile.output_tokens, seen)

    def taken(self, request_id: str) -> bool:
        """Whether the pressure counts a request in that was submitted."""
        served = self._served
        return served is None or not isinstance(served.engine, EngineLoop) or served.engine.taken(request_id)

    def news(self, epoch: int, number: int) -> asyncio.Future[KvNews | None] | None:
        """What a gateway lacks of the prefixes that are kept here; None where there is nothing new."""
        served = self._served
        if served is None or not isinstance(served.opened, loading.Opened) or not isinstance(served.engine, EngineLoop):
            return None
        told = served.engine.news(epoch, number) if self.config.kv_events else None
        return None if told is None else asyncio.wrap_future(told)

    async def forget_prefixes(self) -> int:
        """Empty the prefix cache; how many blocks were known."""
        engine = self.served.engine
        assert isinstance(engine, EngineLoop)
        return await asyncio.wrap_future(engine.ask(lambda engine: engine.scheduler.blocks.reset()))

    async def change_adapters(self, change: Change) -> None:
        """Load or unload an adapter."""
        engine = self.served.engine
        assert isinstance(engine, EngineLoop)
        await adapters.change(self.config, engine, change)

    async def load_weights(self, path: str, identity: str | None = None) -> str:
        """Go on with the weights of another directory; what they are known by, elsewhere too where that is said."""
        engine = self.served.engine
        assert isinstance(engine, EngineLoop)
        return await weights.change(self.config, engine, path, identity)

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`."""
        return self.telemetry.text()

    def check_health(self) -> None:
        """For Serve: raise where the engine is dead or stalled. A replica that starts or has ended is neither."""
        if self._served is not None:
            self._served.health()

    def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Take hot settings without a restart: all of them, or where one is wrong none. That is said, in the log, on /load and /metrics.

        Raising would make Serve replace a replica that runs well.
        """
        served = self.served
        try:
            changed = hot(self.config, served.opened, user_config, served.telemetry)
        except Exception as wrong:
            refused = wrong.message if isinstance(wrong, RayNeuronError) else f"{type(wrong).__name__}: {wrong}"
            log.error("user_config is refused, what was before holds: %s", refused)
            self._served = replace(served, refused=refused)
        else:
            self._served = replace(served, context=changed.context, limits=changed.limits, refused=None)
            self._user_config = None if user_config is None else dict(user_config)
        if self.state == "serving":
            self.now = self._served
        self.telemetry.series[metrics.USER_CONFIG_REFUSED].set(float(self._served.refused is not None))

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What a scaling policy decides on."""
        load = self.load()
        used, total = load.snapshot.kv_tokens_used, load.snapshot.kv_tokens_total
        return {
            "waiting": float(load.snapshot.waiting),
            "waiting_tokens": float(load.snapshot.waiting_tokens),
            "running": float(load.snapshot.running),
            "sequences": float(load.sequences),
            "kv_used": used / total if total else 0.0,
            "backlog_ms": self.pressure(0).backlog_ms,
        }

    def record_routing_stats(self) -> Json:
        """What a router decides on: the snapshot."""
        return msgspec.to_builtins(self.load().snapshot)

    _publish: Callable[[str], None] = staticmethod(lambda progress: None)  # tells how far the start has come
