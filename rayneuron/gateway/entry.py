"""One model behind a gateway: its replicas, and how calls are read for it, from the first card that one shows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from rayneuron import config as deployment
from rayneuron.api import call as api
from rayneuron.api import openai
from rayneuron.config import Limits
from rayneuron.errors import ConfigError, NotReady, RayNeuronError
from rayneuron.frames import Card, Standing
from rayneuron.gateway.asking import desk_limits, shares_of, wishes_of
from rayneuron.gateway.attendance import Attends
from rayneuron.gateway.known import Seen
from rayneuron.gateway.remote import RemoteEngine
from rayneuron.gateway_config import GatewayConfig, Listed, drift
from rayneuron.loading import read_text
from rayneuron.policies import admission
from rayneuron.policies.desk import GatewayDesk
from rayneuron.serve.flight import Flight, Flights
from rayneuron.serve.handles import Handles
from rayneuron.serve.hot import hot
from rayneuron.serve.served import Served, around
from rayneuron.serve.startup import events_per_s
from rayneuron.serve.telemetry import Load, Telemetry, merged
from rayneuron.serve.verbs import NO_HEADERS, Entrance, Json, Shut, Verbs

log = logging.getLogger(__name__)

ROUTE = "x-rayneuron-route"  # the header that says where a reply came from, and why from there
LOOK_S = 5.0  # how often the replicas of a model are asked who they are
CHANGING_S, SOON_S = 60.0, 0.5  # and for so long after one has come or gone
RETRY_S = 2.0  # what a client is told where none is there


class Replicas(Attends, Protocol):
    """The way to the replicas of one application: `gateway.dispatch`."""

    async def cards(self) -> list[Card]:
        """Of every replica that takes calls now."""

    async def all(self, method: str) -> list[object]:
        """What every replica answers to a call of a method, or what it raised."""


@dataclass(frozen=True)
class Routed(Served):
    """A model whose engine is elsewhere. `account`: whose call it is, by its headers; `explain`: every reply says where it came from."""

    account: Callable[[Mapping[bytes, bytes]], str] = lambda headers: ""
    explain: bool = False

    @property
    def remote(self) -> RemoteEngine:
        """That engine."""
        assert isinstance(self.engine, RemoteEngine)
        return self.engine

    def admit(self, call: admission.Demand = admission.LEAST) -> None:
        """As the verb."""
        self.health()
        super().admit(call)

    @contextlib.contextmanager
    def flight(
        self, call: api.Call, arrival_s: float, time_limit_s: float | None, headers: Mapping[bytes, bytes] = NO_HEADERS
    ) -> Iterator[Flight]:
        """As the verb."""
        said: dict[str, str] = {}
        wanted = self.explain or headers.get(b"x-rayneuron-explain") == b"1"
        wishes = wishes_of(headers, self.account(headers), (lambda line: said.update({ROUTE: line})) if wanted else None)
        for request in call.requests:
            self.remote.wishes[request.id] = wishes
            request.trace = headers.get(b"traceparent", b"").decode("latin-1")
        try:
            with super().flight(call, arrival_s, time_limit_s, headers) as flight:
                flight.headers = said
                yield flight
        finally:
            for request in call.requests:
                self.remote.wishes.pop(request.id, None)

    def health(self) -> None:
        """As the verb."""
        if not self.remote.fleet.able:
            raise NotReady(f"no replica of {self.config.model.served_name} is ready", retry_after_s=RETRY_S)


class CatalogueEntry(Handles):
    """A model of the catalogue; a `Server` of its own. Where its application is deployed anew with other words, calls that came before end
    as they began."""

    def __init__(
        self, listed: Listed, gateway: GatewayConfig, replicas: Replicas, label: str, account: Callable[[Mapping[bytes, bytes]], str]
    ) -> None:  # fmt: skip
        self.name = listed.title
        self.door: Entrance = gateway.serving
        self.keys: tuple[bytes, ...] = ()
        self._account = account
        self.telemetry = Telemetry(self.name, label, self.load)
        self.now: Verbs = self._shut("is still loading")
        self.replicas, self.read = replicas, read_text
        self._listed, self._gateway = listed, gateway
        self._eras: dict[str, Routed] = {}  # by the application's words, the newest last
        self._user_config: dict[str, Any] | None = None
        self.left: NotReady | None = None  # why no call is taken any more
        self.standing: Standing | None = None  # of a model that may sleep
        self._looking, self._looks, self._news = asyncio.Lock(), 0, asyncio.Event()
        self._there: set[bytes] = set()  # replicas that were connected at the last look
        self._changed_s = 0.0
        self._doubting: asyncio.Task[None] | None = None

    @property
    def names(self) -> Sequence[str]:
        """What clients call it."""
        era = self.now if isinstance(self.now, Routed) else self.newest
        config = self._listed.deployment if era is None else era.config
        return tuple(dict.fromkeys((*(() if config is None else config.model.served_names), self.name)))

    @property
    def adapters(self) -> Mapping[str, str]:
        """What clients call its adapters."""
        config = self._listed.deployment
        asleep = {} if config is None or config.lora is None else config.lora.modules
        return asleep if self.newest is None else self.newest.context.adapters()

    @property
    def newest(self) -> Routed | None:
        """What answers, or would where a replica was there."""
        return next(reversed(self._eras.values()), None)

    @property
    def engines(self) -> list[RemoteEngine]:
        """Where its calls are."""
        return [era.remote for era in self._eras.values()]

    @property
    def state(self) -> str:
        """As /v1/models says it."""
        if isinstance(self.now, Routed) and self.now.remote.fleet.able:
            return "ready"
        return "loading" if self.standing is None or self.standing.state == "ready" else self.standing.state

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return any(engine.pending() for engine in self.engines)

    def account(self, key: bytes) -> str | None:
        """Who has come this far has shown a key."""
        return ""

    async def keep(self) -> None:
        """Follow the replicas until told to end."""
        while True:
            try:
                await self.look()
            except RayNeuronError as wrong:
                self._close_door(wrong.message)
            except Exception as wrong:  # of Serve, whose controller may be on its way back
                log.warning("%s: its replicas could not be asked: %r", self.name, wrong)
            there = {linked.link.card.epoch for engine in self.engines for linked in engine.fleet.able}
            if there != self._there:
                self._there, self._changed_s = there, time.monotonic()
            await asyncio.sleep(LOOK_S if there and time.monotonic() - self._changed_s > CHANGING_S else SOON_S)

    async def look(self) -> None:
        """Ask who is there now, one at a time: whoever waited while another one began has been told by that."""
        before = self._looks
        async with self._looking:
            if self._looks <= before:
                self._looks += 1
                await self._look()

    async def _look(self) -> None:
        cards = await self.replicas.cards()
        for card in cards:
            key = json.dumps(card.args, sort_keys=True)
            if key not in self._eras:
                self._eras[key] = await self._begin(card)
            if card.user_config != self._user_config:
                self._changed(key, card)
        for key, era in list(self._eras.items()):
            era.remote.fleet.roster([card for card in cards if json.dumps(card.args, sort_keys=True) == key])
            if era is not self.newest and not era.remote.fleet.workers and not len(era.flights):
                del self._eras[key]
                await era.close()
        self._choose()

    def _choose(self) -> None:
        """Have what is connected answer."""
        ready = [era for era in self._eras.values() if era.remote.fleet.able]
        if self.left is not None:
            return
        self.now = ready[-1] if ready else self._shut("has no replica that is ready") if self._eras else self._shut("is still loading")

    def _joined(self) -> None:
        """A replica is connected: what waits for one goes now, not when the next look ends."""
        self._choose()
        self._news.set()
        self._news = asyncio.Event()

    def _doubt(self) -> None:  # Serve has a replica no more, which gets no more orders then
        self._doubting = asyncio.get_running_loop().create_task(self.look())

    async def joined(self, within_s: float) -> None:
        """Wait for a replica to be connected, no longer than so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), within_s)

    async def _begin(self, card: Card) -> Routed:
        config = deployment.parse(card.args)
        if self._listed.name is None and self._listed.args is not None and (key := drift(deployment.parse(self._listed.args), config)):
            raise ConfigError(f"models: {key} of {self.name} is not what its application says; deploy both from one file")
        text, path = await self.read(config)
        flights = Flights(self.telemetry, asyncio.get_running_loop(), events_per_s(config))
        desk = GatewayDesk(desk_limits(self._gateway), Random(), shares_of(self._gateway))
        engine = RemoteEngine(self.replicas, flights.dispatch, text.eos_ids, self._gateway.replay, desk)
        flights.engine = engine
        engine.fleet.card, engine.welcome, engine.attendance.doubt = card, self._joined, self._doubt
        seen = Seen(engine, text, path, card.generation, card.chosen)
        made = around(Routed, config, seen, engine, flights, self.telemetry, None, lambda: self.now.limits, card.user_config)
        self._user_config = card.user_config
        return self._named(made)

    def _named(self, era: Routed) -> Routed:
        """With every name it answers to."""
        config = era.config.model
        names = tuple(dict.fromkeys((*config.served_names, self.name)))
        any_name = config.any_name or (self._gateway.any_name and self._gateway.default == self.name)
        context = replace(era.context, models=names, any_name=any_name)
        return replace(era, context=context, account=self._account, explain=self._gateway.explain)

    def _changed(self, key: str, card: Card) -> None:
        """The replicas have taken another user_config."""
        era = self._eras[key]
        read = hot(era.config, era.opened, card.user_config, self.telemetry)
        self._eras[key] = self._named(replace(era, context=read.context, limits=read.limits))
        self._user_config = card.user_config

    def _shut(self, why: str) -> Shut:
        return Shut(f"{self.name} {why}", Limits.model_construct(retry_after_s=RETRY_S))

    def _close_door(self, why: str) -> None:
        log.error("%s: %s", self.name, why)
        self.now = self._shut(f"cannot be served: {why}")

    def leave(self, why: str) -> None:
        """Refuse new calls from now on."""
        self.now = shut = self._shut(why)
        self.left = shut.refusal

    async def end(self, within_s: float, error: RayNeuronError) -> None:
        """Let the open calls finish for so long, then end the others."""
        await asyncio.gather(*(era.end(within_s, error) for era in self._eras.values()))

    async def close(self) -> None:
        """End what is left."""
        for era in self._eras.values():
            await era.close()

    def load(self) -> Load:
        """What is under way, here and in the replicas. Raises NotReady."""
        if self.newest is None:
            raise self._shut("is still loading").refusal
        return self.newest.load()

    def cards(self) -> list[Json]:
        """As /v1/models lists it."""
        newest = self.newest
        listed = newest.cards() if newest is not None else [openai.model_card(self.name, created=0, max_model_len=0)]
        eta = {} if self.standing is None else {"eta_s": self.standing.eta_s}
        return [{**card, "rayneuron": {"state": self.state, **eta}} for card in listed]

    async def metrics_text(self) -> bytes:
        """The body of `/metrics`: its replicas'."""
        return merged(text for _, text in await self.texts())

    async def texts(self) -> list[tuple[str, bytes]]:
        """What each replica measures."""
        answers = await self.replicas.all("replica_metrics")
        return [answer for answer in answers if isinstance(answer, tuple | list)]  # type: ignore[misc]

    async def forget_prefixes(self) -> int:
        """Empty the prefix caches of all its replicas. Raises where one does not answer."""
        answers = await self.replicas.all("replica_forget_prefixes")
        silent = [answer for answer in answers if not isinstance(answer, int)]
        if silent:
            raise RayNeuronError(f"{len(silent)} replicas of {self.name} did not answer and may still know prefixes: {silent[0]!r}")
        return sum(answer for answer in answers if isinstance(answer, int))
